/* A sum becomes the level whose index is the number of thresholds of its channel that it reaches.
 * Affine steps compute the level instead, as (sum * multiplier + offset) >> shift, clamped, where
 * these numbers were proven to give it for every sum. Sums in another unit need 64 bits. A sink
 * receives the sums of a layer. */
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
    const int32_t *multipliers, *offsets; /* of affine steps, by channel */
    const int8_t *shifts;
    int32_t low, high; /* levels, as stored by affine steps */
    const int64_t *addends; /* of sums in another unit */
    const int32_t *factors; /* or null */
    const ss_features *beside; /* features that are added, times `others`; or null */
    const int32_t *others;
};

/* Returns how many thresholds of a channel a sum reaches, by bisection. They do not decrease, and
 * their number is a power of two minus 1. */
static inline int32_t ss_search(const ss_sink *sink, int32_t channel, int32_t sum) {
    int32_t reached = 0;
    for (int32_t half = (sink->steps + 1) / 2; half > 0; half /= 2) {
        const int32_t at = channel * sink->steps + reached + half - 1;
        reached += sum >= ss_number(sink->thresholds, sink->width, at) ? half : 0;
    }
    return reached;
}

/* Stores sums. */
static inline void ss_store_sums(const ss_sink *sink, int32_t place, int32_t places,
                                 int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++) {
        ss_put_row(sink->out, place + p, channel, count, sums + p * SS_BLOCK);
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
                const int32_t at = step * out->channels + channel + c + i;
                limits[step][i] = ss_number(sink->thresholds, sink->width, at);
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

/* Stores levels as bytes or more. */
static inline void ss_store_levels(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++, sums += SS_BLOCK) {
        int32_t values[SS_BLOCK];
        for (int32_t c = 0; c < count; c++) {
            values[c] = sink->levels[ss_search(sink, channel + c, sums[c])];
        }
        ss_put_row(sink->out, place + p, channel, count, values);
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

/* Stores levels as bytes, by affine steps. */
static inline void ss_store_affine(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    const int32_t *m = sink->multipliers + channel, *b = sink->offsets + channel;
    const int8_t *shifts = sink->shifts + channel;
    int32_t p = 0;
#ifdef SS_HAS_PACKED
    for (; p + 4 <= places; p += 4, sums += 4 * SS_BLOCK) {
        SS_WITH_LIMITS(ss_store_four, sink, sink, place + p, channel, count, sums);
    }
#endif
    const int32_t step = sink->out->channels;
    int8_t *to = (int8_t *)sink->out->data + (place + p) * step + channel;
    ss_affine_bytes(sums, m, b, shifts, sink->low, sink->high, count, places - p, step, to);
}

/* Stores sums in another unit: ((sum * multiplier + value beside * other + addend) >> shift),
 * clamped; the sums times a factor first, if there are factors. */
static inline void ss_store_rescaled(const ss_sink *sink, int32_t place, int32_t places,
                                     int32_t channel, int32_t count, const int32_t *sums) {
    const int32_t *m = sink->multipliers + channel, low = sink->low, high = sink->high;
    const int64_t *b = sink->addends + channel;
    const int8_t *shifts = sink->shifts + channel;
    for (int32_t p = 0; p < places; p++, sums += SS_BLOCK) {
        int32_t values[SS_BLOCK];
#ifdef SS_HAS_RESCALED
        if (!sink->factors && count % 4 == 0) {
            const int32_t *others = sink->beside ? sink->others + channel : 0;
            if (others) {
                ss_get_row(sink->beside, place + p, channel, count, values);
            }
            ss_rescaled_row(sums, m, b, shifts, values, others, low, high, count, values);
            ss_put_row(sink->out, place + p, channel, count, values);
            continue;
        }
#endif
        int64_t totals[SS_BLOCK];
        for (int32_t c = 0; c < count; c++) {
            const int64_t factor = sink->factors ? sink->factors[channel + c] : 1;
            totals[c] = sums[c] * factor * m[c] + b[c];
        }
        if (sink->beside) {
            ss_get_row(sink->beside, place + p, channel, count, values);
            for (int32_t c = 0; c < count; c++) {
                totals[c] += (int64_t)values[c] * sink->others[channel + c];
            }
        }
        for (int32_t c = 0; c < count; c++) {
            const int64_t level = totals[c] >> shifts[c];
            values[c] = (int32_t)(level < low ? low : level > high ? high : level);
        }
        ss_put_row(sink->out, place + p, channel, count, values);
    }
}

/* The same as gemmlowp: the high half of 2 * value * multiplier, rounded, then a rounding shift. */
static inline void ss_store_doubly(const ss_sink *sink, int32_t place, int32_t places,
                                   int32_t channel, int32_t count, const int32_t *sums) {
    for (int32_t p = 0; p < places; p++) {
        for (int32_t c = channel; c < channel + count; c++) {
            const int64_t factor = sink->factors ? sink->factors[c] : 1;
            const int64_t value = sums[p * SS_BLOCK + c - channel] * factor + sink->addends[c];
            const int64_t product = value * sink->multipliers[c], one = 1;
            const int64_t nudge = product < 0 ? 1 - (one << 30) : one << 30;
            const int64_t half = (product + nudge) / (one << 31);
            const int64_t mask = (one << (sink->shifts[c] - 31)) - 1;
            const int64_t limit = (mask >> 1) + (half < 0);
            const int64_t level = (half >> (sink->shifts[c] - 31)) + ((half & mask) > limit);
            ss_put(sink->out, place + p, c,
                   (int32_t)(level < sink->low ? sink->low : level > sink->high ? sink->high : level));
        }
    }
}

static inline void ss_emit_sums(const ss_sink *sink, int32_t place, int32_t places, int32_t channel,
                                int32_t count, const int32_t *sums) {
#ifdef SOFTSTAIR_TRACE
    for (int32_t p = 0; sink->sums && p < places; p++) {
        ss_put_row(sink->sums, place + p, channel, count, sums + p * SS_BLOCK);
    }
#endif
    sink->store(sink, place, places, channel, count, sums);
}

/* Passes sums or features that were stored to a sink. */
static inline void ss_steps(const ss_features *in, const ss_sink *sink) {
    int32_t sums[SS_BLOCK];
    for (int32_t place = 0; place < in->places; place++) {
        for (int32_t c = 0; c < in->channels; c += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, in->channels - c);
            ss_get_row(in, place, c, count, sums);
            sink->store(sink, place, 1, c, count, sums);
        }
    }
}

#endif
