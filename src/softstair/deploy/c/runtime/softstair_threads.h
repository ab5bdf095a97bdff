/* Large layers on two POSIX threads, with -DSOFTSTAIR_THREADS=2 and -pthread. The second computes
 * the lower rows of the result as a layer of their own, with scratch memory of its own,
 * thread_memory in network.c. */
#ifndef SOFTSTAIR_THREADS_H
#define SOFTSTAIR_THREADS_H

#ifdef SOFTSTAIR_THREADS
#if SOFTSTAIR_THREADS != 2
#error "SOFTSTAIR_THREADS must be 2"
#endif
#include <pthread.h>
#include <stdint.h>

#include "softstair_dot.h"
#include "softstair_planes.h"
#include "softstair_winograd.h"

#ifndef SS_MIN_PRODUCTS /* of a layer on two threads; to start one takes as long as many products */
#define SS_MIN_PRODUCTS 8000000
#endif

/* The sink of the lower rows, and the features that it refers to. */
typedef struct {
    ss_sink sink;
    ss_features out, sums, shortcut;
} ss_lower_sink;

/* The features from a place on, a multiple of 4, so that the pointer stays aligned. */
static inline const ss_features *ss_features_from(const ss_features *all, int32_t place,
                                                  ss_features *part) {
    if (all == 0) {
        return 0;
    }
    *part = *all;
    part->data += all->kind == SS_BYTES   ? place * all->channels / 4
                  : all->kind == SS_WORDS ? place * all->channels
                                          : place * ss_words(all);
    return part;
}

static inline const ss_sink *ss_sink_from(const ss_sink *sink, int32_t place,
                                          ss_lower_sink *lower) {
    lower->sink = *sink;
    lower->sink.out = ss_features_from(sink->out, place, &lower->out);
    lower->sink.sums = ss_features_from(sink->sums, place, &lower->sums);
    lower->sink.shortcut = ss_features_from(sink->shortcut, place, &lower->shortcut);
    return &lower->sink;
}

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

#define SS_ON_TWO_THREADS(kind)                                                                   \
    static inline void *ss_start_##kind(void *sum) {                                              \
        ss_sum_##kind((const ss_##kind##_sum *)sum);                                              \
        return 0;                                                                                 \
    }                                                                                             \
    static inline void ss_threads_##kind(const ss_##kind##_sum *sum, uint32_t *memory) {          \
        const int32_t rows = (sum->window.rows + 7) / 8 * 4;                                      \
        const int64_t products = (int64_t)ss_places(&sum->window) * ss_taps(&sum->window) *       \
                                 sum->in->channels * sum->outputs;                                \
        ss_##kind##_sum upper = *sum, lower = *sum;                                               \
        ss_lower_sink sink;                                                                       \
        pthread_t thread;                                                                         \
        if (rows >= sum->window.rows || products < SS_MIN_PRODUCTS) {                             \
            ss_sum_##kind(sum);                                                                   \
            return;                                                                               \
        }                                                                                         \
        upper.window.rows = rows;                                                                 \
        lower.window.rows -= rows;                                                                \
        lower.window.padding_y -= rows * lower.window.stride_y;                                   \
        lower.sink = ss_sink_from(sum->sink, rows * lower.window.columns, &sink);                 \
        ss_move_##kind(&lower, (int8_t *)memory);                                                 \
        const int failed = pthread_create(&thread, 0, ss_start_##kind, &lower);                   \
        ss_sum_##kind(&upper);                                                                    \
        if (failed) {                                                                             \
            ss_sum_##kind(&lower);                                                                \
        } else {                                                                                  \
            pthread_join(thread, 0);                                                              \
        }                                                                                         \
    }
SS_ON_TWO_THREADS(dot)
SS_ON_TWO_THREADS(planes)
SS_ON_TWO_THREADS(winograd)

/* The calls of network.c. */
#define ss_sum_dot(sum) ss_threads_dot(sum, thread_memory)
#define ss_sum_planes(sum) ss_threads_planes(sum, thread_memory)
#define ss_sum_winograd(sum) ss_threads_winograd(sum, thread_memory)
#endif

#endif
