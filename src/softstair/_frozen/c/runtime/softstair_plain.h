/* Plain C for the functions of softstair_vector.h; bits are counted by an instruction if there is
 * one. */
#ifndef SOFTSTAIR_PLAIN_H
#define SOFTSTAIR_PLAIN_H

#include <stdint.h>

static inline int32_t ss_min(int32_t a, int32_t b) { return a < b ? a : b; }

/* Rows are padded to the widest register. */
static inline int32_t ss_row(int32_t length) { return (length + 15) / 16 * 16; }

/* Loads four bytes of an array of words. */
static inline uint32_t ss_load_word(const int8_t *bytes) {
    return *(const uint32_t *)(const void *)bytes;
}

static inline void ss_copy_plain(uint8_t *to, const uint8_t *from, int32_t count) {
    int32_t i = 0;
    /* All buffers are arrays of words, so words may be copied. */
    if ((((uintptr_t)to | (uintptr_t)from) & 3U) == 0U) {
        for (; i + 4 <= count; i += 4) {
            *(uint32_t *)(void *)(to + i) = *(const uint32_t *)(const void *)(from + i);
        }
    }
    for (; i < count; i++) {
        to[i] = from[i];
    }
}

static inline void ss_fill_plain(uint8_t *to, uint8_t value, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        to[i] = value;
    }
}

#if defined(__POPCNT__) && !defined(SOFTSTAIR_PORTABLE)
static inline int32_t ss_ones(uint32_t a) { return (int32_t)__builtin_popcount(a); }

static inline int32_t ss_ones_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint64_t low = ((uint64_t)b << 32) | a, high = ((uint64_t)d << 32) | c;
    return (int32_t)(__builtin_popcountll(low) + __builtin_popcountll(high));
}
#else
/* Counts the bits of each group of four. */
static inline uint32_t ss_in_fours(uint32_t a) {
    a -= (a >> 1) & 0x55555555U;
    return (a & 0x33333333U) + ((a >> 2) & 0x33333333U);
}

/* Adds the two 4-bit counts of each byte. */
static inline uint32_t ss_in_bytes(uint32_t a) {
    return (a & 0x0f0f0f0fU) + ((a >> 4) & 0x0f0f0f0fU);
}

static inline int32_t ss_ones(uint32_t a) {
    return (int32_t)((ss_in_bytes(ss_in_fours(a)) * 0x01010101U) >> 24);
}

static inline int32_t ss_ones_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    /* Two words give at most 8 per 4 bits, four at most 32 per byte: 128 in all. */
    const uint32_t bytes = ss_in_bytes(ss_in_fours(a) + ss_in_fours(b)) +
                           ss_in_bytes(ss_in_fours(c) + ss_in_fours(d));
    return (int32_t)((bytes * 0x01010101U) >> 24);
}
#endif

static inline int32_t ss_ones_row_plain(const uint32_t *row, int32_t words) {
    int32_t count = 0;
    for (; words >= 4; words -= 4, row += 4) {
        count += ss_ones_four(row[0], row[1], row[2], row[3]);
    }
    for (; words > 0; words--) {
        count += ss_ones(*row++);
    }
    return count;
}

/* Selects bits of `positive` where the weights are set, and of `negative` elsewhere. */
static inline uint32_t ss_select(uint32_t weights, uint32_t positive, uint32_t negative) {
    return (weights & (positive ^ negative)) ^ negative;
}

/* Weights of `channels` channels, four words of each in turn. */
static inline void ss_count_some(const uint32_t *positive, const uint32_t *negative,
                                 int32_t chunks, const uint32_t *weights, int32_t planes,
                                 int32_t channels, int32_t *counts) {
    for (int32_t c = 0; c < channels; c++) {
        int32_t count = 0;
        for (int32_t plane = 0; plane < planes; plane++) {
            const uint32_t *w = weights + 4 * (plane * channels + c);
            const uint32_t *p = positive, *n = negative;
            for (int32_t i = 0; i < chunks; i++) {
                count += ss_ones_four(ss_select(w[0], p[0], n[0]), ss_select(w[1], p[1], n[1]),
                                      ss_select(w[2], p[2], n[2]), ss_select(w[3], p[3], n[3]));
                p += 4, n += 4, w += 4 * planes * channels;
            }
        }
        counts[c] = count;
    }
}

static inline void ss_count_eight_plain(const uint32_t *positive, const uint32_t *negative,
                                        int32_t chunks, const uint32_t *weights, int32_t planes,
                                        int32_t *counts) {
    ss_count_some(positive, negative, chunks, weights, planes, 8, counts);
}

