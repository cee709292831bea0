/*
 * Running softmax of query rows, group of keys by group of keys.
 *
 * The running maximum of a row's scores is exact, so that the largest weight is 1 and has no rounding error. No branch
 * depends on scores: a processor would mispredict whether the maximum of a row rises.
 */
#ifndef BATON_SOFTMAX_H
#define BATON_SOFTMAX_H

#include "few_queries.h"

#define MOST_QUERIES 384 /* query rows of one call: tokens times query heads per key head */
#define HIDDEN_SCORE -1e30f /* below every score, but finite, so that differences are finite */

/* State of the rows. */
struct softmax {
    floats total[MOST_QUERIES];       /* of the weights, per lane */
    float best[MOST_QUERIES + LANES]; /* maximum of the scaled scores, in units of exponents */
    float factors[TILE_ROWS + LANES]; /* of the last tile: its sums are multiplied with them before values are added */
};

/* Visible keys of a row: `from` to `to`, relative to the group. */
struct visible {
    long from, to;
};

/* Replaces scores by capped ones and hides those that are not visible. */
static __attribute__((noinline)) void prepare_scores(float *scores, float cap_scale, struct visible visible) {
    const int from = visible.from < 0 ? 0 : visible.from > KEYS ? KEYS : (int)visible.from;
    const int to = visible.to < 0 ? 0 : visible.to > KEYS ? KEYS : (int)visible.to;
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int i = 0; i < KEYS; i += LANES) {
        const ints at = lane + i;
        floats score = load(scores + i);
        if (cap_scale != 0.0f) score = tanhs(score * cap_scale);
        store(scores + i, choose((at >= from) & (at < to), score, splat(-__builtin_inff())));
    }
}

/*
 * Converts `count` rows of scores to weights 2 ** (scale * score - best), where `scale` is in units of exponents.
 * `row` is the first one's index in `softmax`.
 */
INLINE void weigh(struct softmax *softmax, size_t row, size_t count, const float (*scores)[KEYS], uint32_t (*weights)[KEYS],
                  float scale, const int kind) {
    floats tops[TILE_ROWS + LANES];
    _Alignas(64) float maxima[TILE_ROWS + LANES];
    for (size_t i = 0; i < count; i++) {
        tops[i] = load(scores[i]);
        for (int key = LANES; key < KEYS; key += LANES) tops[i] = larger(tops[i], load(scores[i] + key));
    }
    largest_each(tops, count, maxima);
    for (size_t first = 0; first < count; first += LANES) {
        const floats before = load(softmax->best + row + first), now = larger(before, load(maxima + first) * scale);
        const floats factors = exp2s((before - now) * (1.0f / exponent_unit(kind)));
        store(softmax->factors + first, factors);
        store(softmax->best + row + first, now);
        for (size_t i = first; i < count && i < first + LANES; i++) {
            floats exponents[KEYS / LANES];
            for (int part = 0; part < KEYS / LANES; part++)
                exponents[part] = multiply_subtract(load(scores[i] + part * LANES), splat(scale), copies_of(now, i - first));
            softmax->total[row + i] = put_powers(weights[i], exponents, KEYS / LANES,
                                                 softmax->total[row + i] * copies_of(factors, i - first), kind);
        }
    }
}

/* One copy for each kind, so that all rows have weights of the same instructions. */
static __attribute__((noinline)) void weigh_float(struct softmax *softmax, size_t row, size_t count, const float (*scores)[KEYS],
                                                  uint32_t (*weights)[KEYS], float scale) {
    weigh(softmax, row, count, scores, weights, scale, FLOAT32);
}
static __attribute__((noinline)) void weigh_bfloat(struct softmax *softmax, size_t row, size_t count, const float (*scores)[KEYS],
                                                   uint32_t (*weights)[KEYS], float scale) {
    weigh(softmax, row, count, scores, weights, scale, BFLOAT16);
}

#endif
