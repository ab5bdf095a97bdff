/* The runtime of softstair's frozen networks: C99, no library, no allocation.
 *
 * network.c holds the network as constant data; the functions of these headers compute it, with the
 * vector instructions of the target (softstair_vector.h).
 *
 * -DSOFTSTAIR_PORTABLE selects plain C, -DSOFTSTAIR_PACKED packed products. -DSOFTSTAIR_TRACE
 * passes the result of every node to softstair_trace(), which the program must define.
 * -DSOFTSTAIR_THREADS=2 and -pthread compute large layers on two POSIX threads. The second computes
 * the upper half of the channels, with scratch memory of its own, thread_memory in network.c.
 */
#ifndef SOFTSTAIR_H
#define SOFTSTAIR_H

#include "softstair_combine.h"
#include "softstair_dot.h"
#ifdef SOFTSTAIR_PANELS
#include "softstair_panels.h"
#endif
#include "softstair_planes.h"
#include "softstair_pool.h"
#include "softstair_steps.h"
#include "softstair_winograd.h"

#ifdef SOFTSTAIR_THREADS
#if SOFTSTAIR_THREADS != 2
#error "SOFTSTAIR_THREADS must be 2"
#endif
#include <pthread.h>

#ifndef SS_MIN_PRODUCTS /* of a layer on two threads; to start one takes as long as many products */
#define SS_MIN_PRODUCTS 16000000
#endif
#define SS_THREAD_STACK 262144 /* of the memory plan; systems ask for 16 to 128 KiB at least */

/* ss_move_<kind> moves pointers from one scratch memory to another. */
static inline void ss_move_dot(ss_dot_sum *sum, int8_t *to) {
    const int8_t *from = sum->unpacked;
    sum->windows = sum->windows ? to + (sum->windows - from) : 0;
    sum->operands = (uint32_t *)(void *)(to + ((int8_t *)sum->operands - from));
    sum->unpacked = to;
}

static inline void ss_move_planes(ss_planes_sum *sum, int8_t *to) {
    sum->windows = (uint32_t *)(void *)to;
}

static inline void ss_move_winograd(ss_winograd_sum *sum, int8_t *to) {
    const int8_t *from = sum->features;
    sum->filters = to + (sum->filters - from);
    sum->products = (int32_t *)(void *)(to + ((int8_t *)sum->products - from));
    sum->sums = (int32_t *)(void *)(to + ((int8_t *)sum->sums - from));
    sum->features = to;
}

#ifdef SOFTSTAIR_PANELS
static inline void ss_move_panels(ss_panels_sum *sum, int8_t *to) {
    sum->padded = sum->padded ? (uint8_t *)to + ((int8_t *)sum->padded - sum->unpacked) : 0;
    sum->unpacked = to;
}
#endif

static inline int ss_start_thread(pthread_t *thread, void *(*function)(void *), void *sum) {
    pthread_attr_t options;
    if (pthread_attr_init(&options)) {
        return 1;
    }
    const int failed = pthread_attr_setstacksize(&options, SS_THREAD_STACK) ||
                       pthread_create(thread, &options, function, sum);
    pthread_attr_destroy(&options);
    return failed;
}

#define SS_ON_TWO_THREADS(kind, groups)                                                           \
    static inline void *ss_start_##kind(void *sum) {                                              \
        ss_sum_##kind((const ss_##kind##_sum *)sum);                                              \
        return 0;                                                                                 \
    }                                                                                             \
    static inline void ss_threads_##kind(const ss_##kind##_sum *sum, uint32_t *memory) {          \
        /* Words of bit planes have 32 channels, and each word is written by one thread. */       \
        const int32_t half = (sum->outputs + 63) / 64 * 32;                                       \
        const int64_t products = (int64_t)ss_places(&sum->window) * ss_taps(&sum->window) *       \
                                 sum->in->channels * sum->outputs;                                \
        ss_##kind##_sum upper = *sum, lower = *sum;                                               \
        pthread_t thread;                                                                         \
        if (half >= sum->outputs || (groups) > 1 || products < SS_MIN_PRODUCTS) {                 \
            ss_sum_##kind(sum);                                                                   \
            return;                                                                               \
        }                                                                                         \
        lower.outputs = upper.first_output = half;                                                \
        ss_move_##kind(&upper, (int8_t *)memory);                                                 \
        const int failed = ss_start_thread(&thread, ss_start_##kind, &upper);                     \
        ss_sum_##kind(&lower);                                                                    \
        if (failed) {                                                                             \
            ss_sum_##kind(&upper);                                                                \
        } else {                                                                                  \
            pthread_join(thread, 0);                                                              \
        }                                                                                         \
    }
SS_ON_TWO_THREADS(dot, sum->groups)
SS_ON_TWO_THREADS(planes, 1)
SS_ON_TWO_THREADS(winograd, 1)
#ifdef SOFTSTAIR_PANELS
SS_ON_TWO_THREADS(panels, sum->groups)
#define ss_sum_panels(sum) ss_threads_panels(sum, thread_memory)
#endif

/* The calls of network.c. */
#define ss_sum_dot(sum) ss_threads_dot(sum, thread_memory)
#define ss_sum_planes(sum) ss_threads_planes(sum, thread_memory)
#define ss_sum_winograd(sum) ss_threads_winograd(sum, thread_memory)
#endif

#endif
