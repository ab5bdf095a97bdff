/* Sums over 3 x 3 windows of stride 1, by Winograd's F(4x4, 3x3) for ternary and binary numbers,
 * and F(2x2, 3x3) for bytes.
 *
 * A tile of 4 x 4 sums reads 6 x 6 features d and takes 36 products instead of 144:
 *
 *     A^T [(G g G^T) * (B^T d B)] A      with G free of fractions, so that all are integers
 *
 *     B^T    4  0 -5  0  1  0      G    1  0  0      A^T    6 -4 -4  1  1  0     24 times the sum
 *            0 -4 -4  1  1  0           1  1  1             0 -2  2  1 -1  0     12
 *            0  4 -4 -1  1  0           1 -1  1             0 -1 -1  1  1  0      6
 *            0 -2 -1  2  1  0           1  2  4             0 -1  1  2 -2  6      6
 *            0  2 -1 -2  1  0           1 -2  4
 *            0  4  0 -5  0  1           0  0  1
 *
 * The rows of |B^T| sum to 10 at most and those of |G| to 7: transformed features are at most 100
 * and weights at most 49, which are bytes. The factors of a sum are 9 times a power of two: a shift
 * and a product with the inverse of 9 modulo 2^32 remove them exactly. A tile of
 * 2 x 2 sums takes 16 products instead of 36:
 *
 *     B^T    1  0 -1  0            G    2  0  0      A^T    1  1  1  0            2 times the sum
 *            0  1  1  0                 1  1  1             0  1 -1 -1            2
 *            0 -1  1  0                 1 -1  1
 *            0  1  0 -1                 0  0  2
 *
 * The exporter has proven that features and weights fit into bytes, and the partial sums into 32
 * bits. Weights have 1, 2 or 4 bits and are unpacked for 16 channels at a time, for a strip of rows
 * of tiles.
 */
#ifndef SOFTSTAIR_WINOGRAD_H
#define SOFTSTAIR_WINOGRAD_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"
#include "softstair_vector.h"
#include "softstair_window.h"

#define SS_INVERSE_OF_9 0x38e38e39U /* modulo 2^32 */
#define SS_GAP 64    /* bytes between the points, so that they do not share sets of the cache */

typedef struct {
    ss_window window;
    int32_t outputs;
    int32_t first_output;   /* 0, or where a second thread begins */
    int32_t tile;           /* its rows of sums: 4, or 2 for bytes */
    int32_t bits;           /* per weight */
    int32_t strip;          /* rows of tiles at a time */
    const uint8_t *weights; /* of 16 channels; see ss_filters */
    const ss_features *in;
    int8_t *features;  /* by point, tile and input */
    int8_t *filters;   /* by point, four inputs, 16 channels and input */
    int32_t *products; /* by point, tile and channel */
    int32_t *sums;     /* of a row of tiles */
    const ss_sink *sink;
} ss_winograd_sum;

/* Inputs are padded to the widest register. */
static inline int32_t ss_inputs(const ss_winograd_sum *sum) {
    return (sum->in->channels + 15) / 16 * 16;
}

/* The features of 16 channels from `channel` on, as bytes. */
static inline ss_lanes ss_features_at(const ss_winograd_sum *sum, int32_t y, int32_t x,
                                      int32_t channel) {
    const ss_features *in = sum->in;
    if (!ss_inside(&sum->window, y, x)) {
        return ss_expand_bits(0, 0);
    }
    const int32_t place = y * sum->window.width + x;
    if (in->kind == SS_BYTES) {
        return ss_load_lanes((const int8_t *)in->data + place * in->channels + channel);
    }
    const int32_t word = place * ss_words(in) + channel / 32;
    const uint32_t positive = in->data[word] >> (channel % 32);
    uint32_t negative = 0;
    if (in->kind == SS_TERNARY) {
        negative = ss_plane(in, 1)[word] >> (channel % 32);
    } else if (in->kind == SS_SIGN) {
        negative = ~positive & (((uint32_t)1 << ss_min(16, in->channels - channel)) - 1U);
    }
    return ss_expand_bits(positive, negative);
}

