/*
 * Weights of tokens, by the definition of `baton_engine.ops.token_weights`: the bits are the same in torch and in Triton.
 */
#ifndef BATON_DRAW_H
#define BATON_DRAW_H

#include "vector.h"

#define DRAW_BLOCK 128 /* tokens per block, as in `baton_engine.ops.token_weights` */
#define WHOLE 8388608.0f /* 2**23: floats from here on are integers */

typedef float half_floats __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
typedef double doubles __attribute__((vector_size(VECTOR_BYTES)));

/* Returns `product`, rounded to a float. Without this the compiler would fuse it with the next addition. */
INLINE floats unfused(floats product) {
#if defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

INLINE doubles wide(const float *from) {
#if defined(__AVX512F__)
    return (doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
    return (doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
    return __builtin_convertvector(*(const half_floats *)from, doubles);
#endif
}

/*
 * Replaces logits [rows, blocks * DRAW_BLOCK] by weights, and computes the sum and the maximum of each block.
 *
 * `terms` has the coefficients of 1 to x**5.
 */
void baton_weigh(
    float *logits, int64_t rows, int64_t blocks, const float *peaks, const float *factors, float shift, float least,
    const float *terms, double *sums, float *maxima
) {
    for (int64_t block = 0; block < rows * blocks; block++) {
        float *values = logits + block * DRAW_BLOCK;
        const float peak = peaks[block / blocks], factor = factors[block / blocks];
        floats most = splat(0.0f);
        doubles low = {0}, high = {0};
        for (size_t i = 0; i < DRAW_BLOCK; i += LANES) {
            floats x = larger(splat(least), unfused((load(values + i) - peak) * factor));
            floats shifted = x + shift;
            floats part = x - (shifted - shift), power = splat(terms[5]);
            for (int term = 4; term >= 0; term--) power = unfused(power * part) + terms[term];
            floats weight = (floats)((words)power + ((words)shifted << 23));
            weight = choose(weight < WHOLE, (weight + WHOLE) - WHOLE, weight);
            store(values + i, weight);
            most = larger(most, weight);
            low += wide(values + i);
            high += wide(values + i + LANES / 2);
        }
        low += high;
        double total = 0.0;
        for (int lane = 0; lane < LANES / 2; lane++) total += low[lane];
        sums[block] = total;
        maxima[block] = largest(most);
    }
}

#endif
