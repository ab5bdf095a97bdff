/* Sums of features of any kind with weights of 8, 16 or 32 bits; slow, for the few layers that no
 * other function computes. */
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

static inline int32_t ss_wide_weight(const ss_wide_sum *sum, int32_t at) {
    if (sum->width == 1) {
        return ((const int8_t *)sum->weights)[at];
    }
    if (sum->width == 2) {
        return ((const int16_t *)sum->weights)[at];
    }
    return ((const int32_t *)sum->weights)[at];
}

static inline void ss_sum_wide(const ss_wide_sum *sum) {
    const ss_window *window = &sum->window;
    const int32_t row = ss_taps(window) * sum->inputs;
    for (int32_t place = 0; place < ss_places(window); place++) {
        for (int32_t output = 0; output < sum->groups * sum->outputs; output++) {
            const int32_t first = output / sum->outputs * sum->inputs;
            int32_t total = 0, at = output * row;
            int32_t y = ss_top(window, place);
            for (int32_t v = 0; v < window->kernel_y; v++, y += window->dilation_y) {
                int32_t x = ss_left(window, place);
                for (int32_t u = 0; u < window->kernel_x; u++, x += window->dilation_x) {
                    const int32_t channels = ss_inside(window, y, x) ? sum->inputs : 0;
                    for (int32_t c = 0; c < channels; c++) {
                        const int32_t value = ss_at(sum->in, y * window->width + x, first + c);
                        total += value * ss_wide_weight(sum, at + c);
                    }
                    at += sum->inputs;
                }
            }
            ss_emit_sums(sum->sink, place, 1, output, 1, &total);
        }
    }
}

#endif
