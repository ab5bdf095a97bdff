/* AVX2: see softstair_vector.h. */
#ifndef SOFTSTAIR_AVX2_H
#define SOFTSTAIR_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#include "softstair_plain.h"

static inline __m256i ss_load(const void *bytes) {
    return _mm256_loadu_si256((const __m256i *)bytes);
}

/* Counts the bits of each byte, by a table of four bits. */
static inline __m256i ss_ones_of_bytes(__m256i bytes) {
    const __m256i fours = _mm256_set1_epi8(15);
    const __m256i table =
        _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1,
                         2, 2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_and_si256(bytes, fours);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), fours);
    return _mm256_add_epi8(_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high));
}

#define SS_HAS_COUNT_EIGHT
/* A register holds 128 weights of two channels; the 128 features are duplicated. */
static inline void ss_count_eight_of(const uint32_t *positive, const uint32_t *negative,
                                  int32_t chunks, const uint32_t *weights, int planes,
                                  int32_t *counts) {
    const __m256i none = _mm256_setzero_si256();
    __m256i sums[4] = {none, none, none, none};
    for (int32_t i = 0; i < chunks; i++) {
        const __m256i p =
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)positive));
        const __m256i n =
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)negative));
        const __m256i either = _mm256_xor_si256(p, n);
        for (int pair = 0; pair < 4; pair++) {
            const __m256i w = _mm256_and_si256(ss_load(weights + 8 * pair), either);
            __m256i ones = ss_ones_of_bytes(_mm256_xor_si256(w, n));
            if (planes == 2) {
                const __m256i v = _mm256_and_si256(ss_load(weights + 32 + 8 * pair), either);
                ones = _mm256_add_epi8(ones, ss_ones_of_bytes(_mm256_xor_si256(v, n)));
            }
            sums[pair] = _mm256_add_epi64(sums[pair], _mm256_sad_epu8(ones, none));
        }
        positive += 4, negative += 4, weights += 32 * planes;
    }
    for (int pair = 0; pair < 4; pair++) {
        int64_t four[4];
        _mm256_storeu_si256((__m256i *)(void *)four, sums[pair]);
        counts[2 * pair] = (int32_t)(four[0] + four[1]);
        counts[2 * pair + 1] = (int32_t)(four[2] + four[3]);
    }
}

#define SS_HAS_DOT
#define SS_TILE_PLACES 2
#define SS_TILE_CHANNELS 4

/* Sixteen bytes, widened to 16 bits. */
static inline __m256i ss_load_widened(const int8_t *bytes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)bytes));
}

static inline int32_t ss_horizontal_sum(__m256i sums) {
    const __m128i four =
        _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* Adds two products of 16 bits to each sum. VNNI does so in one instruction; this is untested. */
static inline __m256i ss_add_products(__m256i sums, __m256i x, __m256i w) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sums, x, w);
#elif defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sums, x, w);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(x, w));
#endif
}

static inline int32_t ss_dot_one(const int8_t *a, const int8_t *b, int32_t count) {
    __m256i sums = _mm256_setzero_si256();
    for (int32_t i = 0; i < count; i += 16) {
        sums = ss_add_products(sums, ss_load_widened(a + i), ss_load_widened(b + i));
    }
    return ss_horizontal_sum(sums);
}

static inline void ss_dot_tile(const int8_t *const *windows, const int8_t *weights, int32_t row,
                               int32_t *sums) {
    __m256i s[2][4];
    for (int c = 0; c < 4; c++) {
        s[0][c] = s[1][c] = _mm256_setzero_si256();
    }
    for (int32_t i = 0; i < row; i += 16) {
        const __m256i x = ss_load_widened(windows[0] + i), y = ss_load_widened(windows[1] + i);
        for (int c = 0; c < 4; c++) {
            const __m256i w = ss_load_widened(weights + c * row + i);
            s[0][c] = ss_add_products(s[0][c], x, w);
            s[1][c] = ss_add_products(s[1][c], y, w);
        }
    }
    for (int c = 0; c < 4; c++) {
        sums[c] = ss_horizontal_sum(s[0][c]);
        sums[SS_BLOCK + c] = ss_horizontal_sum(s[1][c]);
    }
}

#endif
