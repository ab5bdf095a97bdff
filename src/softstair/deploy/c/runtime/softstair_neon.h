/* NEON of 64-bit ARM, with instructions for dot products and 8-bit matrices (i8mm) if present: see
 * softstair_vector.h. */
#ifndef SOFTSTAIR_NEON_H
#define SOFTSTAIR_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#define SS_HAS_LANES
typedef int8x16_t ss_lanes;
#define ss_plus vaddq_s8
#define ss_minus vsubq_s8
#define ss_shifted vshlq_n_s8
#define ss_put_lanes vst1q_s8
#define ss_load_lanes vld1q_s8
#define SS_SPECIALISED __attribute__((always_inline)) static inline

#include "softstair_plain.h"

#define SS_HAS_COPY
static inline void ss_copy(uint8_t *to, const uint8_t *from, int32_t count) {
    int32_t i = 0;
    for (; i + 16 <= count; i += 16) {
        vst1q_u8(to + i, vld1q_u8(from + i));
    }
    if (count >= 8 && i < count) { /* the last eight bytes, and those before them */
        vst1_u8(to + ss_min(i, count - 8), vld1_u8(from + ss_min(i, count - 8)));
        i = count - 8;
        vst1_u8(to + i, vld1_u8(from + i));
        return;
    }
    ss_copy_plain(to + i, from + i, count - i);
}
#define ss_fill ss_fill_plain

static inline uint8x16_t ss_load(const uint32_t *words) {
    return vreinterpretq_u8_u32(vld1q_u32(words));
}

/* Adds sixteen bytes to four sums. */
static inline uint32x4_t ss_add_bytes(uint32x4_t sums, uint8x16_t bytes) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_u32(sums, bytes, vdupq_n_u8(1));
#else
    return vpadalq_u16(sums, vpaddlq_u8(bytes));
#endif
}

#define SS_HAS_ONES_ROW
static inline int32_t ss_ones_row(const uint32_t *row, int32_t words) {
    uint32x4_t sums = vdupq_n_u32(0);
    int32_t i = 0;
    for (; i + 4 <= words; i += 4) {
        sums = ss_add_bytes(sums, vcntq_u8(ss_load(row + i)));
    }
    return (int32_t)vaddvq_u32(sums) + ss_ones_row_plain(row + i, words - i);
}

#define SS_HAS_COUNT_EIGHT
/* Selection, count and addition are one instruction each: 128 ternary products take six. The
 * selection overwrites the weight, which is used once per load. */
static inline __attribute__((always_inline)) void ss_count_eight_of(
    const uint32_t *positive, const uint32_t *negative, int32_t chunks, const uint32_t *weights,
    int planes, int32_t *counts) {
    uint32x4_t s0 = vdupq_n_u32(0), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (int32_t i = 0; i < chunks; i++) {
        const uint8x16_t p = ss_load(positive), n = ss_load(negative);
        for (int plane = 0; plane < planes; plane++) {
            s0 = ss_add_bytes(s0, vcntq_u8(vbslq_u8(ss_load(weights), p, n)));
            s1 = ss_add_bytes(s1, vcntq_u8(vbslq_u8(ss_load(weights + 4), p, n)));
            s2 = ss_add_bytes(s2, vcntq_u8(vbslq_u8(ss_load(weights + 8), p, n)));
            s3 = ss_add_bytes(s3, vcntq_u8(vbslq_u8(ss_load(weights + 12), p, n)));
            s4 = ss_add_bytes(s4, vcntq_u8(vbslq_u8(ss_load(weights + 16), p, n)));
            s5 = ss_add_bytes(s5, vcntq_u8(vbslq_u8(ss_load(weights + 20), p, n)));
            s6 = ss_add_bytes(s6, vcntq_u8(vbslq_u8(ss_load(weights + 24), p, n)));
            s7 = ss_add_bytes(s7, vcntq_u8(vbslq_u8(ss_load(weights + 28), p, n)));
            weights += 32;
        }
        positive += 4, negative += 4;
    }
    const uint32x4_t low = vpaddq_u32(vpaddq_u32(s0, s1), vpaddq_u32(s2, s3));
    const uint32x4_t high = vpaddq_u32(vpaddq_u32(s4, s5), vpaddq_u32(s6, s7));
    vst1q_s32(counts, vreinterpretq_s32_u32(low));
    vst1q_s32(counts + 4, vreinterpretq_s32_u32(high));
}

#define SS_HAS_DOT
#define SS_TILE_PLACES 4
#define SS_TILE_CHANNELS 4
#define SS_EMIT_PLACES 32

