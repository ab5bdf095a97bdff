/* Products, differences and multiples of features, and copies in another order. */
#ifndef SOFTSTAIR_COMBINE_H
#define SOFTSTAIR_COMBINE_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"

/* Passes the products of two features to a sink; the second may have a single place. */
static inline void ss_product(const ss_features *a, const ss_features *b, const ss_sink *sink) {
    int32_t x[SS_BLOCK], y[SS_BLOCK];
    for (int32_t place = 0; place < a->places; place++) {
        const int32_t other = b->places > 1 ? place : 0;
        for (int32_t channel = 0; channel < a->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, a->channels - channel);
            ss_get_row(a, place, channel, count, x);
            ss_get_row(b, other, channel, count, y);
            for (int32_t c = 0; c < count; c++) {
                x[c] *= y[c];
            }
            ss_emit_sums(sink, place, 1, channel, count, x);
        }
    }
}

/* Features minus others, or without the first the negative of the others. */
static inline void ss_subtract(const ss_features *a, const ss_features *b,
                               const ss_features *out) {
    int32_t x[SS_BLOCK] = {0}, y[SS_BLOCK];
    for (int32_t place = 0; place < out->places; place++) {
        for (int32_t channel = 0; channel < out->channels; channel += SS_BLOCK) {
            const int32_t count = ss_min(SS_BLOCK, out->channels - channel);
            if (a) {
                ss_get_row(a, place, channel, count, x);
            }
            ss_get_row(b, place, channel, count, y);
            for (int32_t c = 0; c < count; c++) {
                y[c] = x[c] - y[c];
            }
            ss_put_row(out, place, channel, count, y);
        }
    }
}

/* Features times a factor for each place. */
static inline void ss_scale(const ss_features *in, const int32_t *factors,
                            const ss_features *out) {
    for (int32_t place = 0; place < out->places; place++) {
        for (int32_t channel = 0; channel < out->channels; channel++) {
            ss_put(out, place, channel, ss_at(in, place, channel) * factors[place]);
        }
    }
}

/* Copies features in the order of their axes, with the channels of the copy last, or first; those
 * of `in` are first, or last. */
static inline void ss_turn(const ss_features *in, const ss_features *out, int turned) {
    const int32_t count = in->channels * in->places;
    for (int32_t i = 0; i < count; i++) {
        if (turned) {
            const int32_t value = ss_at(in, i % in->places, i / in->places);
            ss_put(out, i / out->channels, i % out->channels, value);
        } else {
            const int32_t value = ss_at(in, i / in->channels, i % in->channels);
            ss_put(out, i % out->places, i / out->places, value);
        }
    }
}

#endif
