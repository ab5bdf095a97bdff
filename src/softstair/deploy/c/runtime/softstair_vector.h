/* Inner loops with the vector instructions of the target, or in plain C if it has none or with
 * -DSOFTSTAIR_PORTABLE. They compute with integers, so all versions give the same bits.
 *
 *   ss_copy, ss_fill  bytes
 *   ss_ones_row       number of bits set in a row of words
 *   ss_count_eight    bits that the weights of eight channels select (softstair_planes.h)
 *   ss_dot_tile       products of SS_TILE_PLACES windows and SS_TILE_CHANNELS rows of weights
 *   ss_dot_one        the same for one window and one row
 *   ss_dot_sixteen    products of SS_PLACES windows and 16 channels, whose weights are interleaved
 *   ss_dot_depthwise  products of each channel with its own weights
 *   ss_lanes          16 bytes, with ss_plus, ss_minus, ss_shifted, ss_load_lanes and ss_put_lanes
 *   ss_expand_bits    16 features from bits: those that are positive, those that are negative
 *   ss_expand_weights 16 weights from bits
 *   ss_four_tiles     products of four tiles and 16 channels at a point (softstair_winograd.h)
 *   ss_reached        one bit per sum: whether it reaches its threshold
 *   ss_affine_bytes   levels of sums by affine steps
 *
 * Networks for x86 have SOFTSTAIR_PANELS, and functions of their own (softstair_x86.h).
 */
#ifndef SOFTSTAIR_VECTOR_H
#define SOFTSTAIR_VECTOR_H

#include <stdint.h>

#define SS_PLACES 4 /* windows that share one pass over the weights */
#define SS_BLOCK 64 /* channels computed per window */
#define SS_EIGHT 8  /* channels whose bit planes are interleaved */

#if defined(SOFTSTAIR_PANELS)
#include "softstair_x86.h"
#elif defined(SOFTSTAIR_PORTABLE)
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "softstair_neon.h"
#elif defined(__ARM_FEATURE_DSP) && defined(__thumb2__)
#define SS_HAS_DSP
#endif
#include "softstair_dsp.h"

#if defined(SS_HAS_DSP) || defined(SOFTSTAIR_PACKED)
#define SS_HAS_PACKED
#define SS_PACKED_CHANNELS(sum) ((sum)->packed_channels)
#else
#define SS_PACKED_CHANNELS(sum) 0
#endif
#ifndef SS_SPECIALISED /* for the constants of each call */
#define SS_SPECIALISED static inline
#endif
#ifndef SS_HAS_COPY
#define ss_copy ss_copy_plain
#define ss_fill ss_fill_plain
#endif
#ifndef SS_HAS_ONES_ROW
#define ss_ones_row ss_ones_row_plain
#endif
#ifndef SS_HAS_COUNT_EIGHT
#define ss_count_eight ss_count_eight_plain
#else
static inline void ss_count_eight(const uint32_t *positive, const uint32_t *negative,
                                  int32_t chunks, const uint32_t *weights, int32_t planes,
                                  int32_t *counts) {
    if (planes == 2) { /* a constant is faster */
        ss_count_eight_of(positive, negative, chunks, weights, 2, counts);
    } else {
        ss_count_eight_of(positive, negative, chunks, weights, 1, counts);
    }
}
#endif
#ifndef SS_EMIT_PLACES /* places whose sums are stored together */
#define SS_EMIT_PLACES SS_PLACES
#endif
#ifndef SS_HAS_DOT
#define ss_dot_one ss_dot_one_plain
#endif
#ifndef SS_TILE_PLACES
#define SS_TILE_PLACES 1
#define SS_TILE_CHANNELS 1
#define ss_dot_tile(windows, weights, row, sums) ((sums)[0] = ss_dot_one(*(windows), weights, row))
#endif
#ifndef SS_INTERLEAVED /* how many of the channels ss_dot_sixteen multiplies */
#define SS_INTERLEAVED(channels) 0
#define ss_dot_sixteen ss_dot_tile
#endif
#ifndef SS_HAS_DOT_DEPTHWISE
#define ss_dot_depthwise ss_dot_depthwise_plain
#endif
#ifndef SS_HAS_FOUR_TILES
#define ss_four_tiles ss_four_tiles_plain
#endif
#ifndef SS_HAS_REACHED
#define ss_reached ss_reached_plain
#endif
#ifndef SS_HAS_AFFINE
#define ss_affine_bytes ss_affine_bytes_plain
#endif

#endif
