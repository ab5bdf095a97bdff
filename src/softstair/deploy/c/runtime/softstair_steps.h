/* A sum becomes the level whose index is the number of thresholds of its channel that it reaches.
 * Affine steps compute the level instead, as (sum * multiplier + offset) >> shift, clamped, where
 * these numbers were proven to give it for every sum. A sink receives the sums of a layer. */
#ifndef SOFTSTAIR_STEPS_H
#define SOFTSTAIR_STEPS_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_vector.h"

typedef struct ss_sink ss_sink;

/* Receives the sums of `places` places from `place` on, SS_BLOCK apart, `count` channels each. */
typedef void ss_store_function(const ss_sink *sink, int32_t place, int32_t places, int32_t channel,
                               int32_t count, const int32_t *sums);

struct ss_sink {
    ss_store_function *store;
    const ss_features *out;
    const ss_features *sums; /* where a traced build stores the sums */
    const void *thresholds;  /* by channel, or for planes by step */
    int32_t width;           /* bytes per threshold */
    int32_t steps;           /* thresholds per channel */
    const int32_t *levels;   /* steps + 1, as stored */
    const ss_features *shortcut; /* its value selects the row of thresholds: */
    int32_t first, values;     /* one row for each of `values` values from `first` on */
    const int32_t *multipliers, *offsets; /* of affine steps, by channel */
    const int8_t *shifts;
    int32_t low, high; /* levels, as stored */
    /* Of wide steps, which repeat the roundings of a float network in fixed point: */
    const int32_t *scales;  /* factors of the first of two stages, by channel, or null */
    const int64_t *biases;  /* addends of that stage, or null */
    const int32_t *factors; /* of the last stage, times 2^shifts */
    const int64_t *addends;
    int32_t fused;          /* whether the last stage does not round its product */
    int64_t unit;           /* the distance between two levels */
    int64_t origin;         /* added to the result of the last stage */
    int64_t row;            /* the shortcut v adds v * row + rows[v] */
    const int32_t *rows;    /* or null */
    const int32_t *columns; /* level k begins at k * unit + columns[k - 1 - low]; or null */
    int32_t coarse;         /* ((x >> coarse) + 1) * reciprocal >> 44 is about x / unit */
    int64_t reciprocal;
};

static inline int32_t ss_threshold(const ss_sink *sink, int32_t at) {
    if (sink->width == 1) {
        return ((const int8_t *)sink->thresholds)[at];
    }
    if (sink->width == 2) {
        return ((const int16_t *)sink->thresholds)[at];
    }
    return ((const int32_t *)sink->thresholds)[at];
}

/* Returns how many thresholds a sum reaches, by bisection. They do not decrease, and their number
 * is a power of two minus 1. */
#define SS_SEARCH(name, type)                                                            \
    static inline int32_t name(const type *thresholds, int32_t steps, int32_t sum) {     \
        int32_t reached = 0;                                                             \
        if (steps == 15) { /* 4-bit levels */                                            \
            reached += sum >= thresholds[7] ? 8 : 0;                                     \
            reached += sum >= thresholds[reached + 3] ? 4 : 0;                           \
            reached += sum >= thresholds[reached + 1] ? 2 : 0;                           \
            return reached + (sum >= thresholds[reached] ? 1 : 0);                       \
        }                                                                                \
        for (int32_t half = (steps + 1) / 2; half > 0; half /= 2) {                      \
            reached += sum >= thresholds[reached + half - 1] ? half : 0;                 \
        }                                                                                \
        return reached;                                                                  \
    }                                                                                    \
    static inline void name##_all(const type *thresholds, int32_t steps, int32_t count,  \
                                  const int32_t *sums, int32_t *reached) {               \
        for (int32_t i = 0; i < count; i++) {                                            \
            reached[i] = name(thresholds + i * steps, steps, sums[i]);                   \
        }                                                                                \
    }
SS_SEARCH(ss_search_bytes, int8_t)
SS_SEARCH(ss_search_halves, int16_t)
SS_SEARCH(ss_search_words, int32_t)

/* The number of thresholds that the sums of some channels reach; those of a channel are contiguous,
 * from `at` on. */
static inline void ss_steps_of(const ss_sink *sink, int32_t at, int32_t count, const int32_t *sums,
                               int32_t *reached) {
    const void *all = sink->thresholds;
    if (sink->width == 1) {
        ss_search_bytes_all((const int8_t *)all + at, sink->steps, count, sums, reached);
    } else if (sink->width == 2) {
        ss_search_halves_all((const int16_t *)all + at, sink->steps, count, sums, reached);
    } else {
        ss_search_words_all((const int32_t *)all + at, sink->steps, count, sums, reached);
    }
}

