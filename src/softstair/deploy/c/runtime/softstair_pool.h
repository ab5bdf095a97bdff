/* The input, poolings, padding, additions, concatenation, expansion, flattening, and the scores. */
#ifndef SOFTSTAIR_POOL_H
#define SOFTSTAIR_POOL_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_window.h"

/* Reorders an input from channel by channel to place by place, and subtracts its zero point. */
#define SS_INPUT(name, type)                                                                    \
    static inline void name(const type *input, int32_t zero, const ss_features *out) {          \
        for (int32_t channel = 0; channel < out->channels; channel++) {                         \
            for (int32_t place = 0; place < out->places; place++) {                             \
                ss_put(out, place, channel, (int32_t)*input++ - zero);                          \
            }                                                                                   \
        }                                                                                       \
    }
SS_INPUT(ss_input_uint8, uint8_t)
SS_INPUT(ss_input_int8, int8_t)
SS_INPUT(ss_input_int16, int16_t)

/* The same by a table of 256 numbers of `width` bytes for each channel. */
static inline void ss_input_table(const void *input, const void *table, int32_t width,
                                  const ss_features *out) {
    const uint8_t *from = (const uint8_t *)input;
    for (int32_t channel = 0; channel < out->channels; channel++) {
        for (int32_t place = 0; place < out->places; place++) {
            ss_put(out, place, channel, ss_number(table, width, 256 * channel + *from++));
        }
    }
}

/* Max-pooling of planes: positive if one input is, negative if all are. */
static inline void ss_max_pool_planes(const ss_window *window, const ss_features *in,
                                      const ss_features *out) {
    const int32_t words = ss_words(in);
    const int planes = in->kind == SS_TERNARY ? 2 : 1;
    for (int plane = 0; plane < planes; plane++) {
        for (int32_t place = 0; place < out->places; place++) {
            uint32_t *to = ss_plane(out, plane) + place * words;
            for (int32_t i = 0; i < words; i++) {
                to[i] = plane == 0 ? 0U : ~(uint32_t)0;
            }
            int32_t y = ss_top(window, place);
            for (int32_t v = 0; v < window->kernel_y; v++, y++) {
                int32_t x = ss_left(window, place);
                for (int32_t u = 0; u < window->kernel_x; u++, x++) {
                    const int32_t count = ss_inside(window, y, x) ? words : 0;
                    const uint32_t *from = ss_plane(in, plane) + (y * window->width + x) * count;
                    for (int32_t i = 0; i < count; i++) {
                        to[i] = plane == 0 ? to[i] | from[i] : to[i] & from[i];
                    }
                }
            }
        }
    }
}

/* Combines the features of each window; those in the padding are `outside`. */
#ifdef SOFTSTAIR_PANELS /* many channels at once are faster on x86, and slower on a Cortex-M4 */
#define SS_POOL(name, outside, combined)                                                       \
    static inline void name(const ss_window *window, const ss_features *in,                    \
                            const ss_features *out) {                                          \
        int32_t results[SS_BLOCK], values[SS_BLOCK];                                           \
        for (int32_t place = 0; place < out->places; place++) {                                \
            const int32_t top = ss_top(window, place), left = ss_left(window, place);          \
            for (int32_t first = 0; first < out->channels; first += SS_BLOCK) {                \
                const int32_t count = ss_min(SS_BLOCK, out->channels - first);                 \
                for (int32_t c = 0; c < count; c++) {                                          \
                    results[c] = outside;                                                      \
                }                                                                              \
                for (int32_t y = top; y < top + window->kernel_y; y++) {                       \
                    for (int32_t x = left; x < left + window->kernel_x; x++) {                 \
                        if (!ss_inside(window, y, x)) {                                        \
                            continue;                                                          \
                        }                                                                      \
                        ss_get_row(in, y * window->width + x, first, count, values);           \
                        for (int32_t c = 0; c < count; c++) {                                  \
                            const int32_t value = values[c], result = results[c];              \
                            results[c] = combined;                                             \
                        }                                                                      \
                    }                                                                          \
                }                                                                              \
                ss_put_row(out, place, first, count, results);                                 \
            }                                                                                  \
        }                                                                                      \
    }
#else
#define SS_POOL(name, outside, combined)                                                       \
    static inline void name(const ss_window *window, const ss_features *in,                    \
                            const ss_features *out) {                                          \
        for (int32_t place = 0; place < out->places; place++) {                                \
            const int32_t top = ss_top(window, place), left = ss_left(window, place);          \
            for (int32_t channel = 0; channel < out->channels; channel++) {                    \
                int32_t result = outside;                                                      \
                for (int32_t y = top; y < top + window->kernel_y; y++) {                       \
                    for (int32_t x = left; x < left + window->kernel_x; x++) {                 \
                        const int inside = ss_inside(window, y, x);                            \
                        const int32_t at = inside ? y * window->width + x : 0;                 \
                        const int32_t value = inside ? ss_at(in, at, channel) : outside;       \
                        result = combined;                                                     \
                    }                                                                          \
                }                                                                              \
                ss_put(out, place, channel, result);                                           \
            }                                                                                  \
        }                                                                                      \
    }
#endif
SS_POOL(ss_max_pool, INT32_MIN, value > result ? value : result)
SS_POOL(ss_sum_pool, 0, result + value)