/* B^T d for 16 columns. */
SS_SPECIALISED void ss_transform_features(const ss_lanes *d, ss_lanes *u, int tile) {
    if (tile == 2) {
        u[0] = ss_minus(d[0], d[2]), u[1] = ss_plus(d[1], d[2]);
        u[2] = ss_minus(d[2], d[1]), u[3] = ss_minus(d[1], d[3]);
        return;
    }
    const ss_lanes even = ss_minus(d[4], ss_shifted(d[2], 2));
    const ss_lanes odd = ss_minus(d[3], ss_shifted(d[1], 2));
    const ss_lanes near = ss_minus(d[4], d[2]), apart = ss_minus(d[3], d[1]);
    u[0] = ss_plus(ss_minus(ss_shifted(d[0], 2), d[2]), even);
    u[1] = ss_plus(even, odd);
    u[2] = ss_minus(even, odd);
    u[3] = ss_plus(near, ss_shifted(apart, 1));
    u[4] = ss_minus(near, ss_shifted(apart, 1));
    u[5] = ss_minus(ss_minus(d[5], d[3]), ss_shifted(apart, 2));
}

/* G g for 16 columns. */
SS_SPECIALISED void ss_transform_weights(const ss_lanes *g, ss_lanes *v, int tile) {
    const ss_lanes ends = ss_plus(g[0], g[2]);
    if (tile == 2) {
        v[0] = ss_plus(g[0], g[0]), v[1] = ss_plus(ends, g[1]);
        v[2] = ss_minus(ends, g[1]), v[3] = ss_plus(g[2], g[2]);
        return;
    }
    const ss_lanes far = ss_plus(g[0], ss_shifted(g[2], 2));
    const ss_lanes twice = ss_plus(g[1], g[1]);
    v[0] = g[0];
    v[1] = ss_plus(ends, g[1]);
    v[2] = ss_minus(ends, g[1]);
    v[3] = ss_plus(far, twice);
    v[4] = ss_minus(far, twice);
    v[5] = g[2];
}

/* A^T m for 16 columns; rows of m are `from` apart, those of y `step`. The compiler vectorises over
 * the columns, since y is local. */
SS_SPECIALISED void ss_transform_products(const int32_t *restrict m, int32_t from,
                                          int32_t *restrict y, int step, int tile) {
    for (int i = 0; i < 16; i++) {
        const int32_t m0 = m[i], m1 = m[i + from], m2 = m[i + 2 * from], m3 = m[i + 3 * from];
        if (tile == 2) {
            y[i] = m0 + m1 + m2;
            y[i + step] = m1 - m2 - m3;
            continue;
        }
        const int32_t m4 = m[i + 4 * from], m5 = m[i + 5 * from];
        const int32_t a = m1 + m2, b = m2 - m1, c = m3 + m4, d = m3 - m4;
        y[i] = 6 * m0 - 4 * a + c;
        y[i + step] = 2 * b + d;
        y[i + 2 * step] = c - a;
        y[i + 3 * step] = b + 2 * d + 6 * m5;
    }
}

/* The tile at (top, left), 16 channels of it; the points of the result are `step` bytes apart. */
SS_SPECIALISED void ss_tile_features(const ss_winograd_sum *sum, int32_t top, int32_t left,
                                     int32_t channel, int8_t *to, int32_t step, int tile) {
    ss_lanes half[6][6], d[6], u[6];
    for (int32_t x = 0; x < tile + 2; x++) {
        for (int32_t y = 0; y < tile + 2; y++) {
            d[y] = ss_features_at(sum, top + y, left + x, channel);
        }
        ss_transform_features(d, u, tile);
        for (int32_t i = 0; i < tile + 2; i++) {
            half[i][x] = u[i];
        }
    }
    for (int32_t i = 0; i < tile + 2; i++) {
        ss_transform_features(half[i], u, tile);
        for (int32_t j = 0; j < tile + 2; j++, to += step) {
            ss_put_lanes(to, u[j]);
        }
    }
}

/* The weights of 16 channels; the points of the result are `step` bytes apart. Byte
 * 4 k + c of a tap's 16 bytes has the bits of input c and channel k of four inputs and four
 * channels, then those of the next four channels, and after 16 channels of the next four inputs. A
 * bit is set if the weight is negative; two or four bits are the weight modulo 4 or 16. */
