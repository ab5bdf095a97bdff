/* What a processor may have instructions for, behind one header: what fits the processor that the
 * code is compiled for is taken, and plain C where there is nothing, or with -DSOFTSTAIR_PORTABLE.
 * Whole numbers leave no room for a difference: all give the same bits.
 *
 *   ss_copy, ss_fill  bytes
 *   ss_ones_row       how many bits of a row of words are set
 *   ss_count_eight    how many bits eight channels of weights choose (softstair_planes.h)
 *   ss_dot_tile       products of SS_TILE_PLACES windows and SS_TILE_CHANNELS rows of weights
 *   ss_dot_one        the same of one and one
 *   ss_each           products of each channel with weights of its own
 *   ss_reached        a bit for each sum that has reached its threshold
 */
#ifndef SOFTSTAIR_VECTOR_H
#define SOFTSTAIR_VECTOR_H

#include <stdint.h>

#define SS_PLACES 4 /* windows that share one pass over the weights */
#define SS_BLOCK 64 /* channels that share one look at a window */
#define SS_EIGHT 8  /* channels whose weights lie together where they are planes of bits */

#include "softstair_plain.h"

#if defined(SOFTSTAIR_PORTABLE)
#elif defined(__AVX2__)
#include "softstair_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "softstair_neon.h"
#elif defined(__ARM_FEATURE_DSP)
#include "softstair_dsp.h"
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
#endif
#ifndef SS_HAS_DOT
#define SS_TILE_PLACES 1
#define SS_TILE_CHANNELS 1
#define ss_dot_one ss_dot_one_plain
#define ss_dot_tile ss_dot_tile_plain
#endif
#ifndef SS_HAS_EACH
#define ss_each ss_each_plain
#endif
#ifndef SS_HAS_REACHED
#define ss_reached ss_reached_plain
#endif

#endif