static inline void ss_add(const ss_features *a, const ss_features *b, const ss_features *out) {
    int32_t x[SS_BLOCK], y[SS_BLOCK];
    for (int32_t place = 0; place < out->places; place++) {
        for (int32_t channel = 0; channel < out->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, out->channels - channel);
            ss_get_row(a, place, channel, count, x);
            ss_get_row(b, place, channel, count, y);
            for (int32_t c = 0; c < count; c++) {
                x[c] += y[c];
            }
            ss_put_row(out, place, channel, count, x);
        }
    }
}

/* What a table of numbers of `width` bytes has for each feature. */
static inline void ss_lookup(const ss_features *in, const void *table, int32_t width,
                             const ss_features *out) {
    int32_t x[SS_BLOCK];
    for (int32_t place = 0; place < out->places; place++) {
        for (int32_t channel = 0; channel < out->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, out->channels - channel);
            ss_get_row(in, place, channel, count, x);
            for (int32_t c = 0; c < count; c++) {
                x[c] = ss_number(table, width, x[c]);
            }
            ss_put_row(out, place, channel, count, x);
        }
    }
}

/* Copies features into larger ones, so many rows, columns and channels from their beginning; the
 * widths are those of `in` and `out`. */
static inline void ss_place(const ss_features *in, const ss_features *out, int32_t width,
                            int32_t out_width, int32_t row, int32_t column, int32_t first) {
    int32_t x[SS_BLOCK];
    for (int32_t place = 0; place < in->places; place++) {
        const int32_t to = (place / width + row) * out_width + place % width + column;
        for (int32_t channel = 0; channel < in->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, in->channels - channel);
            ss_get_row(in, place, channel, count, x);
            ss_put_row(out, to, first + channel, count, x);
        }
    }
}

/* Takes features from other rows, columns and channels; without a table, from the same ones. */
static inline void ss_take(const ss_features *in, const ss_features *out, int32_t width,
                           int32_t out_width, const int32_t *rows, const int32_t *columns,
                           const int32_t *channels) {
    for (int32_t place = 0; place < out->places; place++) {
        const int32_t y = place / out_width, x = place % out_width;
        const int32_t from = (rows ? rows[y] : y) * width + (columns ? columns[x] : x);
        for (int32_t channel = 0; channel < out->channels; channel++) {
            ss_put(out, place, channel, ss_at(in, from, channels ? channels[channel] : channel));
        }
    }
}

/* Puts the channels of each place as rows x columns pixels; `phase` and `step` are the distances
 * of the channels of two such pixels, and of two channels of one. */
static inline void ss_pixel_shuffle(const ss_features *in, const ss_features *out, int32_t width,
                                    int32_t rows, int32_t columns, int32_t phase, int32_t step) {
    int32_t values[SS_BLOCK];
    for (int32_t place = 0; place < out->places; place++) {
        const int32_t y = place / (width * columns), x = place % (width * columns);
        const int32_t from = y / rows * width + x / columns;
        const int32_t first = (y % rows * columns + x % columns) * phase;
        for (int32_t channel = 0; channel < out->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, out->channels - channel);
            if (step == 1) {
                ss_get_row(in, from, first + channel, count, values);
            } else {
                for (int32_t c = 0; c < count; c++) {
                    values[c] = ss_at(in, from, first + (channel + c) * step);
                }
            }
            ss_put_row(out, place, channel, count, values);
        }
    }
}

/* Reorders to channel by channel, as the channels of one place. */
static inline void ss_flatten(const ss_features *in, const ss_features *out) {
    for (int32_t channel = 0; channel < in->channels; channel++) {
        for (int32_t place = 0; place < in->places; place++) {
            ss_put(out, 0, channel * in->places + place, ss_at(in, place, channel));
        }
    }
}

/* Sums times 2^shift plus a bias, channel after channel; unsigned numbers wrap. */
static inline void ss_scores(const ss_features *in, int32_t shift, const int32_t *bias,
                             int32_t *scores) {
    for (int32_t place = 0; place < in->places; place++) {
        for (int32_t i = 0; i < in->channels; i++) {
            const uint32_t sum = (uint32_t)ss_at(in, place, i);
            scores[i * in->places + place] = (int32_t)((sum << shift) + (uint32_t)bias[i]);
        }
    }
}

/* Returns the first class with the greatest score; `order` are the units of the scores. */
static inline int32_t ss_class(const int32_t *scores, const int32_t *order, int32_t classes) {
    int32_t best = 0;
    for (int32_t i = 1; i < classes; i++) {
        const int64_t score = (int64_t)scores[i] * order[i];
        best = score > (int64_t)scores[best] * order[best] ? i : best;
    }
    return best;
}

/* The class of each of so many places. */
static inline void ss_classes(const int32_t *scores, const int32_t *order, int32_t count,
                              int32_t places, int32_t *classes) {
    for (int32_t place = 0; place < places; place++) {
        int32_t best = 0;
        for (int32_t i = 1; i < count; i++) {
            const int64_t score = (int64_t)scores[i * places + place] * order[i];
            best = score > (int64_t)scores[best * places + place] * order[best] ? i : best;
        }
        classes[place] = best;
    }
}

#endif
