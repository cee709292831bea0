/*
 * Vectors of 32-bit lanes, for any processor.
 *
 * A lane is one float, or a pair of bfloat16 numbers. The kernels are written for lanes; only `dot` distinguishes the
 * two. The compiler's vector extension supports all processors. Instructions of AVX-512 that the extension cannot
 * express are used in this file only. A vector is as wide as a register, because gcc splits wider ones into scalars.
 */
#ifndef BATON_VECTOR_H
#define BATON_VECTOR_H

#include <stdint.h>
#include <stddef.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTOR_BYTES (4 * LANES)

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef float loose_floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t loose_words __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t loose_halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

typedef uint16_t bfloat16;

/* The two data types of weights, activations and cache. */
enum kind { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE size_t item_bytes(int kind) { return kind == BFLOAT16 ? 2 : 4; }

/* Returns the lanes of `count` numbers. */
INLINE size_t lanes_of(int kind, size_t count) { return kind == BFLOAT16 ? (count + 1) / 2 : count; }

INLINE size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

INLINE floats load(const float *from) { return *(const loose_floats *)from; }
INLINE void store(float *to, floats value) { *(loose_floats *)to = value; }
INLINE words load_words(const void *from) { return *(const loose_words *)from; }
INLINE void store_words(void *to, words value) { *(loose_words *)to = value; }
INLINE floats splat(float value) { return (floats){0} + value; }

INLINE floats choose(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE float largest(floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float best = value[0];
    for (int lane = 1; lane < LANES; lane++) best = value[lane] > best ? value[lane] : best;
    return best;
#endif
}

INLINE float sum(floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float total[LANES];
    memcpy(total, &value, sizeof total);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) total[lane] += total[lane + width];
    return total[0];
#endif
}

INLINE float widen(bfloat16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Converts one vector of floats to bfloat16, rounding to nearest even. */
INLINE halves narrow(floats value) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)value);
#else
    words bits = (words)value;
    words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector(rounded, halves);
#endif
}

/* Stores one vector of floats as numbers of `kind`. */
INLINE void put(void *to, size_t index, floats value, const int kind) {
    if (kind == BFLOAT16)
        *(loose_halves *)((bfloat16 *)to + index) = narrow(value);
    else
        store((float *)to + index, value);
}

INLINE float get(const void *from, size_t index, const int kind) {
    return kind == BFLOAT16 ? widen(((const bfloat16 *)from)[index]) : ((const float *)from)[index];
}

/*
 * Returns total + left * right, rounded once where the processor can. Otherwise compilers would choose what to fuse, and
 * differently in each caller: sums with as many terms would have other bits.
 */
INLINE floats add_product(floats total, floats left, floats right) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)total);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)left, (__m256)right, (__m256)total);
#elif defined(__ARM_NEON)
    return (floats)vfmaq_f32((float32x4_t)total, (float32x4_t)left, (float32x4_t)right);
#else
    return total + left * right;
#endif
}

/* Returns total + weights . x, where x is broadcast: one product per lane, or two of bfloat16. */
INLINE floats dot(floats total, words weights, uint32_t x, const int kind) {
    if (kind == FLOAT32) {
        float value;
        memcpy(&value, &x, 4);
        return add_product(total, (floats)weights, splat(value));
    }
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)x));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)weights, (bfloat16x8_t)vdupq_n_u32(x));
#else
    uint32_t low = x << 16, high = x & 0xffff0000u;
    float first, second;
    memcpy(&first, &low, 4);
    memcpy(&second, &high, 4);
    total = add_product(total, (floats)(weights & 0xffff0000u), splat(second)); /* in the order of `vdpbf16ps` */
    return add_product(total, (floats)(weights << 16), splat(first));
#endif
}

typedef uint64_t pairs __attribute__((vector_size(VECTOR_BYTES)));

/* Returns LANES bfloat16 numbers as float32, the second one of each pair first, in the order in which `dot` adds them. */
INLINE words widen_pairs(const void *from) {
#if defined(__AVX512F__)
    const __m512i natural = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
    return (words)_mm512_rol_epi64(natural, 32);
#else
    const words natural = __builtin_convertvector(*(const loose_halves *)from, words) << 16;
    return (words)((pairs)natural << 32 | (pairs)natural >> 32);
#endif
}

/*
 * `vdpbf16ps` takes numbers below 2 ** -126 as zeros, and rounds such results to zero. Between the two calls, float32
 * does the same. Then the same sums have the same bits either way.
 */
