/* Inner loops of softstair_panels.h: SSE2, which every x86-64 has, AVX2, AVX-512, VNNI and AMX, as
 * the compiler's options allow, or plain C.
 *
 *   ss_unpack_units     weights from codes: bytes, or halves for SSE2
 *   ss_multiply_panels  products of SS_PANEL_PLACES windows and a panel, or two for AVX-512
 *   ss_multiply_taps    products of each channel with its own weights
 *   ss_put_counted      levels by their thresholds, as bytes
 *   ss_affine_bytes     levels by affine steps
 *   ss_rescaled_row     levels in another unit
 *
 * Two products of bytes may exceed 16 bits: the writer has proven that none does, and how many
 * fours a sum of 16 bits holds (`chunk`). VNNI adds four products to 32 bits.
 */
#ifndef SOFTSTAIR_X86_H
#define SOFTSTAIR_X86_H

#include <stdint.h>

#if defined(__SSE2__) && !defined(SOFTSTAIR_PORTABLE)
#include <immintrin.h>
#if defined(__AVX2__)
#define SS_AVX2
#endif
#if defined(SS_AVX2) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SS_AVX512
#endif
#endif

#include "softstair_plain.h"

#ifdef SS_AVX512
#define SS_PANEL_CHANNELS 32
#define SS_PANEL_PLACES 32
#else
#define SS_PANEL_CHANNELS 16
#define SS_PANEL_PLACES 24
#endif
#define SS_LOAD(w, from) _mm##w##_loadu_si##w((const __m##w##i *)(const void *)(from))
#define SS_STORE(w, to, value) _mm##w##_storeu_si##w((__m##w##i *)(void *)(to), value)
#define SS_LOAD_128(from) _mm_loadu_si128((const __m128i *)(const void *)(from))
#define SS_STORE_128(to, value) _mm_storeu_si128((__m128i *)(void *)(to), value)

#ifdef SS_AVX2
typedef int8_t ss_weight;
typedef int32_t ss_four __attribute__((may_alias, aligned(1)));

static inline void ss_unpack_units(const uint8_t *from, int32_t units, int32_t bits, int32_t base,
                                   int32_t step, int8_t *to) {
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    const __m256i first = _mm256_set1_epi8((char)base);
    const __m256i twice = _mm256_set1_epi8((char)(step == 2 ? -1 : 0));
    const __m128i by = _mm_cvtsi32_si128(bits);
    for (int32_t i = 0; i < units; i++, from += 64) {
        __m256i u = SS_LOAD(256, from), v = SS_LOAD(256, from + 32);
        for (int32_t done = 0; done < 8; done += bits, to += 64) {
            const __m256i a = _mm256_and_si256(u, mask), b = _mm256_and_si256(v, mask);
            const __m256i c = _mm256_add_epi8(a, _mm256_and_si256(a, twice));
            const __m256i d = _mm256_add_epi8(b, _mm256_and_si256(b, twice));
            SS_STORE(256, to, _mm256_add_epi8(c, first));
            SS_STORE(256, to + 32, _mm256_add_epi8(d, first));
            u = _mm256_srl_epi16(u, by);
            v = _mm256_srl_epi16(v, by);
        }
    }
}

/* Adds the products of four inputs and the channels of a register, to 16 or to 32 bits. */
#define SS_ADD_16(w, sums, x, u) _mm##w##_add_epi16(sums, _mm##w##_maddubs_epi16(x, u))
#define SS_TOTAL_16(w, sums) _mm##w##_madd_epi16(sums, _mm##w##_set1_epi16(1))
#define SS_ADD_32(w, sums, x, u) \
    _mm##w##_add_epi32(          \
        sums, _mm##w##_madd_epi16(_mm##w##_maddubs_epi16(x, u), _mm##w##_set1_epi16(1)))
