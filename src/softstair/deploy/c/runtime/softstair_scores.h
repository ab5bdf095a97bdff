/* The scores of the last layer, and the class.
 *
 * Products of two floats are exact in double, so a fused multiply-add gives the same bits. The sum
 * is rounded to float once.
 *
 * The score bits do not depend on the options of the compiler. Without -std=c99, GCC contracts
 * a product and a sum into a fused multiply-add; with -Ofast, it also reorders sums and ignores the
 * sign of zero. Each intermediate result whose rounding or order matters is therefore volatile.
 */
#ifndef SOFTSTAIR_SCORES_H
#define SOFTSTAIR_SCORES_H

#include <stdint.h>

#include "softstair_features.h"

typedef struct {
    int32_t classes;
    float unit;              /* what a feature of 1 stands for */
    const float *weights;    /* by place, channel and class */
    const float *bias;       /* or null */
    volatile double *totals; /* one per class */
    const ss_features *in;
} ss_last;

/* Returns the number, rounded to float; compilers cannot combine operations across it. */
static inline float ss_rounded(float number) {
    const volatile float rounded = number;
    return rounded;
}

static inline void ss_scores(const ss_last *last, float *scores) {
    const ss_features *in = last->in;
    const float *weights = last->weights;
    for (int32_t i = 0; i < last->classes; i++) {
        last->totals[i] = 0.0;
    }
    for (int32_t place = 0; place < in->places; place++) {
        for (int32_t channel = 0; channel < in->channels; channel++) {
            const float value = ss_rounded((float)ss_at(in, place, channel) * last->unit);
            /* Ternary features are mostly one of these, and doubles may be slow. */
            if (value == 1.0F) {
                for (int32_t i = 0; i < last->classes; i++) {
                    last->totals[i] += (double)weights[i];
                }
            } else if (value == -1.0F) {
                for (int32_t i = 0; i < last->classes; i++) {
                    last->totals[i] -= (double)weights[i];
                }
            } else if (value != 0.0F) {
                for (int32_t i = 0; i < last->classes; i++) {
                    last->totals[i] += (double)value * (double)weights[i];
                }
            }
            weights += last->classes;
        }
    }
    for (int32_t i = 0; i < last->classes; i++) {
        scores[i] = (float)(last->totals[i] + (last->bias ? (double)last->bias[i] : 0.0));
    }
}

/* scale * sum + bias, with the two roundings of the trained network. */
static inline void ss_rescale(const ss_features *in, const float *scale, const float *bias,
                              float *scores) {
    for (int32_t i = 0; i < in->channels; i++) {
        const float sum = ss_rounded((float)ss_at(in, 0, i));
        scores[i] = ss_rounded(sum * scale[i]) + ss_rounded(bias[i]);
    }
}

/* Returns the first class with the greatest score. */
static inline int32_t ss_class(const float *scores, int32_t classes) {
    int32_t best = 0;
    for (int32_t i = 1; i < classes; i++) {
        best = scores[i] > scores[best] ? i : best;
    }
    return best;
}

#ifdef SOFTSTAIR_TRACE
/* Traces the bits of the scores. */
static inline void ss_trace_scores(int32_t node, const float *scores, int32_t classes) {
    softstair_trace(node);
    softstair_trace(classes);
    for (int32_t i = 0; i < classes; i++) {
        union {
            float number;
            int32_t bits;
        } score;
        score.number = scores[i];
        softstair_trace(score.bits);
    }
}
#else
#define ss_trace_scores(node, scores, classes) ((void)0)
#endif

#endif
