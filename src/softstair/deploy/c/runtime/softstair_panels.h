/* Sums of products of bytes for x86: features are unsigned bytes, and weights lie in panels.
 *
 * A panel has the weights of 16 channels: 64 bytes are a `four`, four inputs of each channel, which
 * multiply four neighbouring bytes of a window, from `at` on. In memory 64 bytes hold codes of 1, 2,
 * 4 or 8 bits, the lowest bits of all for the first four; a weight is `base + step * code`. They are
 * unpacked for 16 or 32 channels and used for all places. In a depthwise layer a four is four taps
 * of 16 channels. A sum begins with the offset of its channel, and is negated at the end in channels
 * that are `negated`.
 */
#ifndef SOFTSTAIR_PANELS_H
#define SOFTSTAIR_PANELS_H

#include <stdint.h>

#include "softstair_features.h"
#include "softstair_steps.h"
#include "softstair_vector.h"
#include "softstair_window.h"

typedef struct {
    ss_window window;
    int32_t groups, inputs, outputs; /* inputs and outputs of each group */
    int32_t first_output;            /* 0, or where a second thread begins */
    int32_t bits, base, step;
    int32_t fours;   /* of each panel; taps of a depthwise layer */
    int32_t chunk;   /* fours whose sums fit into 16 bits, or 0 */
    int32_t tiled;   /* fours at the beginning of which each 16 are 64 bytes in a row */
    int32_t special; /* each 32 channels have an `at` of their own */
    const int32_t *at;
    const uint8_t *weights;
    const uint8_t *negated; /* one bit per channel, or null */
    const int32_t *offsets; /* those of a group fill panels */
    const ss_features *in;
    int8_t *unpacked;
    uint8_t *padded; /* features between their padding, or null */
    const ss_sink *sink;
} ss_panels_sum;

/* Copies features between their padding, if there is any. */
static inline const uint8_t *ss_padded(const ss_panels_sum *sum) {
    const ss_window *window = &sum->window;
    const int32_t channels = sum->in->channels, line = window->width * channels;
    const int32_t side = window->padding_x * channels, row = line + 2 * side;
    const uint8_t padding = (uint8_t)-sum->in->bias, *from = (const uint8_t *)sum->in->data;
    uint8_t *to = sum->padded;
    if (!to) {
        return from;
    }
    ss_fill(to, padding, window->padding_y * row + side);
    to += window->padding_y * row + side;
    for (int32_t y = 1; y <= window->height; y++, from += line, to += row) {
        ss_copy(to, from, line);
        ss_fill(to + line, padding, y < window->height ? 2 * side : side + window->padding_y * row);
    }
    return sum->padded;
}

/* Writes where the windows of some places begin, and others to fill SS_PANEL_PLACES. */
static inline void ss_windows(const ss_panels_sum *sum, const uint8_t *from, int32_t place,
                              int32_t count, const uint8_t **x) {
    const ss_window *window = &sum->window;
    const int32_t across = window->width + (sum->padded ? 2 * window->padding_x : 0);
    const int32_t step = window->stride_x * sum->in->channels;
    const int32_t line = window->stride_y * across * sum->in->channels;
    int32_t column = place % window->columns, row = place / window->columns;
    for (int32_t i = 0; i < SS_PANEL_PLACES; i++) {
        x[i] = i < count ? from + row * line + column * step : x[0];
        if (++column == window->columns) {
            column = 0;
            row++;
        }
    }
}

/* Passes the sums of places to the sink. */
static inline void ss_emit_panel(const ss_panels_sum *sum, int32_t place, int32_t count,
                                 int32_t first, int32_t channels, int32_t *sums) {
    for (int32_t c = 0; sum->negated && c < channels; c++) {
        const int negated = (sum->negated[(first + c) / 8] >> ((first + c) % 8)) & 1;
        for (int32_t p = 0; negated && p < count; p++) {
            sums[p * SS_BLOCK + c] = -sums[p * SS_BLOCK + c];
        }
    }
    ss_emit_sums(sum->sink, place, count, first, channels, sums);
}

/* Units of 64 bytes of a panel. */
static inline int32_t ss_units(const ss_panels_sum *sum, int32_t fours) {
    const int32_t each = 8 / sum->bits;
    return (fours + each - 1) / each;
}