static inline int32x4_t ss_add_products(int32x4_t sums, int8x16_t a, int8x16_t b) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sums, a, b);
#else
    sums = vpadalq_s16(sums, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vpadalq_s16(sums, vmull_high_s8(a, b));
#endif
}

static inline int32_t ss_dot_one(const int8_t *a, const int8_t *b, int32_t count) {
    int32x4_t sums = vdupq_n_s32(0);
    for (int32_t i = 0; i < count; i += 16) {
        sums = ss_add_products(sums, vld1q_s8(a + i), vld1q_s8(b + i));
    }
    return vaddvq_s32(sums);
}

static inline void ss_dot_tile(const int8_t *const *windows, const int8_t *weights, int32_t row,
                               int32_t *sums) {
    int32x4_t s[4][4];
    for (int p = 0; p < 4; p++) {
        for (int c = 0; c < 4; c++) {
            s[p][c] = vdupq_n_s32(0);
        }
    }
    for (int32_t i = 0; i < row; i += 16) {
        const int8_t *w = weights + i;
        const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + row), w2 = vld1q_s8(w + 2 * row),
                        w3 = vld1q_s8(w + 3 * row);
        for (int p = 0; p < 4; p++) {
            const int8x16_t x = vld1q_s8(windows[p] + i);
            s[p][0] = ss_add_products(s[p][0], x, w0);
            s[p][1] = ss_add_products(s[p][1], x, w1);
            s[p][2] = ss_add_products(s[p][2], x, w2);
            s[p][3] = ss_add_products(s[p][3], x, w3);
        }
    }
    for (int p = 0; p < 4; p++) {
        vst1q_s32(sums + p * SS_BLOCK,
                  vpaddq_s32(vpaddq_s32(s[p][0], s[p][1]), vpaddq_s32(s[p][2], s[p][3])));
    }
}

#define SS_HAS_DOT_DEPTHWISE
static inline void ss_dot_depthwise(const int8_t *data, const int32_t *tap_offsets, int32_t taps,
                                    const int8_t *weights, int32_t stride, int32_t channels,
                                    int32_t narrow, int32_t *sums) {
    int32_t c = 0;
    for (; narrow && c + 32 <= channels; c += 32) {
        int16x8_t s[4] = {vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0)};
        for (int32_t tap = 0; tap < taps; tap++) {
            const int8_t *x = data + tap_offsets[tap] + c, *w = weights + tap * stride + c;
            const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
            const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
            s[0] = vmlal_s8(s[0], vget_low_s8(x0), vget_low_s8(w0));
            s[1] = vmlal_high_s8(s[1], x0, w0);
            s[2] = vmlal_s8(s[2], vget_low_s8(x1), vget_low_s8(w1));
            s[3] = vmlal_high_s8(s[3], x1, w1);
        }
        for (int i = 0; i < 4; i++) {
            vst1q_s32(sums + c + 8 * i, vmovl_s16(vget_low_s16(s[i])));
            vst1q_s32(sums + c + 8 * i + 4, vmovl_high_s16(s[i]));
        }
    }
    for (; c + 8 <= channels; c += 8) {
        int32x4_t low = vdupq_n_s32(0), high = low;
        for (int32_t tap = 0; tap < taps; tap++) {
            const int8x8_t x = vld1_s8(data + tap_offsets[tap] + c);
            const int16x8_t product = vmull_s8(x, vld1_s8(weights + tap * stride + c));
            low = vaddw_s16(low, vget_low_s16(product));
            high = vaddw_high_s16(high, product);
        }
        vst1q_s32(sums + c, low);
        vst1q_s32(sums + c + 4, high);
    }
    ss_dot_depthwise_plain(data + c, tap_offsets, taps, weights + c, stride, channels - c, narrow,
                           sums + c); /* the rest */
}

static inline ss_lanes ss_expand_bits(uint32_t positive, uint32_t negative) {
    static const uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bit = vld1q_u8(bits);
    const uint8x16_t p =
        vcombine_u8(vdup_n_u8((uint8_t)positive), vdup_n_u8((uint8_t)(positive >> 8)));
    const uint8x16_t n =
        vcombine_u8(vdup_n_u8((uint8_t)negative), vdup_n_u8((uint8_t)(negative >> 8)));
    return vreinterpretq_s8_u8(vsubq_u8(vtstq_u8(n, bit), vtstq_u8(p, bit)));
}

