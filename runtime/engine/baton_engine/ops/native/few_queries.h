/*
 * Attention of a few query rows, as in a decode step: keys and values are read once, and multiplied in registers.
 *
 * Packing them for `multiply` costs more than the products of so few rows. The sums have the same order as those of
 * `multiply`, so that both ways give the same bits. Each product requests a part of the keys and values of the next
 * group from memory: requests at once would fill the processor's queue, and then memory would wait for the products.
 */
#ifndef BATON_FEW_QUERIES_H
#define BATON_FEW_QUERIES_H

#include "linear.h"

#define KEYS 64 /* keys of one group */
#if LANES == 16
#define FEW_QUERIES 8
#else
#define FEW_QUERIES 4 /* fewer registers */
#endif

/* Locations of the keys and values of one group, and what a product with few rows needs besides. */
struct places {
    const char *keys[KEYS], *values[KEYS];
};

/* scores[row][KEYS] = rows . keys for `keys` positions, a multiple of LANES; `lanes` per key are one too. */
#define DEFINE_SCORES(ROWS, KIND, NAME)                                                                        \
    static void NAME(const uint32_t *rows, size_t row_stride, const struct places *places,                    \
                     const struct places *next, size_t keys, size_t lanes, float *scores) {                   \
        _Alignas(64) uint32_t columns[LANES * LANES];                                                         \
        for (size_t first = 0; first < keys; first += LANES) {                                                \
            floats total[ROWS];                                                                                \
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++) total[row] = splat(0.0f);            \
            for (size_t lane = 0; lane < lanes; lane += LANES) {                                               \
                transpose((const uint32_t *const *)places->keys + first, lane, columns, LANES);                \
                for (size_t unit = 0; unit < LANES; unit++) {                                                  \
                    __builtin_prefetch(next->keys[first + unit] + lane * 4, 0, 2);                             \
                    words column = load_words(columns + unit * LANES);                                         \
                    _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++)                              \
                        total[row] = dot(total[row], column, rows[row * row_stride + lane + unit], KIND);      \
                }                                                                                              \
            }                                                                                                  \
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++)                                      \
                store(scores + row * KEYS + first, total[row]);                                                \
        }                                                                                                      \
    }

/* sums[row][dim] = sums * factor of the row + weights . values for `units` of weights; `dim` is a multiple of PANEL. */
#define DEFINE_MEANS(ROWS, KIND, NAME)                                                                         \
    static void NAME(const uint32_t *weights, const struct places *places, const struct places *next,         \
                     size_t units, size_t dim, const float *factors, float *sums) {                            \
        const size_t per_unit = KIND == BFLOAT16 ? 2 : 1;                                                      \
        for (size_t d = 0; d < dim; d += PANEL) {                                                              \
            const size_t at = d * item_bytes(KIND);                                                            \
            floats total[ROWS][2];                                                                             \
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++) {                                    \
                total[row][0] = load(sums + row * dim + d) * factors[row];                                     \
                total[row][1] = load(sums + row * dim + d + LANES) * factors[row];                             \
            }                                                                                                  \
            for (size_t unit = 0; unit < units; unit++) {                                                      \
                const size_t key = unit * per_unit;                                                            \
                words left, right;                                                                             \
                if (KIND == BFLOAT16) {                                                                        \
                    __builtin_prefetch(next->values[key + 1] + at, 0, 2);                                      \
                    pair_up(places->values[key] + at, places->values[key + 1] + at, &left, &right);            \
                } else {                                                                                       \
                    left = load_words(places->values[key] + at);                                               \
                    right = load_words(places->values[key] + at + LANES * 4);                                  \
                    __builtin_prefetch(next->values[key] + at + LANES * 4, 0, 2);                              \
                }                                                                                              \
                __builtin_prefetch(next->values[key] + at, 0, 2);                                              \
                _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++) {                                \
                    uint32_t weight = weights[row * KEYS + unit];                                              \
                    total[row][0] = dot(total[row][0], left, weight, KIND);                                    \
                    total[row][1] = dot(total[row][1], right, weight, KIND);                                   \
                }                                                                                              \
            }                                                                                                  \
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; row++) {                                    \
                store(sums + row * dim + d, total[row][0]);                                                    \
                store(sums + row * dim + d + LANES, total[row][1]);                                            \
            }                                                                                                  \
        }                                                                                                      \
    }

#define DEFINE_FEW(ROWS)                              \
    DEFINE_SCORES(ROWS, FLOAT32, scores_float_##ROWS)  \
    DEFINE_SCORES(ROWS, BFLOAT16, scores_bfloat_##ROWS) \
    DEFINE_MEANS(ROWS, FLOAT32, means_float_##ROWS)    \
    DEFINE_MEANS(ROWS, BFLOAT16, means_bfloat_##ROWS)

DEFINE_FEW(1)
DEFINE_FEW(2)
DEFINE_FEW(3)
DEFINE_FEW(4)
#if FEW_QUERIES >= 8
DEFINE_FEW(8)
#endif

/* Returns whether the functions here are for `rows` query rows of `dim` numbers. */
INLINE int are_few(size_t rows, size_t dim, enum way way, const int kind) {
    if (way == TILED && rows >= LEAST_TILE_ROWS) return 0; /* another order of sums */
    return rows <= FEW_QUERIES && dim % PANEL == 0 && lanes_of(kind, dim) % LANES == 0;
}

#define FEW(ROWS, NAME, ...) (kind == BFLOAT16 ? NAME##_bfloat_##ROWS : NAME##_float_##ROWS)(__VA_ARGS__)
#if FEW_QUERIES >= 8
#define FEW_OR_EIGHT(NAME, ...) FEW(8, NAME, __VA_ARGS__)
#else
#define FEW_OR_EIGHT(NAME, ...) (void)0
#endif

/* Calls the function for `count` rows; of 5 to 7, it computes 8, of which the last are ignored. */
#define FOR_FEW(NAME, ...)                               \
    do {                                                 \
        if (count == 1) FEW(1, NAME, __VA_ARGS__);       \
        else if (count == 2) FEW(2, NAME, __VA_ARGS__);  \
        else if (count == 3) FEW(3, NAME, __VA_ARGS__);  \
        else if (count == 4) FEW(4, NAME, __VA_ARGS__);  \
        else FEW_OR_EIGHT(NAME, __VA_ARGS__);            \
    } while (0)

#endif