#define SS_TOTAL_32(w, sums) sums
#if defined(__AVX512VNNI__) && defined(SS_AVX512)
#define SS_VNNI
#define SS_ADD_DOT(w, sums, x, u) _mm##w##_dpbusd_epi32(sums, x, u)
#elif defined(__AVXVNNI__) && !defined(SS_AVX512)
#define SS_VNNI
#define SS_ADD_DOT(w, sums, x, u) _mm##w##_dpbusd_avx_epi32(sums, x, u)
#endif

/* For each place: two registers of sums. */
#define SS_EACH_1(step, w, how) step(0, w, how)
#define SS_EACH_6(step, w, how) \
    step(0, w, how) step(1, w, how) step(2, w, how) step(3, w, how) step(4, w, how) step(5, w, how)
#define SS_EACH_8(step, w, how) SS_EACH_6(step, w, how) step(6, w, how) step(7, w, how)
#define SS_BEGIN(n, w, how)        \
    const uint8_t *x##n = x[n];    \
    __m##w##i a##n = none, b##n = none;
#define SS_ADD(n, w, how)                                                               \
    {                                                                                   \
        const __m##w##i four = _mm##w##_set1_epi32(*(const ss_four *)(const void *)(x##n + from)); \
        a##n = how(w, a##n, four, u);                                                   \
        b##n = how(w, b##n, four, v);                                                   \
    }