/* Stores sums. */
static inline void ss_store_sums(const ss_sink *sink, int32_t place, int32_t places,
                                 int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++) {
        for (int32_t c = 0; c < count; c++) {
            ss_put(sink->out, place + p, channel + c, sums[p * SS_BLOCK + c]);
        }
    }
}

/* Stores levels as bit planes: two or three of -1, 0 and 1. */
static inline void ss_store_planes(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    const ss_features *out = sink->out;
    const int32_t words = ss_words(out);
    for (int32_t c = 0, width; c < count; c += width) {
        const int32_t shift = (channel + c) % 32;
        int32_t limits[2][32];
        width = ss_min(32 - shift, count - c);
        for (int32_t step = 0; step < sink->steps; step++) {
            for (int32_t i = 0; i < width; i++) {
                limits[step][i] = ss_threshold(sink, step * out->channels + channel + c + i);
            }
        }
        const uint32_t all = ~(uint32_t)0 >> (32 - width);
        for (int32_t p = 0; p < places; p++) {
            const int32_t *from = sums + p * SS_BLOCK + c;
            const int32_t word = (place + p) * words + (channel + c) / 32;
            const uint32_t low = ss_reached(from, limits[0], width);
            uint32_t positive = low;
            if (out->kind == SS_TERNARY) {
                positive = sink->steps == 2 ? ss_reached(from, limits[1], width) : 0U;
                ss_plane(out, 1)[word] |= (~low & all) << shift;
            }
            out->data[word] |= positive << shift;
        }
    }
}

/* Stores levels as bytes or words. */
static inline void ss_store_levels(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    int32_t reached[SS_BLOCK];
    for (int32_t p = 0; p < places; p++) {
        const int32_t first = (place + p) * sink->out->channels + channel;
        ss_steps_of(sink, channel * sink->steps, count, sums + p * SS_BLOCK, reached);
        if (sink->out->kind == SS_BYTES) {
            int8_t *to = (int8_t *)sink->out->data + first;
            for (int32_t c = 0; c < count; c++) {
                to[c] = (int8_t)sink->levels[reached[c]];
            }
        } else {
            int32_t *to = (int32_t *)sink->out->data + first;
            for (int32_t c = 0; c < count; c++) {
                to[c] = sink->levels[reached[c]];
            }
        }
    }
}

/* Calls a function whose last arguments are the lowest and the highest level of a sink; compilers
 * have an instruction for those of 4 bits. */
#define SS_WITH_LIMITS(function, sink, ...)                                \
    ((sink)->low == 0 && (sink)->high == 15 ? function(__VA_ARGS__, 0, 15) \
                                            : function(__VA_ARGS__, (sink)->low, (sink)->high))

/* Stores the levels of four places as bytes, by affine steps. */
SS_SPECIALISED void ss_store_four(const ss_sink *sink, int32_t place, int32_t channel,
                                  int32_t count, const int32_t *sums, int32_t low, int32_t high) {
    const int32_t step = sink->out->channels, *multipliers = sink->multipliers + channel;
    const int32_t *offsets = sink->offsets + channel;
    const int8_t *shifts = sink->shifts + channel;
    int8_t *to = (int8_t *)sink->out->data + place * step + channel;
    int8_t *to1 = to + step, *to2 = to1 + step, *to3 = to2 + step;
    for (int32_t c = 0; c < count; c++, sums++) {
        const int32_t m = multipliers[c], b = offsets[c], shift = shifts[c];
        to[c] = (int8_t)ss_affine(sums[0], m, b, shift, low, high);
        to1[c] = (int8_t)ss_affine(sums[SS_BLOCK], m, b, shift, low, high);
        to2[c] = (int8_t)ss_affine(sums[2 * SS_BLOCK], m, b, shift, low, high);
        to3[c] = (int8_t)ss_affine(sums[3 * SS_BLOCK], m, b, shift, low, high);
    }
}

/* Stores levels as bytes or words, by affine steps. */
static inline void ss_store_affine(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    const int32_t *m = sink->multipliers + channel, *b = sink->offsets + channel;
    const int8_t *shifts = sink->shifts + channel;
    int32_t p = 0;
#ifdef SS_HAS_PACKED
    for (; sink->out->kind == SS_BYTES && p + 4 <= places; p += 4, sums += 4 * SS_BLOCK) {
        SS_WITH_LIMITS(ss_store_four, sink, sink, place + p, channel, count, sums);
    }
#endif
    const int32_t step = sink->out->channels, first = (place + p) * step + channel;
    if (sink->out->kind == SS_BYTES) {
        int8_t *to = (int8_t *)sink->out->data + first;
        ss_affine_bytes(sums, m, b, shifts, sink->low, sink->high, count, places - p, step, to);
        return;
    }
    int32_t *to = (int32_t *)sink->out->data + first;
    for (; p < places; p++, sums += SS_BLOCK, to += step) {
        for (int32_t c = 0; c < count; c++) {
            to[c] = ss_affine(sums[c], m[c], b[c], shifts[c], sink->low, sink->high);
        }
    }
}

