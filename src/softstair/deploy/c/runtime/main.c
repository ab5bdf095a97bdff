/* Reads examples, @NAME@_INPUTS numbers of @NAME@_TYPE each, and prints one class per line.
 *
 *   @name@ [--bits] [FILE]
 *
 * --bits also prints the bits of the scores, which are equal on all machines. Without a file it
 * reads the standard input. Compiled with -DSOFTSTAIR_TRACE it writes the result of every node
 * instead, in 32-bit words: the number of the node, the number of its values, and the values.
 */
#include <stdio.h>
#include <string.h>

#include "@name@.h"

#ifdef SOFTSTAIR_TRACE
void softstair_trace(int32_t value);

void softstair_trace(int32_t value) { fwrite(&value, sizeof value, 1, stdout); }
#endif

static void print(int32_t class, const float *scores, int bits) {
    printf("%ld", (long)class);
    for (int i = 0; bits && i < @NAME@_CLASSES; i++) {
        uint32_t word;
        memcpy(&word, &scores[i], sizeof word);
        printf(" %08lx", (unsigned long)word);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    static @NAME@_TYPE input[@NAME@_INPUTS];
    static float scores[@NAME@_CLASSES];
    const int bits = count > 1 && strcmp(arguments[1], "--bits") == 0;
    const char *name = count > 1 + bits ? arguments[1 + bits] : NULL;
    FILE *file = name == NULL ? stdin : fopen(name, "rb");
    size_t size;
    if (file == NULL) {
        fprintf(stderr, "%s cannot be read.\n", name);
        return 2;
    }
    while ((size = fread(input, 1, sizeof input, file)) == sizeof input) {
        const int32_t class = @name@_run(input, scores);
#ifndef SOFTSTAIR_TRACE
        print(class, scores, bits);
#else
        (void)class, (void)print;
#endif
    }
    if (name != NULL) {
        fclose(file);
    }
    if (size != 0) {
        fprintf(stderr, "the last example has %lu bytes and should have %lu.\n",
                (unsigned long)size, (unsigned long)sizeof input);
        return 2;
    }
    return 0;
}
