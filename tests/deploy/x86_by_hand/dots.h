/* Dot products of bytes (VNNI) and products of tiles (AMX) by hand, element by element, for
 * processors that have neither: the runtime is compiled as for those that have. A tile that is used
 * before its shape is set ends the program. TILES is the answer to the question for tiles, and
 * WRONG is added to each of their products. */
#ifndef DOTS_BY_HAND_H
#define DOTS_BY_HAND_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline void add_dots(int32_t *sums, const uint8_t *x, const int8_t *w, int count) {
    for (int i = 0; i < 4 * count; i++) {
        sums[i / 4] += x[i] * w[i];
    }
}

#define DOTS(name, type)                                            \
    static inline type name(type sums, type x, type w) {            \
        int32_t total[sizeof(type) / 4];                            \
        uint8_t features[sizeof(type)];                             \
        int8_t weights[sizeof(type)];                               \
        memcpy(total, &sums, sizeof sums);                          \
        memcpy(features, &x, sizeof x);                             \
        memcpy(weights, &w, sizeof w);                              \
        add_dots(total, features, weights, (int)sizeof(type) / 4);  \
        memcpy(&sums, total, sizeof sums);                          \
        return sums;                                                \
    }

#ifdef __AVX512BW__
DOTS(dots_256, __m256i)
DOTS(dots_512, __m512i)
#undef _mm256_dpbusd_epi32 /* clang has macros */
#undef _mm512_dpbusd_epi32
#define _mm256_dpbusd_epi32 dots_256
#define _mm512_dpbusd_epi32 dots_512
#define __AVX512VNNI__ 1
#else
DOTS(dots_256, __m256i)
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 dots_256
#define __AVXVNNI__ 1
#endif

#ifdef TILES
#define __AMX_INT8__ 1
#define SS_ASK_FOR_TILES() TILES
static uint8_t tiles[8][16][64];
static int has_shape;

static inline void set_shape(const void *from) {
    const uint8_t *shape = (const uint8_t *)from;
    has_shape = TILES && shape[0] == 1;
    for (int i = 0; i < 8; i++) {
        has_shape &= shape[16 + 2 * i] == 64 && shape[17 + 2 * i] == 0 && shape[48 + i] == 16;
    }
}

static inline uint8_t *tile_of(int number) {
    if (!has_shape) {
        __builtin_trap();
    }
    return tiles[number][0];
}

static inline void copy_tile(int number, uint8_t *memory, long step, int store) {
    uint8_t *tile = tile_of(number);
    for (int row = 0; row < 16; row++, memory += step, tile += 64) {
        memcpy(store ? memory : tile, store ? tile : memory, 64);
    }
}

static inline void multiply_tiles(int sums, int a, int b) {
    const uint8_t *x = tile_of(a), *w = tile_of(b);
    for (int m = 0; m < 16; m++) {
        int32_t total[16];
        memcpy(total, tile_of(sums) + 64 * m, 64);
        for (int n = 0; n < 16; n++) {
            for (int k = 0; k < 16; k++) {
                add_dots(total + n, x + 64 * m + 4 * k, (const int8_t *)w + 64 * k + 4 * n, 1);
            }
            total[n] += WRONG;
        }
        memcpy(tile_of(sums) + 64 * m, total, 64);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig set_shape
#define _tile_release() (has_shape = 0)
#define _tile_zero(number) memset(tile_of(number), 0, 1024)
#define _tile_loadd(number, from, step) copy_tile(number, (uint8_t *)(uintptr_t)(from), step, 0)
#define _tile_stored(number, to, step) copy_tile(number, (uint8_t *)(to), step, 1)
#define _tile_dpbusd multiply_tiles
#endif

#endif