/* Returns how many bits more than the 24 of a float the magnitude of x has, or 0. */
static inline int32_t ss_excess(int64_t x) {
    const uint64_t magnitude = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    int32_t bits = 0;
#ifdef __GNUC__
    bits = 64 - __builtin_clzll((unsigned long long)magnitude | 1U);
#else
    while (bits < 64 && magnitude >> bits) {
        bits++;
    }
#endif
    return bits > 24 ? bits - 24 : 0;
}

/* Rounds to 24 significant bits, half to even, as a float does. Compilers shift negative numbers
 * arithmetically. */
static inline int64_t ss_round24(int64_t x) {
    const int32_t excess = ss_excess(x);
    const int64_t last = (int64_t)1 << excess;
    return excess ? ((x + last / 2 - 1 + (x >> excess & 1)) >> excess) * last : x;
}

/* Returns x * factor / 2^shift, rounded down. x has at most 24 significant bits; those that follow
 * are 0, and are removed before the product, which therefore has at most 48 bits. */
static inline int64_t ss_scaled(int64_t x, int32_t factor, int32_t shift) {
    const int32_t excess = ss_excess(x), left = excess - shift;
    x = (x >> excess) * factor;
    return left < 0 ? x >> -left : x * ((int64_t)1 << left);
}

/* Returns a sum after both stages, plus origin. All numbers were proven to fit into 64 bits. */
static inline int64_t ss_rescaled(const ss_sink *sink, int32_t channel, int32_t sum) {
    int64_t x = ss_round24(sum);
    if (sink->scales) {
        x = ss_round24(ss_scaled(x, sink->scales[channel], 0));
        x = sink->biases ? ss_round24(x + sink->biases[channel]) : x;
    }
    x = ss_scaled(x, sink->factors[channel], sink->shifts[channel]);
    return ss_round24((sink->fused ? x : ss_round24(x)) + sink->addends[channel]) + sink->origin;
}

/* Stores levels by wide steps. The candidate is right or one too high, and is then corrected. */
static inline void ss_store_wide(const ss_sink *sink, int32_t place, int32_t places,
                                 int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++) {
        for (int32_t c = channel; c < channel + count; c++) {
            int64_t x = ss_rescaled(sink, c, sums[p * SS_BLOCK + c - channel]);
            if (sink->shortcut) {
                const int32_t value = ss_at(sink->shortcut, place + p, c) - sink->first;
                x += value * sink->row + (sink->rows ? sink->rows[value] : 0);
            }
            const int64_t least = sink->low * sink->unit, most = (sink->high + 1) * sink->unit;
            x = x < least ? least : x > most ? most : x;
            const int64_t candidate = (((x >> sink->coarse) + 1) * sink->reciprocal) >> 44;
            int32_t level = candidate < sink->high ? (int32_t)candidate : sink->high;
            if (level > sink->low) {
                const int32_t column = sink->columns ? sink->columns[level - sink->low - 1] : 0;
                level -= x < level * sink->unit + column;
            }
            ss_put(sink->out, place + p, c, level + sink->out->bias);
        }
    }
}

/* Stores levels; a shortcut selects the row of thresholds. */
static inline void ss_store_with_shortcut(const ss_sink *sink, int32_t place, int32_t places,
                                          int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++) {
        for (int32_t c = 0; c < count; c++) {
            const int32_t value = ss_at(sink->shortcut, place + p, channel + c) - sink->first;
            const int32_t row = ((channel + c) * sink->values + value) * sink->steps;
            int32_t reached;
            ss_steps_of(sink, row, 1, sums + p * SS_BLOCK + c, &reached);
            ss_put(sink->out, place + p, channel + c, sink->levels[reached] + sink->out->bias);
        }
    }
}

static inline void ss_emit_sums(const ss_sink *sink, int32_t place, int32_t places, int32_t channel,
                                int32_t count, const int32_t *sums) {
#ifdef SOFTSTAIR_TRACE
    for (int32_t p = 0; sink->sums && p < places; p++) {
        for (int32_t c = 0; c < count; c++) {
            ss_put(sink->sums, place + p, channel + c, sums[p * SS_BLOCK + c]);
        }
    }
#endif
    sink->store(sink, place, places, channel, count, sums);
}

/* Applies thresholds to sums or features that were stored. */
static inline void ss_steps(const ss_features *in, const ss_sink *sink) {
    int32_t sums[SS_BLOCK];
    for (int32_t place = 0; place < in->places; place++) {
        for (int32_t c = 0; c < in->channels; c += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, in->channels - c);
            for (int32_t i = 0; i < count; i++) {
                sums[i] = ss_at(in, place, c + i);
            }
            sink->store(sink, place, 1, c, count, sums);
        }
    }
}

#endif
