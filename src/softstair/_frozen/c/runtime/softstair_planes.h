/* Sums of ternary and binary numbers, by counting bits.
 *
 * A feature is a = p - n with bits p and n. A weight w has two bits: t0 = [w >= 0], t1 = [w >= 1].
 * A bit t selects p if it is set and n if not, so the selected bits sum to n + t(p - n), and
 *
 *     sum of w a = ones selected by t0 + ones selected by t1 - number of features that are not 0
 *
 * In the padding p and n are 0. If no weight is 0, t0 = t1: one is stored, and counts twice. The
 * weights of eight channels are interleaved, four words of each in turn, all of t0 before t1; the
 * rest of the row, less than four words, follows.
 */
#ifndef SOFTSTAIR_PLANES_H
#define SOFTSTAIR_PLANES_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"
#include "softstair_vector.h"
#include "softstair_window.h"

typedef struct {
    ss_window window;
    int32_t outputs;
    int32_t first_output; /* 0, or where a second thread begins */
    int32_t planes; /* bits per weight */
    const uint32_t *weights;
    const ss_features *in;
    uint32_t *windows; /* space for SS_PLACES windows, or for all if there are fewer */
    const ss_sink *sink;
} ss_planes_sum;

/* Negative features are all that are not positive, outside the padding. */
static inline void ss_negative_plane(const ss_planes_sum *sum, int32_t place,
                                     const uint32_t *positive, uint32_t *negative) {
    const int32_t words = ss_words(sum->in), spare = 32 * words - sum->in->channels;
    int32_t y = ss_top(&sum->window, place);
    for (int32_t v = 0; v < sum->window.kernel_y; v++, y += sum->window.dilation_y) {
        int32_t x = ss_left(&sum->window, place);
        for (int32_t u = 0; u < sum->window.kernel_x; u++, x += sum->window.dilation_x) {
            const int inside = ss_inside(&sum->window, y, x);
            for (int32_t i = 0; i < words; i++) {
                const uint32_t all = i + 1 < words ? ~(uint32_t)0 : ~(uint32_t)0 >> spare;
                *negative++ = inside ? ~*positive & all : 0U;
                positive++;
            }
        }
    }
}

/* Copies the window at `place`, the positive plane first; returns how many are not 0. */
static inline int32_t ss_copy_window(const ss_planes_sum *sum, int32_t place, uint32_t *to) {
    const ss_features *in = sum->in;
    const int32_t bytes = 4 * ss_words(in), row = ss_taps(&sum->window) * ss_words(in);
    uint32_t *negative = to + row;
    ss_gather(&sum->window, place, (const uint8_t *)in->data, bytes, bytes, 0, (uint8_t *)to);
    if (in->kind == SS_TERNARY) {
        const uint8_t *from = (const uint8_t *)ss_plane(in, 1);
        ss_gather(&sum->window, place, from, bytes, bytes, 0, (uint8_t *)negative);
    } else if (in->kind == SS_SIGN) {
        ss_negative_plane(sum, place, to, negative);
    } else {
        ss_fill((uint8_t *)negative, 0, 4 * row);
    }
    return ss_ones_row(to, 2 * row);
}

/* The sums of up to eight channels. */
static inline void ss_count(const uint32_t *window, int32_t row, const uint32_t *weights,
                            int32_t planes, int32_t channels, int32_t *sums) {
    const uint32_t *negative = window + row;
    if (channels == SS_EIGHT) {
        ss_count_eight(window, negative, row / 4, weights, planes, sums);
    } else {
        ss_count_some(window, negative, row / 4, weights, planes, channels, sums);
    }
    weights += row / 4 * 4 * planes * channels;
    for (int32_t i = row / 4 * 4; i < row; i++) {
        for (int32_t plane = 0; plane < planes; plane++) {
            for (int32_t c = 0; c < channels; c++) {
                sums[c] += ss_ones(ss_select(*weights++, window[i], negative[i]));
            }
        }
    }
}

static inline void ss_sum_planes(const ss_planes_sum *sum) {
    const int32_t places = ss_places(&sum->window);
    const int32_t row = ss_taps(&sum->window) * ss_words(sum->in);
    int32_t sums[SS_PLACES * SS_BLOCK], nonzero[SS_PLACES] = {0};
    for (int32_t first = sum->first_output; first < sum->outputs; first += SS_BLOCK) {
        const int32_t count = ss_min(SS_BLOCK, sum->outputs - first);
        for (int32_t place = 0; place < places; place += SS_PLACES) {
            const int32_t group = ss_min(SS_PLACES, places - place);
            /* If these are all windows, they are copied once. */
            const int is_copied = first > sum->first_output && places <= SS_PLACES;
            for (int32_t p = 0; p < group && !is_copied; p++) {
                nonzero[p] = ss_copy_window(sum, place + p, sum->windows + 2 * row * p);
            }
            for (int32_t c = 0; c < count; c += SS_EIGHT) {
                const int32_t channels = ss_min(SS_EIGHT, count - c);
                const uint32_t *weights = sum->weights + (first + c) * sum->planes * row;
                for (int32_t p = 0; p < group; p++) {
                    int32_t *to = sums + p * SS_BLOCK + c;
                    ss_count(sum->windows + 2 * row * p, row, weights, sum->planes, channels, to);
                    for (int32_t i = 0; i < channels; i++) {
                        to[i] = (sum->planes == 1 ? 2 * to[i] : to[i]) - nonzero[p];
                    }
                }
            }
            ss_emit_sums(sum->sink, place, group, first, count, sums);
        }
    }
}

#endif