INLINE unsigned flush_begin(void) {
#if defined(__AVX512BF16__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    __asm__ volatile("" ::: "memory"); /* no product before this line */
    return before;
#else
    return 0;
#endif
}

INLINE void flush_end(unsigned before) {
#if defined(__AVX512BF16__)
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Returns 2 ** x with an error of about one unit in the last place, for x <= 126; exactly 0 below -125. */
INLINE floats exp2s(floats x) {
    const float shift = 12582912.0f; /* 1.5 * 2**23: adding it leaves the nearest integer in the low bits */
    floats shifted = x + shift;
    floats part = x - (shifted - shift);
    floats power = splat(1.5353362e-4f);
    power = power * part + 1.3398874e-3f;
    power = power * part + 9.6184373e-3f;
    power = power * part + 5.5503324e-2f;
    power = power * part + 2.4022648e-1f;
    power = power * part + 6.9314720e-1f;
    power = power * part + 1.0f;
    floats result = (floats)((words)power + ((words)shifted << 23));
    return (floats)((ints)result & (x >= -125.0f));
}

#define LOG2_E 1.4426950408889634f

/* Returns a vector of copies of one lane; through memory it would take longer. */
INLINE floats copies_of(floats value, size_t lane) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutexvar_ps(_mm512_set1_epi32((int)lane), (__m512)value);
#elif defined(__AVX2__)
    return (floats)_mm256_permutevar8x32_ps((__m256)value, _mm256_set1_epi32((int)lane));
#else
    return splat(value[lane]);
#endif
}

/* Returns a * b - c, rounded once if the processor can. */
INLINE floats multiply_subtract(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b - c;
#endif
}

/* Returns the unit of the exponents of `put_powers`. */
INLINE float exponent_unit(const int kind) {
#if defined(__AVX512BF16__)
    if (kind == BFLOAT16) return 8388608.0f; /* 2**23: as an integer, an exponent has its fraction in 23 bits */
#endif
    (void)kind;
    return 1.0f;
}

#if defined(__AVX512BF16__)
#define POWERS_AT_ONCE 8
/*
 * Stores bfloat16 powers of two for `count` vectors of exponents, at most POWERS_AT_ONCE. Returns `total` plus the
 * rounded powers. Each step is done for all vectors, because the processor looks ahead only so far.
 */
INLINE __m512 put_bfloat_powers(bfloat16 *to, const floats *exponents, const int count, __m512 total) {
    const __m512i fraction = _mm512_set1_epi32(0x7fffff), one = _mm512_set1_epi32(0x3f800000);
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                           21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i bits[POWERS_AT_ONCE];
    __m512 part[POWERS_AT_ONCE], value[POWERS_AT_ONCE];
#define EACH_POWER _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)
    EACH_POWER bits[i] = _mm512_cvtps_epi32((__m512)exponents[i]);
    /* A number in [1, 2): (bits & fraction) | one. The cubic has an error of 2**-13.7, and rounding one of 2**-9. */
    EACH_POWER part[i] = (__m512)_mm512_ternarylogic_epi32(bits[i], fraction, one, 0xea);
    EACH_POWER value[i] = _mm512_fmadd_ps(part[i], _mm512_set1_ps(0.07802452f), _mm512_set1_ps(-0.00800641f));
    EACH_POWER bits[i] = _mm512_andnot_si512(fraction, bits[i]);
    EACH_POWER value[i] = _mm512_fmadd_ps(part[i], value[i], _mm512_set1_ps(0.4777728f));
    /* 2**-8 is half of a bfloat16's last bit: the lower half of the result is then cut off. */
    EACH_POWER value[i] = _mm512_fmadd_ps(part[i], value[i], _mm512_set1_ps(0.45213431f + 0.00390625f));
    EACH_POWER bits[i] = _mm512_add_epi32(bits[i], (__m512i)value[i]);
#undef EACH_POWER
#pragma GCC unroll 4
    for (int i = 0; i < count; i += 2) {
        /* An exponent below -127 has become a sign: negative numbers are zeros. */
        __m512i both = _mm512_max_epi16(_mm512_permutex2var_epi16(bits[i], upper, bits[i + 1]), _mm512_setzero_si512());
        _mm512_storeu_si512(to + i * LANES, both);
        total = _mm512_dpbf16_ps(total, (__m512bh)both, (__m512bh)_mm512_set1_epi32(0x3f803f80)); /* times ones */
    }
    return total;
}
#endif

/*
 * Stores 2 ** (exponent / exponent_unit) as numbers of `kind` for `count` vectors of exponents of at most 0. Returns
 * `total` plus the numbers. That of -infinity is exactly 0.
 */
