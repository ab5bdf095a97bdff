/* The runtime of softstair's integer networks: C99, no library, no allocation.
 *
 * network.c holds the network as constant data; the functions of these headers compute it:
 *
 *   softstair_vector.h     inner loops for NEON, AVX2 and the DSP extension of Cortex-M, and the
 *                          same in plain C, with equal results
 *   softstair_features.h   layout of integers in memory
 *   softstair_window.h     windows of convolutions and poolings
 *   softstair_steps.h      thresholds: sums become levels
 *   softstair_planes.h     sums of ternary and binary numbers, by counting bits
 *   softstair_winograd.h   the same over 3 x 3 windows, with fewer products
 *   softstair_dot.h        sums of products of bytes
 *   softstair_packed.h     the same with several products in one multiplication
 *   softstair_wide.h       all other sums
 *   softstair_pool.h       poolings, padding, additions, concatenation, expansion, flattening, the
 *                          input
 *   softstair_scores.h     the last layer, and the class
 *   softstair_threads.h    large layers on two threads
 *
 * -DSOFTSTAIR_PORTABLE selects plain C, -DSOFTSTAIR_PACKED packed products. -DSOFTSTAIR_THREADS=2
 * computes large layers on two threads. -DSOFTSTAIR_TRACE passes the result of every node to
 * softstair_trace(), which the program must define.
 */
#ifndef SOFTSTAIR_H
#define SOFTSTAIR_H

#include "softstair_dot.h"
#include "softstair_planes.h"
#include "softstair_pool.h"
#include "softstair_scores.h"
#include "softstair_steps.h"
#include "softstair_threads.h"
#include "softstair_wide.h"
#include "softstair_winograd.h"

#endif
