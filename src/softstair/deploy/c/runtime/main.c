/* Reads examples, @NAME@_INPUTS numbers of @NAME@_TYPE each, and prints a line for each: its class,
 * the classes of its positions, or its values.
 *
 *   @name@ [--bits] [FILE]
 *
 * --bits prints the class and the scores, or the integers that the values stand for; they are equal
 * on all machines. Without a file it reads the standard input. Compiled with -DSOFTSTAIR_TRACE it
 * writes the result of every node instead, in 32-bit words: the number of the node, the number of
 * its values, and the values.
 */
#include <stdio.h>
#include <string.h>

#include "@name@.h"

#ifdef SOFTSTAIR_TRACE
void softstair_trace(int32_t value);

void softstair_trace(int32_t value) { fwrite(&value, sizeof value, 1, stdout); }
#endif

static @NAME@_TYPE input[@NAME@_INPUTS];
static int32_t results[@COUNT@];

static void print(int bits) {
    const char *before = "";
#ifdef @NAME@_CLASSES
    printf("%ld", (long)@name@_run(input, results));
    before = " ";
#else
    @name@_run(input, results);
#ifdef @NAME@_PLACES
    static int32_t classes[@NAME@_PLACES];
    @name@_classes(results, classes);
    for (int i = 0; i < @NAME@_PLACES; i++, before = " ") {
        printf("%s%ld", before, (long)classes[i]);
    }
#else
    static const double scales[] = @NAME@_SCALES;
    static const int shapes[][2] = @NAME@_SHAPES;
    const double *scale = scales;
    const int32_t *result = results;
    for (size_t n = 0; !bits && n < sizeof shapes / sizeof *shapes; n++) {
        for (int c = 0; c < shapes[n][0]; c++, scale++) {
            for (int i = 0; i < shapes[n][1]; i++, before = " ") {
                printf("%s%.9g", before, *result++ * *scale);
            }
        }
    }
#endif
#endif
    for (int i = 0; bits && i < @COUNT@; i++, before = " ") {
        printf("%s%ld", before, (long)results[i]);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    const int bits = count > 1 && strcmp(arguments[1], "--bits") == 0;
    const char *name = count > 1 + bits ? arguments[1 + bits] : NULL;
    FILE *file = name == NULL ? stdin : fopen(name, "rb");
    size_t size;
    if (file == NULL) {
        fprintf(stderr, "%s cannot be read.\n", name);
        return 2;
    }
    while ((size = fread(input, 1, sizeof input, file)) == sizeof input) {
#ifndef SOFTSTAIR_TRACE
        print(bits);
#else
        @name@_run(input, results);
        (void)print;
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