static inline ss_lanes ss_expand_weights(const uint8_t *from, int32_t at, int32_t bits) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(from));
    if (bits == 4) {
        return vshrq_n_s8(vshlq_s8(bytes, vdupq_n_s8((int8_t)(4 - at))), 4);
    }
    if (bits == 2) {
        return vshrq_n_s8(vshlq_s8(bytes, vdupq_n_s8((int8_t)(6 - at))), 6);
    }
    const int8x16_t sign = vshrq_n_s8(vshlq_s8(bytes, vdupq_n_s8((int8_t)(7 - at))), 7);
    return vorrq_s8(sign, vdupq_n_s8(1));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
static inline int8x16_t ss_zip(int8x16_t a, int8x16_t b, int half) {
    const int64x2_t c = vreinterpretq_s64_s8(a), d = vreinterpretq_s64_s8(b);
    return vreinterpretq_s8_s64(half ? vzip2q_s64(c, d) : vzip1q_s64(c, d));
}

/* The products of four rows of inputs and 16 channels, whose weights are interleaved; those of two
 * rows, two channels and eight inputs are one instruction. */
static inline __attribute__((always_inline)) void ss_four_rows(
    const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, int32_t inputs,
    const int8_t *filters, int32_t *sums, int32_t step) {
    int32x4_t s[2][8]; /* rows 0 and 1, rows 2 and 3; of each two, channels 2 i and 2 i + 1 */
    for (int i = 0; i < 16; i++) {
        s[i / 8][i % 8] = vdupq_n_s32(0);
    }
    for (int32_t i = 0; i < inputs; i += 16) {
        const int8x16_t x0 = vld1q_s8(a + i), x1 = vld1q_s8(b + i), x2 = vld1q_s8(c + i),
                        x3 = vld1q_s8(d + i);
        for (int half = 0; half < 2; half++, filters += 128) {
            const int8x16_t x = ss_zip(x0, x1, half), y = ss_zip(x2, x3, half);
            for (int k = 0; k < 4; k++) {
                const int32x4_t u = vreinterpretq_s32_s8(vld1q_s8(filters + 16 * k));
                const int32x4_t v = vreinterpretq_s32_s8(vld1q_s8(filters + 64 + 16 * k));
                const int8x16_t w0 = vreinterpretq_s8_s32(vzip1q_s32(u, v));
                const int8x16_t w1 = vreinterpretq_s8_s32(vzip2q_s32(u, v));
                s[0][2 * k] = vmmlaq_s32(s[0][2 * k], x, w0);
                s[0][2 * k + 1] = vmmlaq_s32(s[0][2 * k + 1], x, w1);
                s[1][2 * k] = vmmlaq_s32(s[1][2 * k], y, w0);
                s[1][2 * k + 1] = vmmlaq_s32(s[1][2 * k + 1], y, w1);
            }
        }
    }
    for (int i = 0; i < 16; i++) {
        const int8x16_t left = vreinterpretq_s8_s32(s[i / 8][i % 4 * 2]);
        const int8x16_t right = vreinterpretq_s8_s32(s[i / 8][i % 4 * 2 + 1]);
        vst1q_s32(sums + i / 4 * step + i % 4 * 4,
                  vreinterpretq_s32_s8(ss_zip(left, right, i / 4 % 2)));
    }
}
#else
/* Adds the products of four channels' weights, four inputs each, and the inputs of a lane of x. */
#ifdef __ARM_FEATURE_DOTPROD
#define SS_ADD_FOURS(sums, w, x, lane) vdotq_laneq_s32(sums, w, x, lane)
#else
static inline int32x4_t ss_add_fours(int32x4_t sums, int8x16_t w, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(w, x))); /* at most 2 * 4900 */
}
#define SS_ADD_FOURS(sums, w, x, lane) \
    ss_add_fours(sums, w, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), lane)))
#endif
/* The barrier keeps GCC from loading more weights in advance than there are registers for. */
#define SS_ADD_LANE(lane)                                             \
    for (int i = 0; i < 4; i++) {                                     \
        const int8x16_t w = vld1q_s8(filters + 64 * (lane) + 16 * i); \
        s[0][i] = SS_ADD_FOURS(s[0][i], w, x0, lane);                 \
        s[1][i] = SS_ADD_FOURS(s[1][i], w, x1, lane);                 \
        s[2][i] = SS_ADD_FOURS(s[2][i], w, x2, lane);                 \
        s[3][i] = SS_ADD_FOURS(s[3][i], w, x3, lane);                 \
    }                                                                 \
    __asm__ volatile("" : : : "memory");

