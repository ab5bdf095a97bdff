/* The instructions of AVX2 that softstair_avx2.h asks for, by hand, element by element: so that what
 * it computes can be tried on a machine that has none of them. */
#ifndef IMMINTRIN_BY_HAND_H
#define IMMINTRIN_BY_HAND_H

#include <stdint.h>
#include <string.h>

typedef union {
    uint8_t u8[32];
    int8_t i8[32];
    uint16_t u16[16];
    int16_t i16[16];
    int32_t i32[8];
    uint32_t u32[8];
    uint64_t u64[4];
} __m256i;

typedef union {
    uint8_t u8[16];
    int8_t i8[16];
    int32_t i32[4];
    uint32_t u32[4];
} __m128i;

#define EACH(count, to, value)               \
    __m256i made;                            \
    for (int i = 0; i < (count); i++) {      \
        made.to[i] = (value);                \
    }                                        \
    return made

static inline __m256i _mm256_loadu_si256(const __m256i *from) {
    __m256i made;
    memcpy(&made, from, 32);
    return made;
}
static inline void _mm256_storeu_si256(__m256i *to, __m256i a) { memcpy(to, &a, 32); }
static inline __m128i _mm_loadu_si128(const __m128i *from) {
    __m128i made;
    memcpy(&made, from, 16);
    return made;
}
static inline __m256i _mm256_setzero_si256(void) { EACH(4, u64, 0); }
static inline __m256i _mm256_set1_epi8(char a) { EACH(32, i8, (int8_t)a); }
#define _mm256_setr_epi8(...) ss_given((const int8_t[32]){__VA_ARGS__})
static inline __m256i ss_given(const int8_t *a) { EACH(32, i8, a[i]); }
static inline __m256i _mm256_and_si256(__m256i a, __m256i b) { EACH(4, u64, a.u64[i] & b.u64[i]); }
static inline __m256i _mm256_xor_si256(__m256i a, __m256i b) { EACH(4, u64, a.u64[i] ^ b.u64[i]); }
static inline __m256i _mm256_srli_epi16(__m256i a, int by) {
    EACH(16, u16, (uint16_t)(a.u16[i] >> by));
}
static inline __m256i _mm256_add_epi8(__m256i a, __m256i b) {
    EACH(32, u8, (uint8_t)(a.u8[i] + b.u8[i]));
}
static inline __m256i _mm256_add_epi32(__m256i a, __m256i b) { EACH(8, u32, a.u32[i] + b.u32[i]); }
static inline __m256i _mm256_add_epi64(__m256i a, __m256i b) { EACH(4, u64, a.u64[i] + b.u64[i]); }
/* Within each half of 16 bytes. */
static inline __m256i _mm256_shuffle_epi8(__m256i a, __m256i b) {
    EACH(32, u8, (b.u8[i] & 128) ? 0 : a.u8[i / 16 * 16 + (b.u8[i] & 15)]);
}
static inline __m256i _mm256_sad_epu8(__m256i a, __m256i b) {
    __m256i made = _mm256_setzero_si256();
    for (int i = 0; i < 32; i++) {
        made.u64[i / 8] += (uint64_t)(a.u8[i] > b.u8[i] ? a.u8[i] - b.u8[i] : b.u8[i] - a.u8[i]);
    }
    return made;
}
static inline __m256i _mm256_broadcastsi128_si256(__m128i a) { EACH(32, u8, a.u8[i % 16]); }
static inline __m256i _mm256_cvtepi8_epi16(__m128i a) { EACH(16, i16, a.i8[i]); }
static inline __m256i _mm256_madd_epi16(__m256i a, __m256i b) {
    EACH(8, i32, a.i16[2 * i] * b.i16[2 * i] + a.i16[2 * i + 1] * b.i16[2 * i + 1]);
}
static inline __m128i _mm256_extracti128_si256(__m256i a, int half) {
    __m128i made;
    memcpy(&made, a.u8 + 16 * half, 16);
    return made;
}
static inline __m128i _mm256_castsi256_si128(__m256i a) { return _mm256_extracti128_si256(a, 0); }
static inline __m128i _mm_add_epi32(__m128i a, __m128i b) {
    for (int i = 0; i < 4; i++) {
        a.u32[i] += b.u32[i];
    }
    return a;
}
static inline __m128i _mm_shuffle_epi32(__m128i a, int which) {
    __m128i made;
    for (int i = 0; i < 4; i++) {
        made.u32[i] = a.u32[(which >> (2 * i)) & 3];
    }
    return made;
}
static inline int _mm_cvtsi128_si32(__m128i a) { return a.i32[0]; }

#endif
