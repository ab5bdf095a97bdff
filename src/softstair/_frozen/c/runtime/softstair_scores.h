/* The scores of the last layer, and the class. */
#ifndef SOFTSTAIR_SCORES_H
#define SOFTSTAIR_SCORES_H

#include <stdint.h>

#include "softstair_features.h"

/* Sums times 2^shift plus a bias; unsigned numbers wrap. */
static inline void ss_scores(const ss_features *in, int32_t shift, const int32_t *bias,
                             int32_t *scores) {
    for (int32_t i = 0; i < in->channels; i++) {
        const uint32_t sum = (uint32_t)ss_at(in, 0, i);
        scores[i] = (int32_t)((sum << shift) + (uint32_t)bias[i]);
    }
}

/* Returns the first class with the greatest score; `order` are the units of the scores. */
static inline int32_t ss_class(const int32_t *scores, const int32_t *order, int32_t classes) {
    int32_t best = 0;
    for (int32_t i = 1; i < classes; i++) {
        const int64_t score = (int64_t)scores[i] * order[i];
        best = score > (int64_t)scores[best] * order[best] ? i : best;
    }
    return best;
}

#ifdef SOFTSTAIR_TRACE
static inline void ss_trace_scores(int32_t node, const int32_t *scores, int32_t count) {
    softstair_trace(node);
    softstair_trace(count);
    for (int32_t i = 0; i < count; i++) {
        softstair_trace(scores[i]);
    }
}
#else
#define ss_trace_scores(node, scores, count) ((void)0)
#endif

#endif
