/* Several products in one multiplication, for the Cortex-M4, or anywhere with -DSOFTSTAIR_PACKED.
 *
 *   four   (x0 + x1 2^13)(w0 + w1 2^26) has x0 w0, x1 w0, x0 w1 and x1 w1 at bits 0, 13, 26 and 39:
 *          64 bits hold the sums of two places and two channels over a chunk of inputs, where the
 *          exporter has proven each within +-4095
 *   two    products of halves of 16 bits, for all other layers
 */
#ifndef SOFTSTAIR_PACKED_H
#define SOFTSTAIR_PACKED_H

#include <stdint.h>

#include "softstair_vector.h"

#ifdef SS_HAS_PACKED
#define SS_PACKED_CHANNELS(sum) ((sum)->packed_channels)
#else
#define SS_PACKED_CHANNELS(sum) 0
#endif

#define SS_FIELD_BIAS 0x8004002001000U /* 2^12 in each of the four fields of 13 bits */

/* Byte `i` of a word, with its sign. */
static inline uint32_t ss_byte(uint32_t word, int i) {
    return (uint32_t)(int32_t)(int8_t)(word >> (8 * i));
}

#ifndef SS_HAS_DSP
/* The sums of four places and four channels, with 2^12 added; `count` is a multiple of 16. */
static inline void ss_multiply_four(const uint32_t *x, const uint32_t *w, int32_t count,
                                    uint64_t *fields) {
    for (int i = 0; i < 4; i++) {
        fields[i] = SS_FIELD_BIAS;
        for (int32_t k = 0; k < count; k++) {
            fields[i] += (uint64_t)((int64_t)(int32_t)x[2 * k + i / 2] * (int32_t)w[2 * k + i % 2]);
        }
    }
}

/* Depthwise sums of a column with 12 weights, four at a time, with 2^12 added to each. */
static inline void ss_multiply_column(const uint32_t *x, const uint32_t *w, int32_t rows,
                                      uint64_t *fields) {
    for (int32_t y = 0; y < rows; y += 4, fields++) {
        *fields = SS_FIELD_BIAS;
        for (int i = 0; i < 12; i++) {
            *fields += (uint64_t)((int64_t)(int32_t)x[i / 4 * rows + y + i % 4] * (int32_t)w[i]);
        }
    }
}

/* The sums of two places and two channels; `count` is a multiple of 8. */
static inline void ss_multiply_two(const uint32_t *x, const uint32_t *w, int32_t count,
                                   int32_t *sums) {
    for (int i = 0; i < 4; i++) {
        sums[i] = 0;
        for (int32_t k = 0; k < count; k += 2) {
            const uint32_t a = x[k + i / 2], b = w[k + i % 2];
            sums[i] += (int16_t)a * (int16_t)b + (int16_t)(a >> 16) * (int16_t)(b >> 16);
        }
    }
}
#endif

/* Packs four rows of bytes, the first with the second and the third with the fourth; without a
 * chunk, two bytes of each row. */
static inline void ss_pack(const int8_t *const *rows, int32_t count, int32_t chunk, int shift,
                           uint32_t *to) {
    for (int32_t i = 0; i < count; i += 4) {
        const uint32_t a = ss_load_word(rows[0] + i), b = ss_load_word(rows[1] + i);
        const uint32_t c = ss_load_word(rows[2] + i), d = ss_load_word(rows[3] + i);
        for (int j = 0; chunk != 0 && j < 4; j++) {
            *to++ = ss_byte(a, j) + (ss_byte(b, j) << shift);
            *to++ = ss_byte(c, j) + (ss_byte(d, j) << shift);
        }
        for (int j = 0; chunk == 0 && j < 4; j += 2, to += 2) {
            to[0] = (ss_byte(a, j) & 0xffffU) + (ss_byte(a, j + 1) << 16);
            to[1] = (ss_byte(b, j) & 0xffffU) + (ss_byte(b, j + 1) << 16);
            to[count] = (ss_byte(c, j) & 0xffffU) + (ss_byte(c, j + 1) << 16);
            to[count + 1] = (ss_byte(d, j) & 0xffffU) + (ss_byte(d, j + 1) << 16);
        }
    }
}

/* The sums of four places and `channels` channels, or up to three more. */
static inline void ss_multiply(const uint32_t *x, const uint32_t *w, int32_t count, int32_t chunk,
                               int32_t channels, int32_t *sums) {
    for (int32_t c = 0; c < channels; c += 4, w += 2 * count, sums += 4) {
        for (int i = 0; chunk == 0 && i < 4; i++) {
            int32_t *to = sums + i / 2 * 2 * SS_BLOCK + i % 2 * 2, two[4];
            ss_multiply_two(x + i / 2 * count, w + i % 2 * count, count, two);
            to[0] = two[0], to[1] = two[1];
            to[SS_BLOCK] = two[2], to[SS_BLOCK + 1] = two[3];
        }
        for (int32_t k = 0; chunk != 0 && k < count; k += chunk) {
            uint64_t fields[4];
            ss_multiply_four(x + 2 * k, w + 2 * k, ss_min(chunk, count - k), fields);
            for (int i = 0; i < 16; i++) {
                int32_t *to = sums + (i / 8 * 2 + i % 2) * SS_BLOCK + i / 2 % 4;
                const uint64_t signs = fields[i / 4] ^ SS_FIELD_BIAS; /* 13 bits with a sign */
                const int32_t sum = (int32_t)((uint32_t)(signs >> 13 * (i % 4)) << 19) >> 19;
                *to = k == 0 ? sum : *to + sum;
            }
        }
    }
}

#endif
