/* Startup code of a Cortex-M4, and input and output by semihosting, in place of a C library. */
#include "board.h"

extern uint32_t data_begins[], data_ends[], data_kept[], bss_begins[], bss_ends[], stack_begins[];

void reset(void);
static void fault(void);

static const struct {
    uint32_t *stack;
    void (*handlers[15])(void);
} vectors __attribute__((section(".vectors"), used)) = {
    stack_begins,
    {reset, fault, fault, fault, fault, fault, 0, 0, 0, 0, fault, fault, 0, fault, fault},
};

enum { OPEN = 1, WRITE = 5, READ = 6, COMMAND_LINE = 0x15, LEAVE = 0x20 };
enum { TO_READ = 1, TO_WRITE = 4 };

static int32_t call(int32_t what, const void *with) {
    register int32_t number __asm__("r0") = what;
    register const void *block __asm__("r1") = with;
    __asm__ volatile("bkpt 0xab" : "+r"(number) : "r"(block) : "memory");
    return number;
}

static uint32_t length_of(const char *text) {
    uint32_t length = 0;
    while (text[length] != 0) {
        length++;
    }
    return length;
}

static int32_t open(const char *name, uint32_t mode) {
    const uint32_t block[3] = {(uint32_t)name, mode, length_of(name)};
    return call(OPEN, block);
}

void board_write(const char *text) {
    static int32_t output = -1;
    if (output < 0) {
        output = open(":tt", TO_WRITE); /* the standard output */
    }
    const uint32_t block[3] = {(uint32_t)output, (uint32_t)text, length_of(text)};
    call(WRITE, block);
}

int32_t board_command_line(char *to, uint32_t size) {
    const uint32_t block[2] = {(uint32_t)to, size};
    return call(COMMAND_LINE, block);
}

int32_t board_open(const char *name) { return open(name, TO_READ); }

uint32_t board_read(int32_t file, void *to, uint32_t size) {
    const uint32_t block[3] = {(uint32_t)file, (uint32_t)to, size};
    return size - (uint32_t)call(READ, block);
}

void board_leave(int32_t code) {
    const uint32_t block[2] = {0x20026 /* exit */, (uint32_t)code};
    for (;;) {
        call(LEAVE, block);
    }
}

/* The timer of the core is a 24-bit down counter. */
#define TIMER_CONTROL (*(volatile uint32_t *)0xe000e010U)
#define TIMER_FROM (*(volatile uint32_t *)0xe000e014U)
#define TIMER_NOW (*(volatile uint32_t *)0xe000e018U)

void board_start_timer(void) {
    TIMER_FROM = 0xffffffU;
    TIMER_NOW = 0;
    TIMER_CONTROL = 5;
}

uint32_t board_ticks(void) { return 0xffffffU - TIMER_NOW; }

static void fault(void) {
    board_write("the processor has met a fault.\n");
    board_leave(3);
}

void reset(void) {
    for (uint32_t *to = data_begins, *from = data_kept; to < data_ends;) {
        *to++ = *from++;
    }
    for (uint32_t *to = bss_begins; to < bss_ends;) {
        *to++ = 0;
    }
    board_leave(board_main());
}