static inline int32_t ss_dot_one_plain(const int8_t *a, const int8_t *b, int32_t count) {
    int32_t sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* `tap_offsets` is the offset of each tap's channels from `data`. Sums that are `narrow` fit into
 * 16 bits, at each tap. */
static inline void ss_dot_depthwise_plain(const int8_t *data, const int32_t *tap_offsets,
                                          int32_t taps, const int8_t *weights, int32_t stride,
                                          int32_t channels, int32_t narrow, int32_t *sums) {
    (void)narrow;
    for (int32_t c = 0; c < channels; c++) {
        int32_t sum = 0;
        for (int32_t tap = 0; tap < taps; tap++) {
            sum += data[tap_offsets[tap] + c] * weights[tap * stride + c];
        }
        sums[c] = sum;
    }
}

#ifndef SS_HAS_LANES
typedef struct {
    int8_t at[16];
} ss_lanes;

#define SS_LANES(name, arguments, expression)       \
    static inline ss_lanes name arguments {         \
        ss_lanes to;                                \
        for (int i = 0; i < 16; i++) {              \
            to.at[i] = (int8_t)(expression);        \
        }                                           \
        return to;                                  \
    }
SS_LANES(ss_plus, (ss_lanes a, ss_lanes b), a.at[i] + b.at[i])
SS_LANES(ss_minus, (ss_lanes a, ss_lanes b), a.at[i] - b.at[i])
SS_LANES(ss_shifted, (ss_lanes a, int by), a.at[i] * (1 << by))
SS_LANES(ss_expand_bits, (uint32_t p, uint32_t n), (int)((p >> i) & 1U) - (int)((n >> i) & 1U))
SS_LANES(ss_expand_weights, (const uint8_t *from, int32_t at, int32_t bits),
         bits == 1   ? 1 - 2 * ((from[i] >> at) & 1)
         : bits == 2 ? (((from[i] >> at) & 3) ^ 2) - 2
                     : (((from[i] >> at) & 15) ^ 8) - 8)
SS_LANES(ss_load_lanes, (const int8_t *from), from[i])

static inline void ss_put_lanes(int8_t *to, ss_lanes a) {
    for (int i = 0; i < 16; i++) {
        to[i] = a.at[i];
    }
}
#endif

static inline void ss_four_tiles_plain(const int8_t *features, int32_t inputs,
                                       const int8_t *filters, int32_t *sums) {
    for (int32_t tile = 0; tile < 4; tile++, features += inputs, sums += 16) {
        const int8_t *w = filters;
        int32_t s[16] = {0};
        for (int32_t c = 0; c < inputs; c += 4, w += 64) {
            const int x0 = features[c], x1 = features[c + 1];
            const int x2 = features[c + 2], x3 = features[c + 3];
            for (int i = 0; i < 16; i++) {
                s[i] += x0 * w[4 * i] + x1 * w[4 * i + 1] + x2 * w[4 * i + 2] + x3 * w[4 * i + 3];
            }
        }
        for (int i = 0; i < 16; i++) {
            sums[i] = s[i];
        }
    }
}

static inline uint32_t ss_reached_plain(const int32_t *sums, const int32_t *limits,
                                        int32_t count) {
    uint32_t bits = 0;
    for (int32_t i = 0; i < count; i++) {
        bits |= (uint32_t)(sums[i] >= limits[i]) << i;
    }
    return bits;
}

/* The level of a sum by affine steps. The result before the shift fits into 32 bits, but the
 * product alone may not: unsigned numbers wrap. Compilers shift negative numbers arithmetically. */
static inline int32_t ss_affine(int32_t sum, int32_t multiplier, int32_t offset, int32_t shift,
                                int32_t low, int32_t high) {
    const uint32_t product = (uint32_t)sum * (uint32_t)multiplier;
    const int32_t level = (int32_t)(product + (uint32_t)offset) >> shift;
    return level < low ? low : level > high ? high : level;
}

/* Of some places, whose sums are SS_BLOCK and whose levels are `step` elements apart. */
static inline void ss_affine_bytes_plain(const int32_t *restrict sums,
                                         const int32_t *restrict multipliers,
                                         const int32_t *restrict offsets,
                                         const int8_t *restrict shifts, int32_t low,
                                         int32_t high, int32_t count, int32_t places, int32_t step,
                                         int8_t *restrict to) {
    for (int32_t p = 0; p < places; p++, sums += SS_BLOCK, to += step) {
        for (int32_t i = 0; i < count; i++) {
            to[i] = (int8_t)ss_affine(sums[i], multipliers[i], offsets[i], shifts[i], low, high);
        }
    }
}

#endif
