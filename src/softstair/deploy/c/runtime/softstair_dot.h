/* Sums of products of bytes.
 *
 * A weight is `base + step * code`; the code has 1, 2, 4 or 8 bits. The weights of a block of
 * channels are unpacked to bytes and used for all places. The sum is negated in channels that are
 * `turned`. `offsets` compensates the bias of the features.
 */
#ifndef SOFTSTAIR_DOT_H
#define SOFTSTAIR_DOT_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"
#include "softstair_vector.h"
#include "softstair_window.h"

typedef struct {
    ss_window window;
    int32_t groups, inputs, outputs; /* inputs and outputs of each group */
    int32_t bits, base, step;
    int32_t block;          /* channels unpacked at a time */
    int32_t direct;         /* each window is contiguous in memory */
    const uint8_t *weights; /* one row per channel, aligned to bytes */
    const uint8_t *turned;  /* one bit per channel, or null */
    const int32_t *offsets; /* one per channel, or null */
    const ss_features *in;
    int8_t *unpacked;
    int8_t *windows;
    const ss_sink *sink;
} ss_dot_sum;

/* Rows are padded to the widest register. */
static inline int32_t ss_row(int32_t length) { return (length + 15) / 16 * 16; }

static inline void ss_unpack(const uint8_t *from, int32_t count, int32_t bits, int32_t base,
                             int32_t step, int8_t *to) {
    int32_t i = 0;
    if (bits == 8) {
        for (; i < count; i++) {
            to[i] = (int8_t)(base + step * from[i]);
        }
    } else if (bits == 4) {
        for (; i + 2 <= count; i += 2) {
            to[i] = (int8_t)(base + step * (from[i / 2] & 15));
            to[i + 1] = (int8_t)(base + step * (from[i / 2] >> 4));
        }
    } else if (bits == 2) {
        for (; i + 4 <= count; i += 4) {
            to[i] = (int8_t)(base + step * (from[i / 4] & 3));
            to[i + 1] = (int8_t)(base + step * ((from[i / 4] >> 2) & 3));
            to[i + 2] = (int8_t)(base + step * ((from[i / 4] >> 4) & 3));
            to[i + 3] = (int8_t)(base + step * (from[i / 4] >> 6));
        }
    }
    for (; i < count; i++) {
        const uint32_t at = (uint32_t)i * (uint32_t)bits;
        to[i] = (int8_t)(base + step * ((from[at / 8U] >> (at % 8U)) & ((1 << bits) - 1)));
    }
}

static inline void ss_unpack_row(const ss_dot_sum *sum, int32_t channel, int32_t length,
                                 int8_t *to) {
    const uint8_t *from = sum->weights + channel * ((length * sum->bits + 7) / 8);
    ss_unpack(from, length, sum->bits, sum->base, sum->step, to);
    for (int32_t i = length; i < ss_row(length); i++) {
        to[i] = 0;
    }
}

/* Multiplies windows by the unpacked weights of a block of channels. */
static inline void ss_products(const int8_t *const *windows, int32_t places, const int8_t *weights,
                               int32_t channels, int32_t row, int32_t *sums) {
    for (int32_t c = 0; c < channels; c += SS_TILE_CHANNELS) {
        const int32_t width = ss_least(SS_TILE_CHANNELS, channels - c);
        for (int32_t p = 0; p < places; p += SS_TILE_PLACES) {
            const int32_t height = ss_least(SS_TILE_PLACES, places - p);
            if (width == SS_TILE_CHANNELS && height == SS_TILE_PLACES) {
                ss_dot_tile(windows + p, weights + c * row, row, sums + p * SS_BLOCK + c);
                continue;
            }
            for (int32_t i = 0; i < height; i++) {
                for (int32_t j = 0; j < width; j++) {
                    const int8_t *w = weights + (c + j) * row;
                    sums[(p + i) * SS_BLOCK + c + j] = ss_dot_one(windows[p + i], w, row);
                }
            }
        }
    }
}

