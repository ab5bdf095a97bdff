/* Windows of convolutions and poolings. */
#ifndef SOFTSTAIR_WINDOW_H
#define SOFTSTAIR_WINDOW_H

#include <stdint.h>

#include "softstair_vector.h"

typedef struct {
    int32_t height, width; /* of the input */
    int32_t rows, columns; /* of the output */
    int32_t kernel_y, kernel_x;
    int32_t stride_y, stride_x;
    int32_t padding_y, padding_x;
    int32_t dilation_y, dilation_x;
} ss_window;

static inline int32_t ss_places(const ss_window *window) { return window->rows * window->columns; }

static inline int32_t ss_taps(const ss_window *window) {
    return window->kernel_y * window->kernel_x;
}

/* Where the window at `place` begins; may be in the padding. */
static inline int32_t ss_top(const ss_window *window, int32_t place) {
    return place / window->columns * window->stride_y - window->padding_y;
}

static inline int32_t ss_left(const ss_window *window, int32_t place) {
    return place % window->columns * window->stride_x - window->padding_x;
}

static inline int ss_inside(const ss_window *window, int32_t y, int32_t x) {
    return y >= 0 && y < window->height && x >= 0 && x < window->width;
}

/* Offsets of the taps of the window at `place`: `step` elements per place, the first `skip` left
 * out; `padding_offset` in the padding. */
static inline void ss_tap_offsets(const ss_window *window, int32_t place, int32_t step,
                                  int32_t skip, int32_t padding_offset, int32_t *tap_offsets) {
    int32_t y = ss_top(window, place);
    for (int32_t v = 0; v < window->kernel_y; v++, y += window->dilation_y) {
        int32_t x = ss_left(window, place);
        for (int32_t u = 0; u < window->kernel_x; u++, x += window->dilation_x) {
            *tap_offsets++ =
                ss_inside(window, y, x) ? (y * window->width + x) * step + skip : padding_offset;
        }
    }
}

/* Copies the window at `place`, tap by tap: `take` bytes of each place, which has `step` bytes from
 * `from` on. The padding has this value. */
static inline void ss_gather(const ss_window *window, int32_t place, const uint8_t *from,
                             int32_t step, int32_t take, uint8_t padding, uint8_t *to) {
    const int32_t top = ss_top(window, place), left = ss_left(window, place);
    /* Neighbours in a row are contiguous and are copied together. */
    const int together = window->dilation_x == 1 && take == step;
    const int32_t before = left < 0 ? ss_min(-left, window->kernel_x) : 0;
    const int32_t right = ss_min(window->kernel_x, window->width - left);
    for (int32_t v = 0; v < window->kernel_y; v++) {
        const int32_t y = top + v * window->dilation_y;
        if (y < 0 || y >= window->height) {
            ss_fill(to, padding, window->kernel_x * take);
            to += window->kernel_x * take;
        } else if (together) {
            const int32_t last = right > before ? right : before;
            ss_fill(to, padding, before * take);
            if (last > before) {
                ss_copy(to + before * take, from + (y * window->width + left + before) * step,
                        (last - before) * take);
            }
            ss_fill(to + last * take, padding, (window->kernel_x - last) * take);
            to += window->kernel_x * take;
        } else {
            for (int32_t u = 0; u < window->kernel_x; u++) {
                const int32_t x = left + u * window->dilation_x;
                if (x < 0 || x >= window->width) {
                    ss_fill(to, padding, take);
                } else {
                    ss_copy(to, from + (y * window->width + x) * step, take);
                }
                to += take;
            }
        }
    }
}

#endif