#define SS_END(n, w, how)                                                                     \
    {                                                                                         \
        int32_t *to = sums + (n) * SS_BLOCK, *more = to + w / 32;                             \
        SS_STORE(w, to, _mm##w##_add_epi32(SS_LOAD(w, to), how(w, a##n)));                    \
        SS_STORE(w, more, _mm##w##_add_epi32(SS_LOAD(w, more), how(w, b##n)));                \
    }
#define SS_KERNEL(name, w, each, add, total)                                                    \
    static inline void name(const uint8_t *const *x, const int32_t *at, const int8_t *p,        \
                            const int8_t *q, int32_t fours, int32_t *sums) {                    \
        const __m##w##i none = _mm##w##_setzero_si##w();                                        \
        each(SS_BEGIN, w, none) for (int32_t k = 0; k < fours; k++, p += 64, q += 64) {         \
            const __m##w##i u = SS_LOAD(w, p), v = SS_LOAD(w, q);                               \
            const int32_t from = at[k];                                                         \
            each(SS_ADD, w, add)                                                                \
        }                                                                                       \
        each(SS_END, w, total)                                                                  \
    }
#ifdef SS_AVX512
#define SS_TILE 8
#define SS_EACH SS_EACH_8
#else
#define SS_TILE 6
#define SS_EACH SS_EACH_6
#endif
#ifdef SS_VNNI
#define SS_KERNELS(w)                                                 \
    SS_KERNEL(ss_some_##w, w, SS_EACH, SS_ADD_DOT, SS_TOTAL_32)       \
    SS_KERNEL(ss_single_##w, w, SS_EACH_1, SS_ADD_DOT, SS_TOTAL_32)
#define SS_KERNEL_FOR(w, narrow, count) (count > 1 ? ss_some_##w : ss_single_##w)
#define SS_CHUNK(chunk, fours) (fours)
#else
#define SS_KERNELS(w)                                                    \
    SS_KERNEL(ss_some_16_##w, w, SS_EACH, SS_ADD_16, SS_TOTAL_16)        \
    SS_KERNEL(ss_some_32_##w, w, SS_EACH, SS_ADD_32, SS_TOTAL_32)        \
    SS_KERNEL(ss_single_16_##w, w, SS_EACH_1, SS_ADD_16, SS_TOTAL_16)    \
    SS_KERNEL(ss_single_32_##w, w, SS_EACH_1, SS_ADD_32, SS_TOTAL_32)
#define SS_KERNEL_FOR(w, narrow, count)                        \
    (count > 1 ? (narrow ? ss_some_16_##w : ss_some_32_##w)    \
               : (narrow ? ss_single_16_##w : ss_single_32_##w))
#define SS_CHUNK(chunk, fours) ((chunk) ? (chunk) : (fours))
#endif
SS_KERNELS(256)
#ifdef SS_AVX512
SS_KERNELS(512)
#endif

typedef void ss_kernel(const uint8_t *const *x, const int32_t *at, const int8_t *p, const int8_t *q,
                       int32_t fours, int32_t *sums);

#if defined(SS_AVX512) && defined(__AMX_INT8__)
#define SS_TILES
#ifndef SS_ASK_FOR_TILES /* Linux gives a process tiles if it asks: arch_prctl */
#ifdef __linux__
static inline int ss_ask_for_tiles(void) {
    long result = 158;
    __asm__ volatile("syscall"
                     : "+a"(result)
                     : "D"(0x1023L), "S"(18L)
                     : "rcx", "r11", "memory");
    return result == 0;
}
#define SS_ASK_FOR_TILES() ss_ask_for_tiles()
#else
#define SS_ASK_FOR_TILES() 0
#endif
#endif

/* Whether tiles may be used; without them, VNNI or AVX-512 is. */
static inline int ss_has_tiles(void) {
    static int answer; /* 0 before the question */
    if (answer == 0) {
        answer = SS_ASK_FOR_TILES() ? 1 : 2;
    }
    return answer == 1;
}

/* Every tile has 16 rows of 64 bytes. */
static inline void ss_begin_tiles(void) {
    static const struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (ss_has_tiles()) {
        _tile_loadconfig(&shape);
    }
}

static inline void ss_end_tiles(void) {
    if (ss_has_tiles()) {
        _tile_release();
    }
}

/* Loads 64 bytes of 16 windows, which need a copy if they are not as far from each other. */
#define SS_LOAD_ROWS(tile, x, step, copy)                                   \
    if (step) {                                                             \
        _tile_loadd(tile, *(x) + from, step);                               \
    } else {                                                                \
        for (int i = 0; i < 16; i++) {                                      \
            SS_STORE(512, (copy) + 64 * i, SS_LOAD(512, (x)[i] + from));    \
        }                                                                   \
        _tile_loadd(tile, copy, 64);                                        \
    }

/* The bytes between 16 windows, or 0 if they differ. */
static inline int32_t ss_step_of_rows(const uint8_t *const *x) {
    for (int i = 2; i < 16; i++) {
        if (x[i] - x[i - 1] != x[1] - x[0]) {
            return 0;
        }
    }
    return (int32_t)(x[1] - x[0]);
}

/* Adds the products of 32 windows and two panels. */
static inline void ss_multiply_tiles(const uint8_t *const *x, const int32_t *at, const int8_t *p,
                                     const int8_t *q, int32_t tiled, int32_t *sums) {
    const int32_t step = ss_step_of_rows(x), more = ss_step_of_rows(x + 16);
    uint8_t copies[2][1024];
    int32_t products[4][256];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t k = 0; k < tiled; k += 16) {
        const int32_t from = at[k];
        SS_LOAD_ROWS(4, x, step, copies[0])
        SS_LOAD_ROWS(5, x + 16, more, copies[1])
        _tile_loadd(6, p + 64 * k, 64);
        _tile_loadd(7, q + 64 * k, 64);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, products[0], 64);
    _tile_stored(1, products[1], 64);
    _tile_stored(2, products[2], 64);
    _tile_stored(3, products[3], 64);
    for (int i = 0; i < 64; i++) { /* of a place and 16 channels */
        int32_t *to = sums + i / 2 * SS_BLOCK + i % 2 * 16;
        const __m512i product = SS_LOAD(512, products[i / 32 * 2 + i % 2] + 16 * (i / 2 % 16));
        SS_STORE(512, to, _mm512_add_epi32(SS_LOAD(512, to), product));
    }
}
#endif

static inline void ss_multiply_panels(const uint8_t *const *x, int32_t places, const int32_t *at,
                               const int8_t *p, const int8_t *next, int32_t fours, int32_t chunk,
                               int32_t tiled, int32_t *sums) {
    (void)next, (void)chunk, (void)tiled;
#ifdef SS_TILES
    if (next && tiled && places > 4 && ss_has_tiles()) {
        ss_multiply_tiles(x, at, p, next, tiled, sums);
        at += tiled, p += 64 * tiled, next += 64 * tiled, fours -= tiled;
    }
#endif
    const int32_t size = SS_CHUNK(chunk, fours);
    for (int32_t i = 0, count; i < places; i += count) {
        count = places - i == 1 ? 1 : SS_TILE;
        ss_kernel *kernel = SS_KERNEL_FOR(256, chunk, count);
        const int8_t *q = p + 32;
#ifdef SS_AVX512
        if (next) {
            kernel = SS_KERNEL_FOR(512, chunk, count);
            q = next;
        }
#endif
        for (int32_t k = 0; k < fours; k += size) {
            kernel(x + i, at + k, p + 64 * k, q + 64 * k, ss_min(size, fours - k),
                   sums + i * SS_BLOCK);
        }
    }
}

/* Products of 16 channels with their own weights, tap by tap. */
static inline void ss_multiply_taps(const uint8_t *x, const int32_t *at, int32_t taps,
                                    const int16_t *weights, int32_t narrow, int32_t *sums) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int32_t i = 0; i < taps; i++, weights += 16) {
        const __m256i four = _mm256_cvtepu8_epi16(SS_LOAD_128(x + at[i]));
        const __m256i product = _mm256_mullo_epi16(four, SS_LOAD(256, weights));
        if (narrow) {
            a = _mm256_add_epi16(a, product);
        } else {
            a = _mm256_add_epi32(a, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(product)));
            b = _mm256_add_epi32(b, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(product, 1)));
        }
    }
    if (narrow) {
        b = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1));
        a = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(a));
    }
    SS_STORE(256, sums, _mm256_add_epi32(SS_LOAD(256, sums), a));
    SS_STORE(256, sums + 8, _mm256_add_epi32(SS_LOAD(256, sums + 8), b));
}

#define SS_HAS_COPY
static inline void ss_copy(uint8_t *to, const uint8_t *from, int32_t count) {
    int32_t i = 0;
    for (; i + 32 <= count; i += 32) {
        SS_STORE(256, to + i, SS_LOAD(256, from + i));
    }
    for (; i + 8 <= count; i += 8) {
        _mm_storel_epi64((__m128i *)(void *)(to + i),
                         _mm_loadl_epi64((const __m128i *)(const void *)(from + i)));
    }
    for (; i < count; i++) {
        to[i] = from[i];
    }
}
#define ss_fill ss_fill_plain

/* Stores up to 16 numbers of 0 to 255 as bytes. */
static inline void ss_put_sixteen(uint8_t *to, int32_t count, __m256i a, __m256i b) {
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    if (count >= 16) {
        SS_STORE_128(to, bytes);
    } else {
        uint8_t some[16];
        SS_STORE_128(some, bytes);
        ss_copy(to, some, count);
    }
}

/* From the highest level on, a level is lost for each threshold that is not reached. */
static inline void ss_put_counted(const int32_t *sums, const int32_t *thresholds,
                                  const int32_t *levels, int32_t steps, int32_t channels,
                                  int32_t count, uint8_t *to) {
    __m256i a = _mm256_set1_epi32(levels[0]), b = a;
    for (int32_t k = 0; k < steps; k++, thresholds += channels) {
        const __m256i step = _mm256_set1_epi32(levels[k + 1]);
        const __m256i u = _mm256_cmpgt_epi32(SS_LOAD(256, thresholds), SS_LOAD(256, sums));
        const __m256i v = _mm256_cmpgt_epi32(SS_LOAD(256, thresholds + 8), SS_LOAD(256, sums + 8));
        a = _mm256_sub_epi32(a, _mm256_and_si256(u, step));
        b = _mm256_sub_epi32(b, _mm256_and_si256(v, step));
    }
    ss_put_sixteen(to, count, a, b);
}

static inline __m256i ss_affine_eight(const int32_t *sums, __m256i m, __m256i b, __m256i shift,
                                      __m256i low, __m256i high) {
    const __m256i line = _mm256_add_epi32(_mm256_mullo_epi32(SS_LOAD(256, sums), m), b);
    return _mm256_max_epi32(low, _mm256_min_epi32(high, _mm256_srav_epi32(line, shift)));
}

#define SS_HAS_AFFINE
static inline void ss_affine_bytes(const int32_t *sums, const int32_t *multipliers,
                                   const int32_t *offsets, const int8_t *shifts, int32_t low,
                                   int32_t high, int32_t count, int32_t places, int32_t step,
                                   int8_t *to) {
    const __m256i least = _mm256_set1_epi32(low), most = _mm256_set1_epi32(high);
    int32_t i = 0;
#ifdef SOFTSTAIR_PANELS /* levels are 0 to 255 */
    for (; i + 16 <= count; i += 16) {
        const __m256i m = SS_LOAD(256, multipliers + i), m1 = SS_LOAD(256, multipliers + i + 8);
        const __m256i b = SS_LOAD(256, offsets + i), b1 = SS_LOAD(256, offsets + i + 8);
        const __m128i both = SS_LOAD_128(shifts + i);
        const __m256i shift = _mm256_cvtepi8_epi32(both);
        const __m256i shift1 = _mm256_cvtepi8_epi32(_mm_srli_si128(both, 8));
        for (int32_t p = 0; p < places; p++) {
            const int32_t *from = sums + p * SS_BLOCK + i;
            ss_put_sixteen((uint8_t *)to + p * step + i, 16,
                           ss_affine_eight(from, m, b, shift, least, most),
                           ss_affine_eight(from + 8, m1, b1, shift1, least, most));
        }
    }
#endif
    ss_affine_bytes_plain(sums + i, multipliers + i, offsets + i, shifts + i, low, high, count - i,
                          places, step, to + i);
}

#define SS_HAS_RESCALED
/* ((sum * multiplier + value * other + addend) >> shift), clamped, of channels by four. */
static inline void ss_rescaled_row(const int32_t *sums, const int32_t *multipliers,
                                   const int64_t *addends, const int8_t *shifts,
                                   const int32_t *values, const int32_t *others, int32_t low,
                                   int32_t high, int32_t count, int32_t *levels) {
    const __m256i least = _mm256_set1_epi64x(low), most = _mm256_set1_epi64x(high);
    const __m256i sign = _mm256_set1_epi64x(INT64_MIN);
    for (int32_t i = 0; i < count; i += 4) {
        const __m256i sum = _mm256_cvtepi32_epi64(SS_LOAD_128(sums + i));
        const __m256i m = _mm256_cvtepi32_epi64(SS_LOAD_128(multipliers + i));
        const __m256i shift =
            _mm256_cvtepi8_epi64(_mm_cvtsi32_si128(*(const ss_four *)(const void *)(shifts + i)));
        __m256i total = _mm256_add_epi64(_mm256_mul_epi32(sum, m), SS_LOAD(256, addends + i));
        if (others) {
            const __m256i value = _mm256_cvtepi32_epi64(SS_LOAD_128(values + i));
            const __m256i other = _mm256_cvtepi32_epi64(SS_LOAD_128(others + i));
            total = _mm256_add_epi64(total, _mm256_mul_epi32(value, other));
        }
        /* Only numbers without a sign are shifted in 64 bits. */
        total = _mm256_sub_epi64(_mm256_srlv_epi64(_mm256_xor_si256(total, sign), shift),
                                 _mm256_srlv_epi64(sign, shift));
        total = _mm256_blendv_epi8(total, least, _mm256_cmpgt_epi64(least, total));
        total = _mm256_blendv_epi8(total, most, _mm256_cmpgt_epi64(total, most));
        const __m256i low_words = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
        SS_STORE_128(levels + i, _mm256_castsi256_si128(
                                     _mm256_permutevar8x32_epi32(total, low_words)));
    }
}

#elif defined(__SSE2__) && !defined(SOFTSTAIR_PORTABLE)
typedef int16_t ss_weight;
typedef int32_t ss_four __attribute__((may_alias, aligned(1)));

static inline void ss_unpack_units(const uint8_t *from, int32_t units, int32_t bits, int32_t base,
                                   int32_t step, int16_t *to) {
    const __m128i mask = _mm_set1_epi8((char)((1 << bits) - 1)), none = _mm_setzero_si128();
    const __m128i first = _mm_set1_epi16((int16_t)base);
    const __m128i once = _mm_cvtsi32_si128(step - 1), by = _mm_cvtsi32_si128(bits);
    for (int32_t i = 0; i < units; i++, from += 64, to += 512 / bits) {
        for (int quarter = 0; quarter < 4; quarter++) {
            __m128i codes = SS_LOAD_128(from + 16 * quarter);
            for (int32_t done = 0; done < 8 / bits; done++) {
                int16_t *at = to + 64 * done + 16 * quarter;
                const __m128i a = _mm_and_si128(codes, mask);
                const __m128i low = _mm_sll_epi16(_mm_unpacklo_epi8(a, none), once);
                const __m128i high = _mm_sll_epi16(_mm_unpackhi_epi8(a, none), once);
                SS_STORE_128(at, _mm_add_epi16(low, first));
                SS_STORE_128(at + 8, _mm_add_epi16(high, first));
                codes = _mm_srl_epi16(codes, by);
            }
        }
    }
}

#define SS_EACH_8(step) step(0) step(1) step(2) step(3) step(4) step(5) step(6) step(7)
#define SS_BEGIN(i) __m128i a##i = none;
#define SS_ADD(i) a##i = _mm_add_epi32(a##i, _mm_madd_epi16(four, SS_LOAD_128(w + 8 * i)));
/* Two sums of each of two channels. */
#define SS_END(i)                                                         \
    {                                                                     \
        const __m128i both = _mm_add_epi32(a##i, _mm_srli_epi64(a##i, 32)); \
        to[2 * i] += _mm_cvtsi128_si32(both);                             \
        to[2 * i + 1] += _mm_cvtsi128_si32(_mm_srli_si128(both, 8));      \
    }
static inline void ss_multiply_panels(const uint8_t *const *x, int32_t places, const int32_t *at,
                               const int16_t *p, const int16_t *next, int32_t fours, int32_t chunk,
                               int32_t tiled, int32_t *sums) {
    const __m128i none = _mm_setzero_si128();
    (void)next, (void)chunk, (void)tiled;
    for (int32_t place = 0; place < places; place++) {
        const uint8_t *from = x[place];
        const int16_t *w = p;
        int32_t *to = sums + place * SS_BLOCK;
        SS_EACH_8(SS_BEGIN)
        for (int32_t k = 0; k < fours; k++, w += 64) {
            const __m128i bytes = _mm_cvtsi32_si128(*(const ss_four *)(const void *)(from + at[k]));
            const __m128i halves = _mm_unpacklo_epi8(bytes, none);
            const __m128i four = _mm_unpacklo_epi64(halves, halves);
            SS_EACH_8(SS_ADD)
        }
        SS_EACH_8(SS_END)
    }
}
#else
typedef int16_t ss_weight;
#define SS_UNPACKED_AT(input, channel) (16 * (input) + (channel))

static inline void ss_unpack_units(const uint8_t *from, int32_t units, int32_t bits, int32_t base,
                                   int32_t step, int16_t *to) {
    for (int32_t i = 0; i < units; i++, from += 64) {
        for (int32_t by = 0; by < 8; by += bits, to += 64) {
            for (int32_t at = 0; at < 64; at++) {
                const int32_t code = (from[at] >> by) & ((1 << bits) - 1);
                to[SS_UNPACKED_AT(at % 4, at / 4)] = (int16_t)(base + step * code);
            }
        }
    }
}

/* Of inputs `first` and the next of each four; compilers multiply eight channels at once. */
#define SS_MULTIPLY_PLAIN(name, type)                                                        \
    static inline void name(const uint8_t *x, const int32_t *at, const int16_t *w,           \
                            int32_t first, int32_t fours, int32_t *sums) {                   \
        type s[16] = {0};                                                                    \
        for (int32_t k = 0; k < fours; k++) {                                                \
            const type a = x[at[k] + first], b = x[at[k] + first + 1];                       \
            const int16_t *u = w + 64 * k + 16 * first, *v = u + 16;                         \
            for (int c = 0; c < 16; c++) {                                                   \
                s[c] = (type)(s[c] + a * u[c] + b * v[c]);                                   \
            }                                                                                \
        }                                                                                    \
        for (int c = 0; c < 16; c++) {                                                       \
            sums[c] += s[c];                                                                 \
        }                                                                                    \
    }
SS_MULTIPLY_PLAIN(ss_multiply_halves, int16_t)
SS_MULTIPLY_PLAIN(ss_multiply_words, int32_t)

static inline void ss_multiply_panels(const uint8_t *const *x, int32_t places, const int32_t *at,
                                      const int16_t *p, const int16_t *next, int32_t fours,
                                      int32_t chunk, int32_t tiled, int32_t *sums) {
    (void)next, (void)tiled;
    for (int32_t i = 0; i < 2 * places; i++) {
        const uint8_t *from = x[i / 2];
        int32_t *to = sums + i / 2 * SS_BLOCK;
        if (!chunk) {
            ss_multiply_words(from, at, p, i % 2 * 2, fours, to);
        }
        for (int32_t k = 0, count; chunk && k < fours; k += chunk) {
            count = ss_min(chunk, fours - k);
            ss_multiply_halves(from, at + k, p + 64 * k, i % 2 * 2, count, to);
        }
    }
}
#endif
#ifndef SS_UNPACKED_AT
#define SS_UNPACKED_AT(input, channel) (64 * ((input) / 4) + 4 * (channel) + (input) % 4)
#endif

#ifndef SS_AVX2
static inline void ss_multiply_taps(const uint8_t *x, const int32_t *at, int32_t taps,
                                    const int16_t *weights, int32_t narrow, int32_t *sums) {
    if (narrow) { /* compilers multiply eight or more at once */
        int16_t s[16] = {0};
        for (int32_t i = 0; i < taps; i++, weights += 16) {
            const uint8_t *from = x + at[i];
            for (int c = 0; c < 16; c++) {
                s[c] = (int16_t)(s[c] + from[c] * weights[c]);
            }
        }
        for (int c = 0; c < 16; c++) {
            sums[c] += s[c];
        }
        return;
    }
    for (int32_t i = 0; i < taps; i++, weights += 16) {
        for (int c = 0; c < 16; c++) {
            sums[c] += x[at[i] + c] * weights[c];
        }
    }
}

static inline void ss_put_counted(const int32_t *sums, const int32_t *thresholds,
                                  const int32_t *levels, int32_t steps, int32_t channels,
                                  int32_t count, uint8_t *to) {
    int32_t total[16];
    for (int c = 0; c < 16; c++) {
        total[c] = levels[0];
    }
    for (int32_t k = 0; k < steps; k++, thresholds += channels) {
        const int32_t step = levels[k + 1];
        for (int c = 0; c < 16; c++) {
            total[c] -= sums[c] < thresholds[c] ? step : 0;
        }
    }
    for (int32_t c = 0; c < count && c < 16; c++) {
        to[c] = (uint8_t)total[c];
    }
}
#endif
#ifndef SS_TILES
#define ss_begin_tiles() ((void)0)
#define ss_end_tiles() ((void)0)
#endif

#endif
