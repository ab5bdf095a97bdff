/* The DSP extension of Cortex-M4, M7 and M33: two products of 16 bits in one instruction
 * (see softstair_vector.h). */
#ifndef SOFTSTAIR_DSP_H
#define SOFTSTAIR_DSP_H

#include <arm_acle.h>
#include <stdint.h>

#include "softstair_plain.h"

#define SS_HAS_DOT
#define SS_TILE_PLACES 2
#define SS_TILE_CHANNELS 2

/* Loads four bytes of an array of words. */
static inline uint32_t ss_four(const int8_t *bytes) {
    return *(const uint32_t *)(const void *)bytes;
}

/* Bytes 0 and 2 of a word, widened to 16 bits; bytes 1 and 3. */
static inline int16x2_t ss_even(uint32_t bytes) { return __sxtb16((int8x4_t)bytes); }
static inline int16x2_t ss_odd(uint32_t bytes) {
    int16x2_t halves;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(halves) : "r"(bytes));
    return halves;
}

static inline int32_t ss_dot_one(const int8_t *a, const int8_t *b, int32_t count) {
    int32_t sum = 0;
    for (int32_t i = 0; i < count; i += 4) {
        const uint32_t x = ss_four(a + i), w = ss_four(b + i);
        sum = __smlad(ss_even(x), ss_even(w), sum);
        sum = __smlad(ss_odd(x), ss_odd(w), sum);
    }
    return sum;
}

static inline void ss_dot_tile(const int8_t *const *windows, const int8_t *weights, int32_t row,
                               int32_t *sums) {
    const int8_t *a = windows[0], *b = windows[1], *v = weights, *w = weights + row;
    int32_t av = 0, aw = 0, bv = 0, bw = 0;
    for (int32_t i = 0; i < row; i += 4) {
        const uint32_t four_a = ss_four(a + i), four_b = ss_four(b + i);
        const uint32_t four_v = ss_four(v + i), four_w = ss_four(w + i);
        const int16x2_t even_a = ss_even(four_a), even_b = ss_even(four_b);
        const int16x2_t even_v = ss_even(four_v), even_w = ss_even(four_w);
        av = __smlad(even_a, even_v, av);
        aw = __smlad(even_a, even_w, aw);
        bv = __smlad(even_b, even_v, bv);
        bw = __smlad(even_b, even_w, bw);
        const int16x2_t odd_a = ss_odd(four_a), odd_b = ss_odd(four_b);
        const int16x2_t odd_v = ss_odd(four_v), odd_w = ss_odd(four_w);
        av = __smlad(odd_a, odd_v, av);
        aw = __smlad(odd_a, odd_w, aw);
        bv = __smlad(odd_b, odd_v, bv);
        bw = __smlad(odd_b, odd_w, bw);
    }
    sums[0] = av, sums[1] = aw;
    sums[SS_BLOCK] = bv, sums[SS_BLOCK + 1] = bw;
}

#define SS_HAS_EACH
static inline void ss_each(const int8_t *data, const int32_t *seen, int32_t taps,
                           const int8_t *weights, int32_t stride, int32_t channels,
                           int32_t *sums) {
    uint32_t odd = (uint32_t)(uintptr_t)data | (uint32_t)(uintptr_t)weights | (uint32_t)stride;
    for (int32_t tap = 0; tap < taps; tap++) {
        odd |= (uint32_t)seen[tap];
    }
    /* Loads words if every place is aligned to one. */
    const int32_t whole = (odd & 3U) != 0U ? 0 : channels & ~3;
    for (int32_t c = 0; c < whole; c += 4) {
        int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (int32_t tap = 0; tap < taps; tap++) {
            const uint32_t x = ss_four(data + seen[tap] + c);
            const uint32_t w = ss_four(weights + tap * stride + c);
            s0 = __smlabb(ss_even(x), ss_even(w), s0);
            s1 = __smlabb(ss_odd(x), ss_odd(w), s1);
            s2 = __smlatt(ss_even(x), ss_even(w), s2);
            s3 = __smlatt(ss_odd(x), ss_odd(w), s3);
        }
        sums[c] = s0, sums[c + 1] = s1, sums[c + 2] = s2, sums[c + 3] = s3;
    }
    ss_each_plain(data + whole, seen, taps, weights + whole, stride, channels - whole, sums + whole);
}

#endif