/* The products of four rows of inputs and 16 channels, whose weights are interleaved. */
static inline __attribute__((always_inline)) void ss_four_rows(
    const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, int32_t inputs,
    const int8_t *filters, int32_t *sums, int32_t step) {
    int32x4_t s[4][4];
    for (int i = 0; i < 16; i++) {
        s[i / 4][i % 4] = vdupq_n_s32(0);
    }
    for (int32_t i = 0; i < inputs; i += 16, filters += 256) {
        const int8x16_t x0 = vld1q_s8(a + i), x1 = vld1q_s8(b + i), x2 = vld1q_s8(c + i),
                        x3 = vld1q_s8(d + i);
        SS_ADD_LANE(0)
        SS_ADD_LANE(1)
        SS_ADD_LANE(2)
        SS_ADD_LANE(3)
    }
    for (int i = 0; i < 16; i++) {
        vst1q_s32(sums + i / 4 * step + i % 4 * 4, s[i / 4][i % 4]);
    }
}
#endif

#define SS_HAS_FOUR_TILES
static inline void ss_four_tiles(const int8_t *features, int32_t inputs, const int8_t *filters,
                                 int32_t *sums) {
    const int8_t *second = features + inputs, *third = second + inputs;
    ss_four_rows(features, second, third, third + inputs, inputs, filters, sums, 16);
}

/* Otherwise four products of any bytes could overflow. */
#if defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8)
#define SS_INTERLEAVED(channels) ((channels) / 16 * 16)
static inline void ss_dot_sixteen(const int8_t *const *windows, const int8_t *weights, int32_t row,
                                  int32_t *sums) {
    ss_four_rows(windows[0], windows[1], windows[2], windows[3], row, weights, sums, SS_BLOCK);
}
#endif

#define SS_HAS_REACHED
/* Two bytes per sum, all ones where it reaches its threshold. */
static inline uint8x16_t ss_reached_eight(const int32_t *sums, const int32_t *limits) {
    const uint32x4_t low = vcgeq_s32(vld1q_s32(sums), vld1q_s32(limits));
    const uint32x4_t high = vcgeq_s32(vld1q_s32(sums + 4), vld1q_s32(limits + 4));
    const uint16x8_t both = vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
    return vreinterpretq_u8_u16(both);
}

static inline uint32_t ss_reached(const int32_t *sums, const int32_t *limits, int32_t count) {
    static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint32_t all = 0;
    int32_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const uint8x16_t low = ss_reached_eight(sums + i, limits + i);
        const uint8x16_t high = ss_reached_eight(sums + i + 8, limits + i + 8);
        uint8x16_t bits = vandq_u8(vuzp1q_u8(low, high), vld1q_u8(bit));
        bits = vpaddq_u8(bits, bits);
        bits = vpaddq_u8(bits, bits);
        bits = vpaddq_u8(bits, bits);
        all |= (uint32_t)vgetq_lane_u16(vreinterpretq_u16_u8(bits), 0) << i;
    }
    return i < count ? all | ss_reached_plain(sums + i, limits + i, count - i) << i : all;
}

#define SS_HAS_AFFINE
static inline void ss_affine_bytes(const int32_t *sums, const int32_t *multipliers,
                                   const int32_t *offsets, const int8_t *shifts, int32_t low,
                                   int32_t high, int32_t count, int32_t places, int32_t step,
                                   int8_t *to) {
    const int16x8_t lowest = vdupq_n_s16((int16_t)low), highest = vdupq_n_s16((int16_t)high);
    int32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const int32x4_t m0 = vld1q_s32(multipliers + i), m1 = vld1q_s32(multipliers + i + 4);
        const int32x4_t b0 = vld1q_s32(offsets + i), b1 = vld1q_s32(offsets + i + 4);
        const int16x8_t left = vmovl_s8(vneg_s8(vld1_s8(shifts + i)));
        const int32x4_t left0 = vmovl_s16(vget_low_s16(left)), left1 = vmovl_high_s16(left);
        const int32_t *from = sums + i;
        int8_t *levels = to + i;
        for (int32_t p = 0; p < places; p++, from += SS_BLOCK, levels += step) {
            const int32x4_t a = vshlq_s32(vmlaq_s32(b0, vld1q_s32(from), m0), left0);
            const int32x4_t b = vshlq_s32(vmlaq_s32(b1, vld1q_s32(from + 4), m1), left1);
            const int16x8_t both = vqmovn_high_s32(vqmovn_s32(a), b);
            vst1_s8(levels, vmovn_s16(vminq_s16(vmaxq_s16(both, lowest), highest)));
        }
    }
    ss_affine_bytes_plain(sums + i, multipliers + i, offsets + i, shifts + i, low, high, count - i,
                          places, step, to + i);
}

#endif