INLINE floats put_powers(void *to, const floats *exponents, const int count, floats total, const int kind) {
#if defined(__AVX512BF16__)
    if (kind == BFLOAT16) {
        for (int i = 0; i < count; i += POWERS_AT_ONCE)
            total = (floats)put_bfloat_powers((bfloat16 *)to + i * LANES, exponents + i,
                                              count - i < POWERS_AT_ONCE ? count - i : POWERS_AT_ONCE, (__m512)total);
        return total;
    }
#endif
    for (int i = 0; i < count; i++) {
        const floats power = exp2s(exponents[i]);
        put(to, (size_t)(i * LANES), power, kind);
        total += power;
    }
    return total;
}

/*
 * Writes the largest lane of each of `count` vectors to `to`. Both arrays have whole groups of LANES items; results
 * beyond `count` are -infinity.
 */
INLINE void largest_each(floats *from, size_t count, float *to) {
    for (size_t i = count; i % LANES; i++) from[i] = splat(-__builtin_inff());
#if defined(__AVX512F__)
    for (size_t first = 0; first < count; first += LANES) {
        const __m512 *row = (const __m512 *)from + first;
        __m512 quarter[4], pair[2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* quarter q of quarter[i] is of row i + 4 * q */
            __m512 a = row[i], b = row[i + 4], c = row[i + 8], d = row[i + 12];
            __m512 ab = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
            __m512 cd = _mm512_max_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
            quarter[i] = _mm512_max_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
        }
        for (int i = 0; i < 2; i++)
            pair[i] = _mm512_max_ps(_mm512_unpacklo_ps(quarter[2 * i], quarter[2 * i + 1]),
                                    _mm512_unpackhi_ps(quarter[2 * i], quarter[2 * i + 1]));
        __m512d low = _mm512_unpacklo_pd((__m512d)pair[0], (__m512d)pair[1]);
        __m512d high = _mm512_unpackhi_pd((__m512d)pair[0], (__m512d)pair[1]);
        store(to + first, larger((floats)low, (floats)high));
    }
#else
    for (size_t i = 0; i < round_up(count, LANES); i++) to[i] = largest(from[i]);
#endif
}

/* x * sigmoid(x) */
INLINE floats silu(floats x) {
    floats exponent = larger(splat(-126.0f), x * LOG2_E);
    return x / (1.0f + exp2s(-exponent));
}

/* The tanh approximation of GELU: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)) */
INLINE floats gelu_tanh(floats x) {
    floats exponent = larger(splat(-126.0f), (x + 0.044715f * x * x * x) * (1.5957691216f * LOG2_E));
    return x / (1.0f + exp2s(-exponent));
}

/* tanh(x) with an absolute error of about 1e-7 */
INLINE floats tanhs(floats x) {
    floats exponent = larger(splat(-126.0f), x * (2.0f * LOG2_E));
    return 2.0f / (1.0f + exp2s(-exponent)) - 1.0f;
}

/* Transposes LANES rows of LANES lanes: lane i of rows[j] is stored at to[i * stride + j]. */
INLINE void transpose(const uint32_t *const rows[LANES], size_t offset, uint32_t *to, size_t stride) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* The 128-bit quarter q of a[4 * g + c] now has column 4 * q + c of rows 4 * g to 4 * g + 3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(to + (size_t)(c)*stride, _mm512_shuffle_i32x4(even01, even23, 0x88));
        _mm512_storeu_si512(to + (size_t)(4 + c) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        _mm512_storeu_si512(to + (size_t)(8 + c) * stride, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        _mm512_storeu_si512(to + (size_t)(12 + c) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[(size_t)i * stride + (size_t)j] = rows[j][offset + (size_t)i];
#endif
}

/* Interleaves 2 * LANES bfloat16 numbers: a lane of `left` or `right` is a pair (first[d], second[d]). */
INLINE void pair_up(const void *first, const void *second, words *left, words *right) {
#if defined(__AVX512BW__)
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    *left = (words)_mm512_permutex2var_epi16(a, low, b);
    *right = (words)_mm512_permutex2var_epi16(a, high, b);
#else
    const loose_halves *a = first, *b = second;
    *left = __builtin_convertvector(a[0], words) | __builtin_convertvector(b[0], words) << 16;
    *right = __builtin_convertvector(a[1], words) | __builtin_convertvector(b[1], words) << 16;
#endif
}

/* The same, stored. */
INLINE void interleave(const bfloat16 *first, const bfloat16 *second, uint32_t *to) {
    words left, right;
    pair_up(first, second, &left, &right);
    store_words(to, left), store_words(to + LANES, right);
}

#endif