static inline void ss_begin_sums(const int32_t *offsets, int32_t places, int32_t channels,
                                 int32_t *sums) {
    for (int32_t p = 0; p < places; p++, sums += SS_BLOCK) {
        for (int32_t c = 0; c < channels; c += 16) {
            for (int i = 0; i < 16; i++) {
                sums[c + i] = offsets[c + i];
            }
        }
    }
}

static inline void ss_sum_panels(const ss_panels_sum *sum) {
    const int32_t places = ss_places(&sum->window);
    const int32_t units = ss_units(sum, sum->fours), size = units * 8 / sum->bits * 64;
    const int32_t panels = (sum->outputs + 15) / 16, blocks = (sum->outputs + 31) / 32;
    const uint8_t *from = ss_padded(sum), *x[SS_PANEL_PLACES];
    ss_weight *unpacked = (ss_weight *)(void *)sum->unpacked;
    int32_t sums[SS_PANEL_PLACES * SS_BLOCK];
    ss_begin_tiles();
    for (int32_t group = 0; group < sum->groups; group++) {
        for (int32_t first = sum->first_output; first < sum->outputs; first += SS_PANEL_CHANNELS) {
            const int32_t count = ss_min(SS_PANEL_CHANNELS, sum->outputs - first);
            const int32_t panel = group * panels + first / 16, two = count > 16;
            const int32_t block = sum->special ? group * blocks + first / 32 : 0;
            ss_unpack_units(sum->weights + 64 * panel * units, (1 + two) * units, sum->bits,
                            sum->base, sum->step, unpacked);
            for (int32_t place = 0, some; place < places; place += some) {
                some = ss_min(SS_PANEL_PLACES, places - place);
                ss_windows(sum, from + group * sum->inputs, place, some, x);
                ss_begin_sums(sum->offsets + 16 * panel, SS_PANEL_PLACES, count, sums);
                ss_multiply_panels(x, some, sum->at + block * sum->fours, unpacked,
                            two ? unpacked + size : 0, sum->fours, sum->chunk, sum->tiled, sums);
                ss_emit_panel(sum, place, some, group * sum->outputs + first, count, sums);
            }
        }
    }
    ss_end_tiles();
}

/* Depthwise: each channel has its own weights. */
static inline void ss_sum_taps(const ss_panels_sum *sum) {
    const int32_t places = ss_places(&sum->window), taps = sum->fours;
    const int32_t units = ss_units(sum, (taps + 3) / 4), channels = sum->in->channels;
    const uint8_t *from = ss_padded(sum), *x[SS_PANEL_PLACES];
    ss_weight *unpacked = (ss_weight *)(void *)sum->unpacked;
    int16_t *weights = (int16_t *)(void *)(unpacked + units * 8 / sum->bits * 64);
    int32_t sums[SS_PANEL_PLACES * SS_BLOCK];
    for (int32_t first = 0; first < channels; first += 16) {
        const int32_t count = ss_min(16, channels - first);
        ss_unpack_units(sum->weights + 4 * first * units, units, sum->bits, sum->base, sum->step,
                        unpacked);
        for (int32_t i = 0; i < 16 * taps; i++) {
            weights[i] = unpacked[SS_UNPACKED_AT(i / 16, i % 16)];
        }
        for (int32_t place = 0, some; place < places; place += some) {
            some = ss_min(SS_PANEL_PLACES, places - place);
            ss_windows(sum, from + first, place, some, x);
            ss_begin_sums(sum->offsets + first, some, count, sums);
            for (int32_t p = 0; p < some; p++) {
                ss_multiply_taps(x[p], sum->at, taps, weights, sum->chunk, sums + p * SS_BLOCK);
            }
            ss_emit_panel(sum, place, some, first, count, sums);
        }
    }
}

/* Stores levels as bytes, by few thresholds: those of a step together, in words. `levels` are the
 * highest, and by how much each threshold lowers it. */
static inline void ss_store_counted(const ss_sink *sink, int32_t place, int32_t places,
                                    int32_t channel, int32_t count, const int32_t *sums) {
    const int32_t channels = sink->out->channels;
    const int32_t *thresholds = (const int32_t *)sink->thresholds + channel;
    uint8_t *to = (uint8_t *)sink->out->data + place * channels + channel;
    for (int32_t p = 0; p < places; p++, sums += SS_BLOCK, to += channels) {
        for (int32_t c = 0; c < count; c += 16) {
            ss_put_counted(sums + c, thresholds + c, sink->levels, sink->steps, sink->width,
                           count - c, to + c);
        }
    }
}

#endif
