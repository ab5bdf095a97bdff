/* The DSP extension of Cortex-M4, M7 and M33, with two products of 16 bits in one instruction (see
 * softstair_vector.h); and packed products, several in one multiplication, for it or anywhere with
 * -DSOFTSTAIR_PACKED:
 *
 *   four   (x0 + x1 2^13)(w0 + w1 2^26) has x0 w0, x1 w0, x0 w1 and x1 w1 at bits 0, 13, 26 and 39:
 *          64 bits hold the sums of two places and two channels over a chunk of inputs, where the
 *          exporter has proven each within +-4095
 *   two    products of halves of 16 bits, for all other layers
 */
#ifndef SOFTSTAIR_DSP_H
#define SOFTSTAIR_DSP_H

#include <stdint.h>

#include "softstair_plain.h"

#define SS_FIELD_BIAS 0x8004002001000U /* 2^12 in each of the four fields of 13 bits */

#ifdef SS_HAS_DSP
#include <arm_acle.h>

/* Packed products with all registers. The end of x is on the stack. */
#define SS_SPECIALISED __attribute__((always_inline)) static inline
#define SS_IN_ASSEMBLY(name, type, code)                                                          \
    __attribute__((naked, noinline, unused)) static void name(                                    \
        const uint32_t *x __attribute__((unused)), const uint32_t *w __attribute__((unused)),     \
        int32_t count __attribute__((unused)), type *sums __attribute__((unused))) {              \
        __asm__("push {r3-r11, lr}\n" code "pop {r4-r11, pc}\n");                                 \
    }

SS_IN_ASSEMBLY(ss_multiply_four, uint64_t,
               "add r2, r0, r2, lsl #3\n push {r2}\n mov r12, r0\n mov lr, r1\n"
               "mov r0, #0x1000\n orr r0, #0x2000000\n mov r1, #0x40\n orr r1, #0x80000\n"
               "mov r2, r0\n mov r3, r1\n mov r4, r0\n mov r5, r1\n mov r6, r0\n mov r7, r1\n"
               "1:\n .rept 16\n ldrd r8, r9, [r12], #8\n ldrd r10, r11, [lr], #8\n"
               "smlal r0, r1, r8, r10\n smlal r2, r3, r8, r11\n"
               "smlal r4, r5, r9, r10\n smlal r6, r7, r9, r11\n .endr\n"
               "ldr r8, [sp]\n cmp r12, r8\n bne 1b\n pop {r8, r9}\n stm r9, {r0-r7}\n")
SS_IN_ASSEMBLY(ss_multiply_two, int32_t,
               "add r2, r0, r2, lsl #2\n push {r2}\n mov r12, r0\n mov lr, r1\n"
               "mov r0, #0\n mov r1, #0\n mov r2, #0\n mov r3, #0\n"
               "1:\n .rept 2\n ldm r12!, {r4-r7}\n ldm lr!, {r8-r11}\n"
               "smlad r0, r4, r8, r0\n smlad r1, r4, r9, r1\n"
               "smlad r2, r5, r8, r2\n smlad r3, r5, r9, r3\n"
               "smlad r0, r6, r10, r0\n smlad r1, r6, r11, r1\n"
               "smlad r2, r7, r10, r2\n smlad r3, r7, r11, r3\n .endr\n"
               "ldr r4, [sp]\n cmp r12, r4\n bne 1b\n pop {r4, r5}\n stm r5, {r0-r3}\n")
SS_IN_ASSEMBLY(ss_multiply_column, uint64_t,
               "mov r3, r1\n add r1, r0, r2, lsl #2\n add r2, r1, r2, lsl #2\n push {r1}\n"
               "1:\n mov r4, #0x1000\n orr r4, #0x2000000\n mov r5, #0x40\n orr r5, #0x80000\n"
               ".irp x, r0, r1, r2\n ldm \\x!, {r6-r9}\n ldm r3!, {r10-r12, lr}\n"
               "smlal r4, r5, r6, r10\n smlal r4, r5, r7, r11\n"
               "smlal r4, r5, r8, r12\n smlal r4, r5, r9, lr\n .endr\n sub r3, r3, #48\n"
               "ldrd r6, r7, [sp]\n strd r4, r5, [r7], #8\n str r7, [sp, #4]\n"
               "cmp r0, r6\n bne 1b\n pop {r6, r7}\n")

/* Bytes 0 and 2 of a word, widened to 16 bits; bytes 1 and 3. */
static inline int16x2_t ss_even(uint32_t bytes) { return __sxtb16((int8x4_t)bytes); }
static inline int16x2_t ss_odd(uint32_t bytes) {
    int16x2_t halves;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(halves) : "r"(bytes));
    return halves;
}

#define SS_HAS_DOT
static inline int32_t ss_dot_one(const int8_t *a, const int8_t *b, int32_t count) {
    int32_t sum = 0;
    for (int32_t i = 0; i < count; i += 4) {
        const uint32_t x = ss_load_word(a + i), w = ss_load_word(b + i);
        sum = __smlad(ss_even(x), ss_even(w), sum);
        sum = __smlad(ss_odd(x), ss_odd(w), sum);
    }
    return sum;
}

#define SS_HAS_DOT_DEPTHWISE
static inline void ss_dot_depthwise(const int8_t *data, const int32_t *tap_offsets, int32_t taps,
                                    const int8_t *weights, int32_t stride, int32_t channels,
                                    int32_t narrow, int32_t *sums) {
    uint32_t odd = (uint32_t)(uintptr_t)data | (uint32_t)(uintptr_t)weights | (uint32_t)stride;
    for (int32_t tap = 0; tap < taps; tap++) {
        odd |= (uint32_t)tap_offsets[tap];
    }
    /* Loads words if every place is aligned to one. */
    const int32_t aligned = (odd & 3U) != 0U ? 0 : channels & ~3;
    for (int32_t c = 0; c < aligned; c += 4) {
        int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (int32_t tap = 0; tap < taps; tap++) {
            const uint32_t x = ss_load_word(data + tap_offsets[tap] + c);
            const uint32_t w = ss_load_word(weights + tap * stride + c);
            s0 = __smlabb(ss_even(x), ss_even(w), s0);
            s1 = __smlabb(ss_odd(x), ss_odd(w), s1);
            s2 = __smlatt(ss_even(x), ss_even(w), s2);
            s3 = __smlatt(ss_odd(x), ss_odd(w), s3);
        }
        sums[c] = s0, sums[c + 1] = s1, sums[c + 2] = s2, sums[c + 3] = s3;
    }
    ss_dot_depthwise_plain(data + aligned, tap_offsets, taps, weights + aligned, stride,
                           channels - aligned, narrow, sums + aligned);
}
#else
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

/* Byte `i` of a word, with its sign. */
static inline uint32_t ss_byte(uint32_t word, int i) {
    return (uint32_t)(int32_t)(int8_t)(word >> (8 * i));
}

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
