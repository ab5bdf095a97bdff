/* Layout of integers in memory: place by place, the channels of a place together.
 *
 *   SS_TERNARY  -1, 0, 1: a bit plane for the positive, then one for the negative
 *   SS_SIGN     -1, 1: a bit plane for the positive
 *   SS_BIT      0, 1: a bit plane for the positive
 *   SS_BYTES    ss_octet, signed, or unsigned for x86: the integer minus `bias`
 *   SS_HALVES   int16_t
 *   SS_WORDS    int32_t
 *
 * In a plane each place begins a new 32-bit word; bits after the last channel are 0.
 */
#ifndef SOFTSTAIR_FEATURES_H
#define SOFTSTAIR_FEATURES_H

#include <stdint.h>

#ifdef __GNUC__ /* memory is an array of words */
typedef int16_t ss_half __attribute__((may_alias));
#else
typedef int16_t ss_half;
#endif
#ifdef SOFTSTAIR_PANELS
typedef uint8_t ss_octet;
#else
typedef int8_t ss_octet;
#endif
typedef enum { SS_TERNARY, SS_SIGN, SS_BIT, SS_BYTES, SS_HALVES, SS_WORDS } ss_kind;

typedef struct {
    ss_kind kind;
    int32_t channels, places;
    int32_t bias;
    uint32_t *data;
} ss_features;

/* Words per place and plane. */
static inline int32_t ss_words(const ss_features *features) {
    return (features->channels + 31) / 32;
}

static inline uint32_t *ss_plane(const ss_features *features, int32_t number) {
    return features->data + number * features->places * ss_words(features);
}

static inline int32_t ss_at(const ss_features *features, int32_t place, int32_t channel) {
    const int32_t at = place * features->channels + channel;
    if (features->kind == SS_BYTES) {
        return (int32_t)((const ss_octet *)features->data)[at] + features->bias;
    }
    if (features->kind == SS_HALVES) {
        return ((const ss_half *)features->data)[at];
    }
    if (features->kind == SS_WORDS) {
        return ((const int32_t *)features->data)[at];
    }
    const int32_t word = place * ss_words(features) + channel / 32;
    const int32_t positive = (int32_t)((features->data[word] >> (channel % 32)) & 1U);
    if (features->kind == SS_TERNARY) {
        const uint32_t negative = ss_plane(features, 1)[word] >> (channel % 32);
        return positive - (int32_t)(negative & 1U);
    }
    return features->kind == SS_SIGN ? 2 * positive - 1 : positive;
}

/* Planes must be cleared before. */
static inline void ss_put(const ss_features *features, int32_t place, int32_t channel,
                          int32_t value) {
    const int32_t at = place * features->channels + channel;
    if (features->kind == SS_BYTES) {
        ((ss_octet *)features->data)[at] = (ss_octet)(value - features->bias);
    } else if (features->kind == SS_HALVES) {
        ((ss_half *)features->data)[at] = (int16_t)value;
    } else if (features->kind == SS_WORDS) {
        ((int32_t *)features->data)[at] = value;
    } else {
        const int32_t word = place * ss_words(features) + channel / 32;
        const uint32_t bit = (uint32_t)1 << (channel % 32);
        if (value > 0) {
            features->data[word] |= bit;
        } else if (value < 0 && features->kind == SS_TERNARY) {
            ss_plane(features, 1)[word] |= bit;
        }
    }
}

/* An array of integers of 1, 2 or 4 bytes. */
static inline int32_t ss_number(const void *numbers, int32_t width, int32_t at) {
    return width == 1   ? ((const int8_t *)numbers)[at]
           : width == 2 ? ((const int16_t *)numbers)[at]
                        : ((const int32_t *)numbers)[at];
}

/* Reads `count` channels of a place. */
static inline void ss_get_row(const ss_features *features, int32_t place, int32_t channel,
                              int32_t count, int32_t *to) {
    const ss_octet *bytes = (const ss_octet *)features->data + place * features->channels + channel;
    const int32_t bias = features->bias;
    if (features->kind == SS_BYTES) {
        for (int32_t c = 0; c < count; c++) {
            to[c] = bytes[c] + bias;
        }
        return;
    }
    for (int32_t c = 0; c < count; c++) {
        to[c] = ss_at(features, place, channel + c);
    }
}

/* Stores `count` channels of a place. */
static inline void ss_put_row(const ss_features *features, int32_t place, int32_t channel,
                              int32_t count, const int32_t *values) {
    ss_octet *bytes = (ss_octet *)features->data + place * features->channels + channel;
    const int32_t bias = features->bias;
    if (features->kind == SS_BYTES) {
        for (int32_t c = 0; c < count; c++) {
            bytes[c] = (ss_octet)(values[c] - bias);
        }
        return;
    }
    for (int32_t c = 0; c < count; c++) {
        ss_put(features, place, channel + c, values[c]);
    }
}

/* Clears planes before bits are set, and what is padded. */
static inline void ss_clear(const ss_features *features) {
    const int32_t planes = features->kind == SS_TERNARY ? 2 : features->kind < SS_BYTES;
    const int32_t words = planes * features->places * ss_words(features);
    for (int32_t i = 0; i < words; i++) {
        features->data[i] = 0;
    }
    for (int32_t i = 0; i < features->places * features->channels && planes == 0; i++) {
        ss_put(features, 0, i, 0);
    }
}

#ifdef SOFTSTAIR_TRACE
/* Traces the number of a node, the number of its values, and the values: channel by channel, or
 * place by place where the channels are the last axis. */
void softstair_trace(int32_t value);
#define SS_TRACED(features) (features)

static inline void ss_trace(int32_t node, const ss_features *features, int turned) {
    const int32_t channels = features->channels, places = features->places;
    softstair_trace(node);
    softstair_trace(channels * places);
    for (int32_t i = 0; i < channels * places; i++) {
        softstair_trace(turned ? ss_at(features, i / channels, i % channels)
                               : ss_at(features, i % places, i / places));
    }
}

static inline void ss_trace_scores(int32_t node, int32_t *scores, int32_t count) {
    const ss_features traced = {SS_WORDS, count, 1, 0, (uint32_t *)scores};
    ss_trace(node, &traced, 0);
}
#else
#define SS_TRACED(features) 0
#define ss_trace(node, features, turned) ((void)0)
#define ss_trace_scores(node, scores, count) ((void)0)
#endif

#endif