static inline void ss_mend(const ss_dot_sum *sum, int32_t places, int32_t first, int32_t count,
                           int32_t *sums) {
    for (int32_t c = 0; sum->turned && c < count; c++) {
        const int turned = (sum->turned[(first + c) / 8] >> ((first + c) % 8)) & 1;
        for (int32_t p = 0; turned && p < places; p++) {
            sums[p * SS_BLOCK + c] = -sums[p * SS_BLOCK + c];
        }
    }
    for (int32_t p = 0; sum->offsets && p < places; p++) {
        for (int32_t c = 0; c < count; c++) {
            sums[p * SS_BLOCK + c] += sum->offsets[first + c];
        }
    }
}

static inline void ss_sum_dot(const ss_dot_sum *sum) {
    const ss_window *window = &sum->window;
    const ss_features *in = sum->in;
    const int32_t places = ss_places(window), length = ss_taps(window) * sum->inputs;
    const int32_t row = ss_row(length);
    const uint8_t beyond = (uint8_t)-in->bias;
    const int8_t *windows[SS_PLACES];
    int32_t sums[SS_PLACES * SS_BLOCK];
    for (int32_t first = 0, count; first < sum->groups * sum->outputs; first += count) {
        const int32_t number = first / sum->outputs;
        count = ss_least(sum->block, (number + 1) * sum->outputs - first);
        for (int32_t c = 0; c < count; c++) {
            ss_unpack_row(sum, first + c, length, sum->unpacked + c * row);
        }
        const uint8_t *from = (const uint8_t *)in->data + number * sum->inputs;
        for (int32_t place = 0; place < places; place += SS_PLACES) {
            const int32_t group = ss_least(SS_PLACES, places - place);
            for (int32_t p = 0; p < group; p++) {
                if (sum->direct) {
                    const int32_t seen = ss_top(window, place + p) * window->width +
                                         ss_left(window, place + p);
                    windows[p] = (const int8_t *)from + seen * in->channels;
                } else {
                    int8_t *to = sum->windows + p * row;
                    ss_gather(window, place + p, from, in->channels, sum->inputs, beyond,
                              (uint8_t *)to);
                    windows[p] = to;
                }
            }
            ss_products(windows, group, sum->unpacked, count, row, sums);
            ss_mend(sum, group, first, count, sums);
            ss_hand_over(sum->sink, place, group, first, count, sums);
        }
    }
}

/* Depthwise: each channel has its own weights. They are unpacked tap by tap, all channels of a tap
 * together; after them there is space for the row of a channel, or for the padding. */
static inline void ss_sum_depthwise(const ss_dot_sum *sum) {
    const ss_window *window = &sum->window;
    const ss_features *in = sum->in;
    const int32_t places = ss_places(window), taps = ss_taps(window);
    const int8_t *data = (const int8_t *)in->data;
    int8_t *spare = sum->unpacked + taps * sum->block;
    /* All memory of a network is one array. */
    const int32_t beyond = (int32_t)(spare - data);
    int32_t *seen = (int32_t *)(void *)sum->windows;
    int32_t sums[SS_BLOCK];
    for (int32_t first = 0; first < in->channels; first += sum->block) {
        const int32_t count = ss_least(sum->block, in->channels - first);
        for (int32_t c = 0; c < count; c++) {
            ss_unpack_row(sum, first + c, taps, spare);
            for (int32_t tap = 0; tap < taps; tap++) {
                sum->unpacked[tap * sum->block + c] = spare[tap];
            }
        }
        ss_fill((uint8_t *)spare, (uint8_t)-in->bias, sum->block);
        for (int32_t place = 0; place < places; place++) {
            ss_see(window, place, in->channels, first, beyond, seen);
            ss_each(data, seen, taps, sum->unpacked, sum->block, count, sums);
            ss_mend(sum, 1, first, count, sums);
            ss_hand_over(sum->sink, place, 1, first, count, sums);
        }
    }
}

#endif
