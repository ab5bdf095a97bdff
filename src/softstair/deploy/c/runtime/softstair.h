/* The runtime of softstair's integer networks: C99, no library, no allocation.
 *
 * A network is constant data (network.c) that the functions of these headers walk over:
 *
 *   softstair_vector.h     what a processor may have instructions for: NEON, AVX2, the DSP
 *                          extension of Cortex-M, and plain C, which all of them equal
 *   softstair_features.h   how whole numbers lie in memory
 *   softstair_window.h     what a window of a convolution or a pooling sees
 *   softstair_steps.h      sums become levels, by thresholds
 *   softstair_planes.h     sums of ternary and binary numbers, by counting bits
 *   softstair_dot.h        sums of products of bytes
 *   softstair_wide.h       sums of anything else
 *   softstair_pool.h       poolings, additions, expansion, flattening, the input
 *   softstair_scores.h     the last layer, and the class
 *
 * -DSOFTSTAIR_PORTABLE takes the plain C everywhere. -DSOFTSTAIR_TRACE hands over what every node
 * gives to softstair_trace(), which whoever links must define.
 */
#ifndef SOFTSTAIR_H
#define SOFTSTAIR_H

#include "softstair_dot.h"
#include "softstair_planes.h"
#include "softstair_pool.h"
#include "softstair_scores.h"
#include "softstair_steps.h"
#include "softstair_wide.h"

#endif
