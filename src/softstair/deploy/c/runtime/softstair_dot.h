/* Sums of products of bytes.
 *
 * A weight is `base + step * code`; the code has 1, 2, 4 or 8 bits. The weights of a block of
 * channels are unpacked to bytes and used for all places. The sum is negated in channels that are
 * `negated`. `offsets` compensates the bias of the features.
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
    int32_t first_output;            /* 0, or where a second thread begins */
    int32_t bits, base, step;
    int32_t block;          /* channels unpacked at a time */
    int32_t direct;         /* each window is contiguous in memory */
    int32_t packed_channels; /* at a time, or 0 without packed products */
    int32_t chunk;           /* inputs of a sum of packed products, or 0 for two in one */
    int32_t narrow;          /* sums of a depthwise layer fit into 16 bits */
    const uint8_t *weights; /* one row per channel, aligned to bytes */
    const uint8_t *negated; /* one bit per channel, or null */
    const int32_t *offsets; /* one per channel, or null */
    const ss_features *in;
    int8_t *unpacked;
    int8_t *windows;
    uint32_t *operands; /* windows for packed products */
    const ss_sink *sink;
} ss_dot_sum;

static inline void ss_unpack(const uint8_t *from, int32_t count, int32_t bits, int32_t base,
                             int32_t step, int8_t *to) {
    int32_t i = 0;
    if (bits == 8) {
        for (; i < count; i++) {
            to[i] = (int8_t)(base + step * from[i]);
        }
    } else if (bits == 4) {
        for (const uint8_t *two = from; i + 2 <= count; i += 2, two++) {
            const int32_t codes = *two;
            to[i] = (int8_t)(base + step * (codes & 15));
            to[i + 1] = (int8_t)(base + step * (codes >> 4));
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

/* Unpacks the weights of a block of channels. Those of 16 channels that are multiplied together are
 * interleaved, four inputs of each channel in turn; the rest are rows. */
static inline void ss_unpack_block(const ss_dot_sum *sum, int32_t first, int32_t count,
                                   int32_t length, int32_t row) {
    const int32_t tiled = SS_INTERLEAVED(count);
    const int32_t bytes = (length * sum->bits + 7) / 8;
    for (int32_t c = 0; c < tiled; c++) {
        const uint8_t *from = sum->weights + (first + c) * bytes;
        uint32_t *to = (uint32_t *)(void *)(sum->unpacked + c / 16 * 16 * row) + c % 16;
        for (int32_t i = 0; i < length; i += 16, from += 2 * sum->bits, to += 64) {
            uint32_t words[4] = {0, 0, 0, 0};
            ss_unpack(from, ss_min(16, length - i), sum->bits, sum->base, sum->step,
                      (int8_t *)words);
            for (int32_t j = 0; j < 4; j++) {
                to[16 * j] = words[j];
            }
        }
    }
    for (int32_t c = tiled; c < count; c++) {
        ss_unpack_row(sum, first + c, length, sum->unpacked + c * row);
    }
}

/* Multiplies SS_PLACES windows by the unpacked weights of a block of channels. */
static inline void ss_products(const int8_t *const *windows, int32_t places, const int8_t *weights,
                               int32_t channels, int32_t row, int32_t *sums) {
    const int32_t tiled = SS_INTERLEAVED(channels);
    for (int32_t c = 0; c < tiled; c += 16) {
        ss_dot_sixteen(windows, weights + c * row, row, sums + c);
    }
    for (int32_t c = tiled; c < channels; c += SS_TILE_CHANNELS) {
        const int32_t width = ss_min(SS_TILE_CHANNELS, channels - c);
        for (int32_t p = 0; p < places; p += SS_TILE_PLACES) {
            const int32_t height = ss_min(SS_TILE_PLACES, places - p);
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

/* Unpacks the weights of a block of channels, and packs those of four together. */
static inline void ss_pack_weights(const ss_dot_sum *sum, int32_t first, int32_t count,
                                   int32_t length, int32_t packed_length) {
    int8_t *bytes = (int8_t *)sum->operands;
    const int32_t row = ss_row(length);
    const int8_t *rows[4] = {bytes, bytes + row, bytes + 2 * row, bytes + 3 * row};
    for (int32_t c = 0; c < count; c += 4) {
        for (int32_t i = 0; i < 4; i++) { /* channels beyond the last are computed, too */
            ss_unpack_row(sum, first + ss_min(c + i, count - 1), length, bytes + i * row);
        }
        ss_pack(rows, packed_length, sum->chunk, 26,
                (uint32_t *)(void *)sum->unpacked + c / 2 * packed_length);
    }
}

static inline void ss_negate_and_offset(const ss_dot_sum *sum, int32_t places, int32_t first,
                                        int32_t count, int32_t *sums) {
    for (int32_t c = 0; sum->negated && c < count; c++) {
        const int negated = (sum->negated[(first + c) / 8] >> ((first + c) % 8)) & 1;
        for (int32_t p = 0; negated && p < places; p++) {
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
    const int32_t row = ss_row(length), packed_length = sum->chunk ? row : (length + 7) / 8 * 8;
    const uint8_t padding = (uint8_t)-in->bias;
    const int32_t max_channels = SS_PACKED_CHANNELS(sum) ? SS_PACKED_CHANNELS(sum) : sum->block;
    const int8_t *windows[SS_PLACES];
    int32_t sums[SS_EMIT_PLACES * SS_BLOCK];
    for (int32_t first = sum->first_output, count; first < sum->groups * sum->outputs;
         first += count) {
        const int32_t number = first / sum->outputs;
        count = ss_min(max_channels, (number + 1) * sum->outputs - first);
        if (SS_PACKED_CHANNELS(sum)) {
            ss_pack_weights(sum, first, count, length, packed_length);
        } else {
            ss_unpack_block(sum, first, count, length, row);
        }
        const uint8_t *from = (const uint8_t *)in->data + number * sum->inputs;
        for (int32_t place = 0; place < places; place += SS_PLACES) {
            const int32_t group = ss_min(SS_PLACES, places - place),
                          pending = place % SS_EMIT_PLACES;
            int32_t *group_sums = sums + pending * SS_BLOCK;
            for (int32_t p = 0; p < group; p++) {
                if (sum->direct) {
                    const int32_t start =
                        ss_top(window, place + p) * window->width + ss_left(window, place + p);
                    windows[p] = (const int8_t *)from + start * in->channels;
                } else {
                    int8_t *to = sum->windows + p * row;
                    ss_gather(window, place + p, from, in->channels, sum->inputs, padding,
                              (uint8_t *)to);
                    windows[p] = to;
                }
            }
            for (int32_t p = 1; p < SS_PLACES; p++) {
                windows[p] = windows[p < group ? p : 0]; /* those beyond the last are computed */
            }
            if (SS_PACKED_CHANNELS(sum)) {
                ss_pack(windows, packed_length, sum->chunk, 13, sum->operands);
                ss_multiply(sum->operands, (const uint32_t *)(const void *)sum->unpacked,
                            packed_length, sum->chunk, count, group_sums);
            } else {
                ss_products(windows, group, sum->unpacked, count, row, group_sums);
            }
            if (pending + SS_PLACES == SS_EMIT_PLACES || place + group == places) {
                ss_negate_and_offset(sum, pending + group, first, count, sums);
                ss_emit_sums(sum->sink, place - pending, pending + group, first, count, sums);
            }
        }
    }
}

/* Packs each feature with that two rows below, x0 + x1 2^13, column by column; four channels. */
static inline void ss_pack_columns(const ss_dot_sum *sum, int32_t channel, int32_t rows) {
    const ss_window *window = &sum->window;
    const int32_t channels = sum->in->channels, line = window->width * channels;
    const int32_t step = rows * (window->width + 2 * window->padding_x);
    const int32_t above = window->padding_y * line, size = window->height * line, two = 2 * line;
    uint32_t *to = sum->operands + rows * window->padding_x;
    for (int32_t x = channel; x < line; x += channels) {
        const int8_t *data = (const int8_t *)sum->in->data + x;
        for (int32_t r = 0, y = -above; r < rows; r++, y += line, to++) {
            const uint32_t a = y >= 0 && y < size ? ss_load_word(data + y) : 0U;
            const uint32_t b = y >= -two && y < size - two ? ss_load_word(data + y + two) : 0U;
            to[0] = ss_byte(a, 0) + (ss_byte(b, 0) << 13);
            to[step] = ss_byte(a, 1) + (ss_byte(b, 1) << 13);
            to[2 * step] = ss_byte(a, 2) + (ss_byte(b, 2) << 13);
            to[3 * step] = ss_byte(a, 3) + (ss_byte(b, 3) << 13);
        }
    }
}

/* Depthwise sums of four rows in one, over 3 x 3 windows of stride 1: the products with
 * w[v] + w[v - 1] 2^26 belong to rows 0, 2, 1 and 3. Affine steps store their levels as bytes. */
SS_SPECIALISED void ss_sum_columns(const ss_dot_sum *sum, int32_t low, int32_t high) {
    const ss_window *window = &sum->window;
    const ss_sink *sink = sum->sink;
    const int32_t channels = sum->in->channels, rows = (window->rows + 3) / 4 * 4;
    const int32_t size = rows * (window->width + 2 * window->padding_x);
    const int32_t line = window->columns * channels, last = (window->rows - 1) * line;
    uint64_t sums[SS_BLOCK];
    ss_fill((uint8_t *)sum->operands, 0, 16 * size);
    for (int32_t c = 0; c < channels; c++) {
        const int32_t m = sink->multipliers[c], shift = sink->shifts[c];
        const int32_t b = (int32_t)((uint32_t)sink->offsets[c] - ((uint32_t)m << 12));
        uint32_t w[12];
        if (c % 4 == 0) {
            ss_pack_columns(sum, c, rows);
        }
        ss_unpack_row(sum, c, 9, sum->unpacked);
        for (int i = 0; i < 3; i++) {
            const int8_t *u = sum->unpacked + i;
            const uint32_t top = (uint32_t)u[0], middle = (uint32_t)u[3], bottom = (uint32_t)u[6];
            w[4 * i] = top, w[4 * i + 1] = middle + (top << 26);
            w[4 * i + 2] = bottom + (middle << 26), w[4 * i + 3] = bottom << 26;
        }
        for (int32_t x = 0; x < window->columns; x++) {
            ss_multiply_column(sum->operands + c % 4 * size + x * rows, w, rows, sums);
            int8_t *to = (int8_t *)sink->out->data + x * channels + c;
            for (int32_t i = 0, y = 0; i < rows / 4; i++, y += 4 * line) {
                const uint32_t even = (uint32_t)sums[i], odd = (uint32_t)(sums[i] >> 26);
                const int32_t s[4] = {(int32_t)(even & 0x1fffU), (int32_t)(odd & 0x1fffU),
                                      (int32_t)(even >> 13 & 0x1fffU), (int32_t)(odd >> 13)};
                for (int j = 3; j >= 0; j--) { /* rows beyond the last are stored over */
                    const int32_t at = ss_min(y + j * line, last);
                    to[at] = (int8_t)ss_affine(s[j], m, b, shift, low, high);
#ifdef SOFTSTAIR_TRACE
                    ss_put(sink->sums, at / channels + x, c, s[j] - 0x1000);
#endif
                }
            }
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
    const int32_t padding_offset = (int32_t)(spare - data);
    int32_t *tap_offsets = (int32_t *)(void *)sum->windows;
    int32_t sums[SS_EMIT_PLACES * SS_BLOCK];
    if (SS_PACKED_CHANNELS(sum)) {
        SS_WITH_LIMITS(ss_sum_columns, sum->sink, sum);
        return;
    }
    for (int32_t first = 0; first < in->channels; first += sum->block) {
        const int32_t count = ss_min(sum->block, in->channels - first);
        for (int32_t c = 0; c < count; c++) {
            ss_unpack_row(sum, first + c, taps, spare);
            for (int32_t tap = 0; tap < taps; tap++) {
                sum->unpacked[tap * sum->block + c] = spare[tap];
            }
        }
        ss_fill((uint8_t *)spare, (uint8_t)-in->bias, sum->block);
        for (int32_t place = 0, together; place < places; place += together) {
            together = ss_min(SS_EMIT_PLACES, places - place);
            for (int32_t p = 0; p < together; p++) {
                ss_tap_offsets(window, place + p, in->channels, first, padding_offset, tap_offsets);
                ss_dot_depthwise(data, tap_offsets, taps, sum->unpacked, sum->block, count,
                                 sum->narrow, sums + p * SS_BLOCK);
            }
            ss_negate_and_offset(sum, together, first, count, sums);
            ss_emit_sums(sum->sink, place, together, first, count, sums);
        }
    }
}

/* Sums of features of any kind with weights of 8, 16 or 32 bits, for the few layers that no other
 * function computes. Partial sums may be beyond 32 bits, where unsigned numbers wrap; sums are not.
 */
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
