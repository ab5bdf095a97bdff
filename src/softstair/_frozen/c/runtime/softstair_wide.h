/* Sums of features of any kind with weights of 8, 16 or 32 bits, for the few layers that no other
 * function computes. Partial sums may be beyond 32 bits, where unsigned numbers wrap; sums are not.
 */
#ifndef SOFTSTAIR_WIDE_H
#define SOFTSTAIR_WIDE_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"
#include "softstair_window.h"

typedef struct {
    ss_window window;
    int32_t groups, inputs, outputs; /* inputs and outputs of each group */
    const void *weights;
    int32_t width; /* bytes per weight */
    const ss_features *in;
    const ss_sink *sink;
} ss_wide_sum;

static inline uint32_t ss_wide_dot(const ss_wide_sum *sum, const int32_t *x, int32_t at,
                                   int32_t count) {
    uint32_t total = 0;
    for (int32_t i = 0; i < count; i++) {
        total += (uint32_t)x[i] * (uint32_t)ss_number(sum->weights, sum->width, at + i);
    }
    return total;
}

/* Adds the products of a tap, whose features are at `from`, for `count` outputs from `output` on. */
static inline void ss_wide_tap(const ss_wide_sum *sum, int32_t from, int32_t tap, int32_t output,
                               int32_t count, int32_t *totals) {
    const int32_t row = ss_taps(&sum->window) * sum->inputs;
    const int32_t first = output / sum->outputs * sum->inputs;
    int32_t x[SS_BLOCK];
    for (int32_t c = 0; c < sum->inputs; c += SS_BLOCK) {
        const int32_t inputs = ss_min(SS_BLOCK, sum->inputs - c);
        ss_get_row(sum->in, from, first + c, inputs, x);
        for (int32_t i = 0, at = output * row + tap * sum->inputs + c; i < count; i++, at += row) {
            totals[i] = (int32_t)((uint32_t)totals[i] + ss_wide_dot(sum, x, at, inputs));
        }
    }
}

static inline void ss_sum_wide(const ss_wide_sum *sum) {
    const ss_window *window = &sum->window;
    int32_t totals[SS_BLOCK];
    for (int32_t place = 0; place < ss_places(window); place++) {
        for (int32_t output = 0, count; output < sum->groups * sum->outputs; output += count) {
            count = ss_min(SS_BLOCK, sum->outputs - output % sum->outputs);
            for (int32_t i = 0; i < count; i++) {
                totals[i] = 0;
            }
            for (int32_t tap = 0; tap < ss_taps(window); tap++) {
                const int32_t v = tap / window->kernel_x, u = tap % window->kernel_x;
                const int32_t y = ss_top(window, place) + v * window->dilation_y;
                const int32_t x = ss_left(window, place) + u * window->dilation_x;
                if (ss_inside(window, y, x)) {
                    ss_wide_tap(sum, y * window->width + x, tap, output, count, totals);
                }
            }
            ss_emit_sums(sum->sink, place, 1, output, count, totals);
        }
    }
}

#endif