SS_SPECIALISED void ss_filters(const uint8_t *weights, int32_t inputs, int32_t bits, int8_t *to,
                               int32_t step, int tile) {
    ss_lanes half[6][3], g[3], v[6];
    for (int32_t four = 0; four < inputs; four++) {
        const uint8_t *from = weights + four * bits / 8 * 9 * 16;
        int8_t *at = to + 16 * four;
        for (int32_t x = 0; x < 3; x++) {
            for (int32_t y = 0; y < 3; y++) {
                g[y] = ss_expand_weights(from + 16 * (3 * y + x), (four * bits) & 7, bits);
            }
            ss_transform_weights(g, v, tile);
            for (int32_t i = 0; i < tile + 2; i++) {
                half[i][x] = v[i];
            }
        }
        for (int32_t i = 0; i < tile + 2; i++) {
            ss_transform_weights(half[i], v, tile);
            for (int32_t j = 0; j < tile + 2; j++, at += step) {
                ss_put_lanes(at, v[j]);
            }
        }
    }
}

/* The sums of a tile and 16 channels, those of `columns` columns; rows of sums are `row` apart. */
SS_SPECIALISED void ss_tile_sums(const int32_t *products, int32_t step, int32_t columns,
                                 int32_t row, int32_t *to, int tile) {
    static const int shift[4] = {3, 2, 1, 1};
    const int points = tile + 2;
    int32_t half[24 * 16], sums[4 * 16];
    for (int32_t j = 0; j < points; j++) {
        ss_transform_products(products + j * step, points * step, half + 16 * j, 16 * points, tile);
    }
    for (int32_t y = 0; y < tile; y++) {
        ss_transform_products(half + 16 * points * y, 16, sums, 16, tile);
        for (int32_t x = 0; x < tile && x < columns; x++) {
            const int by = tile == 2 ? 2 : shift[y] + shift[x];
            for (int32_t i = 0; i < 16; i++) {
                const uint32_t shifted = (uint32_t)(sums[16 * x + i] >> by);
                to[y * row + x * SS_BLOCK + i] =
                    (int32_t)(tile == 2 ? shifted : shifted * SS_INVERSE_OF_9);
            }
        }
    }
}

SS_SPECIALISED void ss_sum_tiles(const ss_winograd_sum *sum, int tile) {
    const ss_window *window = &sum->window;
    const int32_t inputs = ss_inputs(sum), across = (window->columns + tile - 1) / tile;
    const int32_t max_tiles = (sum->strip * across + 3) / 4 * 4;
    const int32_t step = max_tiles * inputs + SS_GAP, filter = 16 * inputs + SS_GAP;
    const int32_t product = 16 * max_tiles + SS_GAP / 4;
    for (int32_t top = 0; top < window->rows; top += tile * sum->strip) {
        const int32_t down = ss_min(sum->strip, (window->rows - top + tile - 1) / tile);
        for (int32_t i = 0; i < down * across; i++) {
            const int32_t y = top + i / across * tile - window->padding_y;
            const int32_t x = i % across * tile - window->padding_x;
            for (int32_t c = 0; c < inputs; c += 16) {
                ss_tile_features(sum, y, x, c, sum->features + i * inputs + c, step, tile);
            }
        }
        for (int32_t first = sum->first_output; first < sum->outputs; first += 16) {
            const int32_t count = ss_min(16, sum->outputs - first);
            const uint8_t *weights = sum->weights + first / 8 * 9 * inputs * sum->bits;
            if (sum->bits == 4) { /* a constant is faster */
                ss_filters(weights, inputs, 4, sum->filters, filter, tile);
            } else if (sum->bits == 2) {
                ss_filters(weights, inputs, 2, sum->filters, filter, tile);
            } else {
                ss_filters(weights, inputs, 1, sum->filters, filter, tile);
            }
            for (int32_t point = 0; point < (tile + 2) * (tile + 2); point++) {
                for (int32_t i = 0; i < down * across; i += 4) {
                    ss_four_tiles(sum->features + point * step + i * inputs, inputs,
                                  sum->filters + point * filter,
                                  sum->products + point * product + 16 * i);
                }
            }
            for (int32_t y = 0; y < down; y++) {
                const int32_t place = (top + tile * y) * window->columns;
                for (int32_t x = 0; x < across; x++) {
                    ss_tile_sums(sum->products + 16 * (y * across + x), product,
                                 ss_min(tile, window->columns - tile * x),
                                 window->columns * SS_BLOCK, sum->sums + tile * x * SS_BLOCK, tile);
                }
                const int32_t rows = ss_min(tile, window->rows - top - tile * y);
                ss_emit_sums(sum->sink, place, rows * window->columns, first, count, sum->sums);
            }
        }
    }
}

static inline void ss_sum_winograd(const ss_winograd_sum *sum) {
    if (sum->tile == 2) {
        ss_sum_tiles(sum, 2);
    } else {
        ss_sum_tiles(sum, 4);
    }
}

#endif
