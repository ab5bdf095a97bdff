/* Reads the file on the command line, @NAME@_INPUTS numbers per example, and prints the class and
 * the scores of each, as ./@name@ --bits does, then the ticks of the timer for the last one. Compiled with -DSOFTSTAIR_TRACE it prints the words of the trace first. */
#include "@name@.h"
#include "board.h"

static @NAME@_TYPE input[@NAME@_INPUTS];
static int32_t results[@COUNT@];

static void write_number(uint32_t number, uint32_t base, int32_t digits) {
    char text[12];
    char *at = text + 11;
    *at = 0;
    do {
        *--at = "0123456789abcdef"[number % base];
        number /= base;
        digits--;
    } while (number != 0 || digits > 0);
    board_write(at);
}

#ifdef SOFTSTAIR_TRACE
void softstair_trace(int32_t value);

void softstair_trace(int32_t value) {
    write_number((uint32_t)value, 16, 8);
    board_write("\n");
}
#endif

int32_t board_main(void) {
    static char name[256];
    uint32_t size, ticks = 0;
    const int32_t file = board_command_line(name, sizeof name) < 0 ? -1 : board_open(name);
    if (file < 0) {
        board_write(name);
        board_write(" cannot be read: EXAMPLES must name a file of examples.\n");
        return 2;
    }
    while ((size = board_read(file, input, sizeof input)) == sizeof input) {
        board_start_timer();
#ifdef @NAME@_CLASSES
        const uint32_t class = (uint32_t)@name@_run(input, results);
        ticks = board_ticks();
        write_number(class, 10, 1);
        board_write(" ");
#else
        @name@_run(input, results);
        ticks = board_ticks();
#endif
        for (int32_t i = 0; i < @COUNT@; i++) {
            const uint32_t number = (uint32_t)results[i];
            board_write(i > 0 ? " " : "");
            board_write(results[i] < 0 ? "-" : "");
            write_number(results[i] < 0 ? 0U - number : number, 10, 1);
        }
        board_write("\n");
    }
    if (size != 0) {
        board_write("the last example has ");
        write_number(size, 10, 1);
        board_write(" bytes and should have ");
        write_number(sizeof input, 10, 1);
        board_write(".\n");
        return 2;
    }
    board_write("ticks ");
    write_number(ticks, 10, 1);
    board_write("\n");
    return 0;
}
