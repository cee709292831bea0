/*
 * Weights in the formats of GGUF, and their products with rows of 8-bit activations.
 *
 * Every format has blocks of 32 inputs with their own scale. A row of activations is rounded to 8 bits with one scale
 * per block as well, so that the sum of a block is exact in integers. Sums of blocks are added in float32, in the order
 * of the inputs, for any number of rows and on every processor.
 *
 * A panel has PANEL outputs, like a panel of linear.h. It is a sequence of blocks; a block has units of four inputs,
 * one word per output, and then the scales. Formats below 8 bits store two units per word, in its low and high halves
 * of bytes. Formats whose name ends in K have a header before every eighth block.
 */
#ifndef BATON_QUANTIZED_H
#define BATON_QUANTIZED_H

#include "linear.h"

#define BLOCK 32
#define BLOCK_UNITS (BLOCK / 4)
#define SUPERBLOCK 8 /* blocks per header */

/* Rows per tile: limited by the registers for the integer sums, two vectors per row. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define QUANTIZED_ROWS 8
#else
#define QUANTIZED_ROWS 4
#endif

/* The numbers are GGUF's, but for INT4: a scale, an integer that stands for zero, and numbers as in Q4_0. */
enum format { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, INT4 = 63 };

/* One block of a row of activations: number i is scale * the i-th byte. */
struct rounded {
    uint32_t units[BLOCK_UNITS];
    float scale;
    int16_t sums[2]; /* of the bytes of each half */
};

/* Sizes per output in bytes: of a block in GGUF (of a whole superblock for K), and of block and header in a panel. */
struct layout {
    size_t stored, stored_blocks, block, header;
};

INLINE struct layout layout_of(enum format format) {
    switch (format) {
    case Q4_0: return (struct layout){18, 1, 18, 0};
    case Q4_1: return (struct layout){20, 1, 20, 0};
    case Q5_0: return (struct layout){22, 1, 22, 0};
    case Q5_1: return (struct layout){24, 1, 24, 0};
    case Q8_0: return (struct layout){34, 1, 34, 0};
    case Q4_K: return (struct layout){144, SUPERBLOCK, 18, 4};
    case Q5_K: return (struct layout){176, SUPERBLOCK, 22, 4};
    case Q6_K: return (struct layout){210, SUPERBLOCK, 26, 2};
    case INT4: return (struct layout){19, 1, 19, 0};
    default: return (struct layout){0, 0, 0, 0};
    }
}

/* Returns the size of a panel in bytes, or 0 if rows of `inputs` numbers cannot have this format. */
INLINE size_t quantized_panel_bytes(enum format format, size_t inputs) {
    const struct layout layout = layout_of(format);
    if (!layout.stored || inputs % (layout.stored_blocks * BLOCK)) return 0;
    return PANEL * inputs / BLOCK * layout.block + PANEL * inputs / (BLOCK * SUPERBLOCK) * layout.header;
}

/* Returns the start of a block, after its header. */
INLINE char *block_at(const char *panel, size_t block, const enum format format) {
    const struct layout layout = layout_of(format);
    return (char *)panel + PANEL * (block * layout.block + (block / SUPERBLOCK + 1) * layout.header);
}

/* Returns the header of a block's superblock. */
INLINE const char *header_at(const char *panel, size_t block, const enum format format) {
    const struct layout layout = layout_of(format);
    return block_at(panel, block / SUPERBLOCK * SUPERBLOCK, format) - PANEL * layout.header;
}

/* ---- Numbers ---- */

/* Converts float16 bits; an infinity or a NaN becomes a finite number, so loading must reject them. */
INLINE float from_float16(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* the difference of the exponents' biases */
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* Loads one vector of float16 numbers. */
INLINE floats load_float16(const void *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128(from));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    words bits = __builtin_convertvector(*(const loose_halves *)from, words);
    floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)size | (bits & 0x8000) << 16);
#endif
}

typedef uint8_t octets __attribute__((vector_size(LANES)));
typedef int8_t signed_octets __attribute__((vector_size(LANES)));

/* Loads one vector of bytes as floats. Compilers convert such vectors byte by byte. */
INLINE floats load_octets(const void *from, const int is_signed) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(from);
    return (floats)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(from);
    return (floats)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    octets value;
    memcpy(&value, from, sizeof value);
    return is_signed ? __builtin_convertvector((signed_octets)value, floats) : __builtin_convertvector(value, floats);
#endif
}

/* Stores the low byte of each lane. */
INLINE void store_octets(void *to, ints value) {
#if defined(__AVX512F__)
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8((__m512i)value));
#else
    const signed_octets bytes = __builtin_convertvector(value, signed_octets);
    memcpy(to, &bytes, sizeof bytes);
#endif
}

/* Returns the sum of all lanes; it wraps around. */
INLINE int32_t sum_ints(ints value) {
#if defined(__AVX512F__)
    /* `_mm512_reduce_add_epi32` ends with a sum of int, which would be undefined where it wraps around. */
    const __m512i all = (__m512i)value;
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
#else
    uint32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += (uint32_t)value[lane];
    return (int32_t)total;
#endif
}

/* ---- Activations ---- */

/*
 * Rounds `count` numbers, a multiple of 32, to 8 bits. A row with an infinity or a NaN gets NaN as a scale, so that
 * its results are NaN too.
 */
INLINE void round_row(const float *from, size_t count, struct rounded *to) {
    const float shift = 12582912.0f; /* 1.5 * 2**23: adding it leaves the nearest integer in the low bits */
    for (; count; count -= BLOCK, from += BLOCK, to++) {
        floats top = splat(0.0f), invalid = splat(0.0f);
        for (size_t i = 0; i < BLOCK; i += LANES) {
            floats value = load(from + i);
            top = larger(top, larger(value, -value));
            invalid += value * 0.0f;
        }
        const float most = largest(top), scale = most > 1e-30f ? most / 127.0f : 0.0f;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        words sums[2] = {{0}, {0}}; /* unsigned: those of an invalid row may overflow */
        for (size_t i = 0; i < BLOCK; i += LANES) {
            ints number = (ints)(load(from + i) * inverse + shift) - 0x4b400000;
            store_octets((char *)to->units + i, number);
            sums[i / (BLOCK / 2)] += (words)number;
        }
        to->scale = scale + sum(invalid);
        for (int half = 0; half < 2; half++) to->sums[half] = (int16_t)sum_ints((ints)sums[half]);
    }
}

/* ---- Integer products ---- */

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define UNSIGNED_ONLY 1 /* the products need unsigned weights: signed ones are stored in the sums with an offset */
#else
#define UNSIGNED_ONLY 0
#endif

/* Returns total + weights . x for four weights from 0 to 127 per lane, and four signed bytes x. */
INLINE ints add_unit(ints total, words weights, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32((int)x));
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, _mm256_set1_epi32((int)x));
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32((int)x));
    return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32((int)x));
    return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)total, (int8x16_t)weights, vreinterpretq_s8_u32(vdupq_n_u32(x)));
#elif defined(__aarch64__)
    int8x16_t left = (int8x16_t)weights, right = vreinterpretq_s8_u32(vdupq_n_u32(x));
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(left), vget_low_s8(right)));
    int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(left), vget_high_s8(right)));
    return total + (ints)vpaddq_s32(low, high);
#else
    for (int byte = 0; byte < 4; byte++)
        total += ((ints)(weights << (24 - 8 * byte)) >> 24) * (int32_t)(int8_t)(x >> (8 * byte));
    return total;
#endif
}

/* The same for signed weights; with UNSIGNED_ONLY, for weights + 128. */
INLINE ints add_signed_unit(ints total, words weights, uint32_t x) {
#if UNSIGNED_ONLY
    return add_unit(total, weights, x);
#elif defined(__AVX512BW__)
    __m512i signs = _mm512_set1_epi32((int)x), bytes = (__m512i)weights;
    signs = _mm512_mask_sub_epi8(signs, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), signs);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(bytes), signs);
    return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i bytes = (__m256i)weights, signs = _mm256_sign_epi8(_mm256_set1_epi32((int)x), bytes);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), signs);
    return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return add_unit(total, weights, x);
#endif
}

/* Returns total + low . x + high . y for weights from 0 to 63. */
INLINE ints add_pair(ints total, words low, words high, uint32_t x, uint32_t y) {
#if !UNSIGNED_ONLY && defined(__AVX512BW__)
    __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)low, _mm512_set1_epi32((int)x)),
                                     _mm512_maddubs_epi16((__m512i)high, _mm512_set1_epi32((int)y)));
    return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif !UNSIGNED_ONLY && defined(__AVX2__)
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32((int)x)),
                                     _mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32((int)y)));
    return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return add_unit(add_unit(total, low, x), high, y);
#endif
}

/* ---- Products of tiles ---- */

/* Returns whether numbers have a fifth bit, which panels store behind the low four. */
INLINE int has_fifth_bit(const enum format format) { return format == Q5_0 || format == Q5_1 || format == Q5_K; }

/* Returns whether a number is byte * scale, with a byte for zero but no offset. */
INLINE int is_symmetric(const enum format format) {
    return format == Q8_0 || format == Q4_0 || format == Q5_0 || format == Q6_K;
}

/* The words of units 2 * nth and 2 * nth + 1 of a vector of outputs, for the formats below 8 bits. */
INLINE void unpack_pair(const char *block, int nth, int half, words *low, words *high, const enum format format) {
    const char *at = block + half * VECTOR_BYTES;
    words pair = load_words(at + nth * PANEL * 4);
    *low = pair & 0x0f0f0f0fu, *high = pair >> 4 & 0x0f0f0f0fu;
    if (has_fifth_bit(format)) {
        words bits = load_words(at + 4 * PANEL * 4) >> (unsigned)(2 * nth);
        *low |= (bits & 0x01010101u) << 4, *high |= (bits >> 1 & 0x01010101u) << 4;
    }
    if (format == Q6_K) {
        words bits = load_words(at + (4 + nth / 2) * PANEL * 4) >> (unsigned)(4 * (nth % 2));
        *low |= (bits & 0x03030303u) << 4, *high |= (bits >> 2 & 0x03030303u) << 4;
    }
}

/* Scales of a vector of outputs: number i of the block is byte * scale[i / 16] + offset. */
struct scales {
    floats scale[2], offset;
};

INLINE struct scales scales_of(const char *block, const char *header, int half, const enum format format) {
    const char *at = block + PANEL * (layout_of(format).block - 2);
    struct scales scales = {{splat(0.0f), splat(0.0f)}, splat(0.0f)};
    if (is_symmetric(format) && format != Q6_K) scales.scale[0] = load_float16(at + half * LANES * 2);
    if (format == Q4_1 || format == Q5_1) {
        scales.scale[0] = load_float16(at - PANEL * 2 + half * LANES * 2);
        scales.offset = load_float16(at + half * LANES * 2);
    }
    if (format == INT4) {
        scales.scale[0] = load_float16(block + PANEL * 16 + half * LANES * 2);
        scales.offset = -scales.scale[0] * load_octets(block + PANEL * 18 + half * LANES, 0);
    }
    if (format == Q4_K || format == Q5_K) {
        scales.scale[0] = load_float16(header + half * LANES * 2) * load_octets(at + half * LANES, 0);
        scales.offset = -load_float16(header + PANEL * 2 + half * LANES * 2) * load_octets(at + PANEL + half * LANES, 0);
    }
    if (format == Q6_K) {
        scales.scale[0] = load_float16(header + half * LANES * 2) * load_octets(at + half * LANES, 1);
        scales.scale[1] = load_float16(header + half * LANES * 2) * load_octets(at + PANEL + half * LANES, 1);
    } else {
        scales.scale[1] = scales.scale[0];
    }
    return scales;
}

/* The number that a byte of the format stands for zero: bytes are stored without sign. */
INLINE int zero_of(const enum format format) {
    return format == Q4_0 ? 8 : format == Q5_0 ? 16 : format == Q6_K ? 32 : format == Q8_0 && UNSIGNED_ONLY ? 128 : 0;
}

INLINE floats as_floats(ints value) { return __builtin_convertvector(value, floats); }

/* result[row][PANEL] = rows . panel for `count` rows of `blocks` blocks. */
INLINE void multiply_tile(const int count, const struct rounded *rows, size_t stride, const char *panel, size_t blocks,
                          float *result, const enum format format) {
    floats totals[QUANTIZED_ROWS][2];
    const int zero = zero_of(format), halves_differ = format == Q6_K, biased = !is_symmetric(format);
    _Pragma("GCC unroll 8") for (int row = 0; row < count; row++) totals[row][0] = totals[row][1] = splat(0.0f);
    for (size_t block = 0; block < blocks; block++) {
        const char *at = block_at(panel, block, format);
        const struct rounded *x = rows + block;
        ints sums[QUANTIZED_ROWS][2], firsts[QUANTIZED_ROWS][2];
        _Pragma("GCC unroll 8") for (int row = 0; row < count; row++) {
            const int16_t *s = x[(size_t)row * stride].sums;
            sums[row][0] = sums[row][1] = (ints){0} - zero * (halves_differ ? s[0] : s[0] + s[1]);
        }
        if (format == Q8_0) {
            _Pragma("GCC unroll 1") for (int unit = 0; unit < BLOCK_UNITS; unit++)
                _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
                    words weights = load_words(at + (unit * PANEL + half * LANES) * 4);
                    if (UNSIGNED_ONLY) weights ^= 0x80808080u;
                    _Pragma("GCC unroll 8") for (int row = 0; row < count; row++)
                        sums[row][half] = add_signed_unit(sums[row][half], weights, x[(size_t)row * stride].units[unit]);
                }
        } else {
            _Pragma("GCC unroll 4") for (int nth = 0; nth < BLOCK_UNITS / 2; nth++) {
                if (halves_differ && nth == BLOCK_UNITS / 4)
                    _Pragma("GCC unroll 8") for (int row = 0; row < count; row++) {
                        firsts[row][0] = sums[row][0], firsts[row][1] = sums[row][1];
                        sums[row][0] = sums[row][1] = (ints){0} - zero * x[(size_t)row * stride].sums[1];
                    }
                _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
                    words low, high;
                    unpack_pair(at, nth, half, &low, &high, format);
                    _Pragma("GCC unroll 8") for (int row = 0; row < count; row++) {
                        const uint32_t *units = x[(size_t)row * stride].units + 2 * nth;
                        sums[row][half] = add_pair(sums[row][half], low, high, units[0], units[1]);
                    }
                }
            }
        }
        const char *header = header_at(panel, block, format);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            const struct scales scales = scales_of(at, header, half, format);
            _Pragma("GCC unroll 8") for (int row = 0; row < count; row++) {
                const struct rounded *of = x + (size_t)row * stride;
                floats *total = &totals[row][half];
                if (halves_differ) *total += as_floats(firsts[row][half]) * (scales.scale[0] * of->scale);
                *total += as_floats(sums[row][half]) * (scales.scale[1] * of->scale);
                if (biased) *total += scales.offset * (of->scale * (float)(of->sums[0] + of->sums[1]));
            }
        }
    }
    _Pragma("GCC unroll 8") for (int row = 0; row < count; row++)
        store(result + row * PANEL, totals[row][0]), store(result + row * PANEL + LANES, totals[row][1]);
}

#define DEFINE_QUANTIZED_TILE(FORMAT, ROWS)                                                                         \
    static void tile_##FORMAT##_##ROWS(const struct rounded *rows, size_t stride, const char *panel, size_t blocks, \
                                       float *result) {                                                             \
        multiply_tile(ROWS, rows, stride, panel, blocks, result, FORMAT);                                           \
    }
#if QUANTIZED_ROWS >= 8
#define DEFINE_QUANTIZED_TILES(FORMAT) \
    DEFINE_QUANTIZED_TILE(FORMAT, 1)   \
    DEFINE_QUANTIZED_TILE(FORMAT, 2)   \
    DEFINE_QUANTIZED_TILE(FORMAT, 4)   \
    DEFINE_QUANTIZED_TILE(FORMAT, 8)
#define QUANTIZED_TILES(FORMAT) {tile_##FORMAT##_1, tile_##FORMAT##_2, tile_##FORMAT##_4, tile_##FORMAT##_8}
#else
#define DEFINE_QUANTIZED_TILES(FORMAT) \
    DEFINE_QUANTIZED_TILE(FORMAT, 1)   \
    DEFINE_QUANTIZED_TILE(FORMAT, 2)   \
    DEFINE_QUANTIZED_TILE(FORMAT, 4)
#define QUANTIZED_TILES(FORMAT) {tile_##FORMAT##_1, tile_##FORMAT##_2, tile_##FORMAT##_4}
#endif

DEFINE_QUANTIZED_TILES(Q4_0)
DEFINE_QUANTIZED_TILES(Q4_1)
DEFINE_QUANTIZED_TILES(Q5_0)
DEFINE_QUANTIZED_TILES(Q5_1)
DEFINE_QUANTIZED_TILES(Q8_0)
DEFINE_QUANTIZED_TILES(Q4_K)
DEFINE_QUANTIZED_TILES(Q5_K)
DEFINE_QUANTIZED_TILES(Q6_K)
DEFINE_QUANTIZED_TILES(INT4)

typedef void (*quantized_tile)(const struct rounded *, size_t, const char *, size_t, float *);

/* By format and by the logarithm of the number of rows. */
static const quantized_tile quantized_tiles[][4] = {
    [Q4_0] = QUANTIZED_TILES(Q4_0), [Q4_1] = QUANTIZED_TILES(Q4_1), [Q5_0] = QUANTIZED_TILES(Q5_0),
    [Q5_1] = QUANTIZED_TILES(Q5_1), [Q8_0] = QUANTIZED_TILES(Q8_0), [Q4_K] = QUANTIZED_TILES(Q4_K),
    [Q5_K] = QUANTIZED_TILES(Q5_K), [Q6_K] = QUANTIZED_TILES(Q6_K), [INT4] = QUANTIZED_TILES(INT4),
};

/* Multiplies `count` rows, at most QUANTIZED_ROWS, with one panel: result[row][PANEL]. */
INLINE void multiply_quantized(size_t count, const struct rounded *rows, size_t stride, const char *panel, size_t blocks,
                               float *result, enum format format) {
    for (int power = 3; power >= 0; power--) {
        const size_t step = (size_t)1 << power;
        for (; step <= QUANTIZED_ROWS && count >= step; count -= step, rows += step * stride, result += step * PANEL)
            quantized_tiles[format][power](rows, stride, panel, blocks, result);
    }
}

/* ---- Tiles of AMX ---- */

#define OCTET_TILE_ROWS 32

#if OCTET_TILES
/*
 * The same as `multiply_tile`, with the same bits, for OCTET_TILE_ROWS rows: a block is the depth of a tile. Not for Q6_K,
 * whose scales belong to half a block.
 */
INLINE void multiply_octet_tile(const struct rounded *rows, size_t stride, const char *panel, size_t blocks, float *result,
                                const enum format format) {
    typedef int8_t octet_words __attribute__((vector_size(VECTOR_BYTES)));
    _Alignas(64) int32_t sums[OCTET_TILE_ROWS][PANEL];
    _Alignas(64) uint32_t weights[2][BLOCK_UNITS][LANES];
    const size_t row_bytes = stride * sizeof *rows;
    memset(result, 0, OCTET_TILE_ROWS * PANEL * sizeof *result);
    for (size_t block = 0; block < blocks; block++) {
        const char *at = block_at(panel, block, format), *header = header_at(panel, block, format);
        const struct rounded *x = rows + block;
        if (format != Q8_0)
            _Pragma("GCC unroll 4") for (int nth = 0; nth < BLOCK_UNITS / 2; nth++)
                _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
                    words low, high;
                    unpack_pair(at, nth, half, &low, &high, format);
                    store_words(weights[half][2 * nth], (words)((octet_words)low - (int8_t)zero_of(format)));
                    store_words(weights[half][2 * nth + 1], (words)((octet_words)high - (int8_t)zero_of(format)));
                }
        STORED();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(4, x, row_bytes);
        _tile_loadd(5, x + TILE_SIDE * stride, row_bytes);
        if (format == Q8_0) {
            _tile_loadd(6, at, PANEL * 4);
            _tile_loadd(7, at + LANES * 4, PANEL * 4);
        } else {
            _tile_loadd(6, weights[0], LANES * 4);
            _tile_loadd(7, weights[1], LANES * 4);
        }
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(0, sums[0], PANEL * 4);
        _tile_stored(1, sums[0] + LANES, PANEL * 4);
        _tile_stored(2, sums[TILE_SIDE], PANEL * 4);
        _tile_stored(3, sums[TILE_SIDE] + LANES, PANEL * 4);
        STORED();
        const struct scales scales[2] = {scales_of(at, header, 0, format), scales_of(at, header, 1, format)};
        _Pragma("GCC unroll 4") for (int row = 0; row < OCTET_TILE_ROWS; row++) {
            const struct rounded *of = x + (size_t)row * stride;
            _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
                float *to = result + row * PANEL + half * LANES;
                floats total = load(to);
                total += as_floats((ints)load_words(sums[row] + half * LANES)) * (scales[half].scale[1] * of->scale);
                if (!is_symmetric(format)) total += scales[half].offset * (of->scale * (float)(of->sums[0] + of->sums[1]));
                store(to, total);
            }
        }
    }
}

#define DEFINE_OCTET_TILE(FORMAT)                                                                            \
    static void octet_tile_##FORMAT(const struct rounded *rows, size_t stride, const char *panel, size_t blocks, \
                                    float *result) {                                                         \
        multiply_octet_tile(rows, stride, panel, blocks, result, FORMAT);                                    \
    }

DEFINE_OCTET_TILE(Q4_0)
DEFINE_OCTET_TILE(Q4_1)
DEFINE_OCTET_TILE(Q5_0)
DEFINE_OCTET_TILE(Q5_1)
DEFINE_OCTET_TILE(Q8_0)
DEFINE_OCTET_TILE(Q4_K)
DEFINE_OCTET_TILE(Q5_K)
DEFINE_OCTET_TILE(INT4)

static const quantized_tile octet_tiles[] = {
    [Q4_0] = octet_tile_Q4_0, [Q4_1] = octet_tile_Q4_1, [Q5_0] = octet_tile_Q5_0, [Q5_1] = octet_tile_Q5_1,
    [Q8_0] = octet_tile_Q8_0, [Q4_K] = octet_tile_Q4_K, [Q5_K] = octet_tile_Q5_K, [INT4] = octet_tile_INT4,
};

/* Returns the kernel of OCTET_TILE_ROWS rows, or NULL. Needs `tiles_begin(.., BLOCK_UNITS)`. */
INLINE quantized_tile octet_tile(enum format format) { return octet_tiles[format]; }
#else
INLINE quantized_tile octet_tile(enum format format) { return (void)format, NULL; }
#endif

/* ---- Packing ---- */

/* One block as stored in GGUF: bytes without sign (signed for Q8_0), and the fields that follow them in a panel. */
struct stored {
    uint8_t bytes[BLOCK];
    uint8_t scales[4];  /* as in the panel: float16 numbers, or bytes */
    uint8_t header[4];
};

/* The scale and minimum of block `nth` in the 12 bytes of Q4_K and Q5_K: 6 bits each. */
INLINE void unpack_scales(const uint8_t *from, int nth, uint8_t *to) {
    if (nth < 4) {
        to[0] = from[nth] & 63, to[1] = from[nth + 4] & 63;
        return;
    }
    to[0] = (uint8_t)((from[nth + 4] & 15) | (from[nth - 4] >> 6) << 4);
    to[1] = (uint8_t)(from[nth + 4] >> 4 | (from[nth] >> 6) << 4);
}

/* Reads block `nth` of a stored block or superblock. */
INLINE struct stored read_block(const uint8_t *from, int nth, enum format format) {
    struct stored block = {{0}, {0}, {0}};
    const int upper = nth % 2 ? 4 : 0;
    switch (format) {
    case Q8_0:
        memcpy(block.scales, from, 2);
        memcpy(block.bytes, from + 2, BLOCK);
        break;
    case Q4_0:
    case Q4_1:
    case Q5_0:
    case Q5_1:
    case INT4: {
        const size_t tops = has_fifth_bit(format) ? BLOCK / 8 : 0, scales = layout_of(format).stored - BLOCK / 2 - tops;
        memcpy(block.scales, from, scales);
        for (size_t i = 0; i < BLOCK; i++) {
            block.bytes[i] = from[scales + tops + i % 16] >> (i < 16 ? 0 : 4) & 15;
            if (tops) block.bytes[i] |= (uint8_t)((from[scales + i / 8] >> i % 8 & 1) << 4);
        }
        break;
    }
    case Q4_K:
    case Q5_K: {
        const uint8_t *tops = from + 16, *nibbles = from + (format == Q4_K ? 16 : 48) + nth / 2 * BLOCK;
        memcpy(block.header, from, 4);
        unpack_scales(from + 4, nth, block.scales);
        for (int i = 0; i < BLOCK; i++) {
            block.bytes[i] = nibbles[i] >> upper & 15;
            if (format == Q5_K) block.bytes[i] |= (uint8_t)((tops[i] >> nth & 1) << 4);
        }
        break;
    }
    case Q6_K: {
        const int quarter = nth % 4;
        const uint8_t *nibbles = from + nth / 4 * 64 + quarter % 2 * BLOCK, *tops = from + 128 + nth / 4 * BLOCK;
        memcpy(block.scales, from + 192 + 2 * nth, 2);
        memcpy(block.header, from + 208, 2);
        for (int i = 0; i < BLOCK; i++)
            block.bytes[i] = (uint8_t)((nibbles[i] >> (quarter < 2 ? 0 : 4) & 15) | (tops[i] >> 2 * quarter & 3) << 4);
        break;
    }
    default: break;
    }
    return block;
}

/* Copies one stored row to a lane. Words of a lane are written whole, so lanes may be packed at the same time. */
INLINE void pack_blocks(char *panel, size_t lane, const uint8_t *from, size_t inputs, const enum format format) {
    const struct layout layout = layout_of(format);
    const size_t first = layout.header ? 1 : 2; /* bytes of the first and second field of scales */
    const size_t second = format == Q4_1 || format == Q5_1 ? 2 : is_symmetric(format) && format != Q6_K ? 0 : 1;
    for (size_t number = 0; number < inputs / BLOCK; number++) {
        const struct stored block =
            read_block(from + number / layout.stored_blocks * layout.stored, (int)(number % layout.stored_blocks), format);
        char *to = block_at(panel, number, format), *scales = to + PANEL * (layout.block - first - second);
        char *header = (char *)header_at(panel, number, format), *word = to + lane * 4;
        memcpy(scales + lane * first, block.scales, first);
        memcpy(scales + PANEL * first + lane * second, block.scales + first, second);
        for (size_t i = 0; i < layout.header / 2; i++) memcpy(header + (i * PANEL + lane) * 2, block.header + i * 2, 2);
        if (format == Q8_0) {
            for (size_t unit = 0; unit < BLOCK_UNITS; unit++) memcpy(word + unit * PANEL * 4, block.bytes + unit * 4, 4);
            continue;
        }
        uint32_t units[BLOCK_UNITS], tops[2] = {0, 0};
        memcpy(units, block.bytes, BLOCK);
        for (size_t pair = 0; pair < BLOCK_UNITS / 2; pair++) {
            const uint32_t low = units[2 * pair], high = units[2 * pair + 1];
            const uint32_t both = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
            memcpy(word + pair * PANEL * 4, &both, 4);
            if (has_fifth_bit(format)) tops[0] |= (low >> 4 & 0x01010101u) << 2 * pair | (high >> 4 & 0x01010101u) << (2 * pair + 1);
            if (format == Q6_K) tops[pair / 2] |= (low >> 4 & 0x03030303u) << 4 * (pair % 2) | (high >> 4 & 0x03030303u) << (4 * (pair % 2) + 2);
        }
        for (size_t nth = 0; nth < (format == Q6_K ? 2 : (size_t)has_fifth_bit(format)); nth++)
            memcpy(word + (BLOCK_UNITS / 2 + nth) * PANEL * 4, tops + nth, 4);
    }
}

/* Copies one stored row to lane `lane` of a panel. */
static void pack_quantized_row(char *panel, size_t lane, const uint8_t *from, size_t inputs, enum format format) {
    switch (format) { /* the formats are constants here, so that each case is compiled for one */
    case Q4_0: pack_blocks(panel, lane, from, inputs, Q4_0); break;
    case Q4_1: pack_blocks(panel, lane, from, inputs, Q4_1); break;
    case Q5_0: pack_blocks(panel, lane, from, inputs, Q5_0); break;
    case Q5_1: pack_blocks(panel, lane, from, inputs, Q5_1); break;
    case Q4_K: pack_blocks(panel, lane, from, inputs, Q4_K); break;
    case Q5_K: pack_blocks(panel, lane, from, inputs, Q5_K); break;
    case Q6_K: pack_blocks(panel, lane, from, inputs, Q6_K); break;
    case INT4: pack_blocks(panel, lane, from, inputs, INT4); break;
    default: pack_blocks(panel, lane, from, inputs, Q8_0); break;
    }
}

/* Writes the numbers of lane `lane` of a panel: the inverse of packing. */
static void unpack_quantized_row(const char *panel, size_t lane, size_t inputs, float *to, enum format format) {
    const int zero = format == Q8_0 ? 0 : zero_of(format);
    for (size_t number = 0; number < inputs / BLOCK; number++, to += BLOCK) {
        const char *block = block_at(panel, number, format), *header = header_at(panel, number, format);
        struct scales scales = {{splat(0.0f), splat(0.0f)}, splat(0.0f)};
        const int half = (int)(lane / LANES);
        switch (format) { /* the formats are constants here, so that each case is compiled for one */
        case Q4_0: scales = scales_of(block, header, half, Q4_0); break;
        case Q4_1: scales = scales_of(block, header, half, Q4_1); break;
        case Q5_0: scales = scales_of(block, header, half, Q5_0); break;
        case Q5_1: scales = scales_of(block, header, half, Q5_1); break;
        case Q4_K: scales = scales_of(block, header, half, Q4_K); break;
        case Q5_K: scales = scales_of(block, header, half, Q5_K); break;
        case Q6_K: scales = scales_of(block, header, half, Q6_K); break;
        case INT4: scales = scales_of(block, header, half, INT4); break;
        default: scales = scales_of(block, header, half, Q8_0); break;
        }
        for (int i = 0; i < BLOCK; i++) {
            const int unit = i / 4, byte = i % 4;
            int value;
            if (format == Q8_0) {
                value = (int8_t)block[(unit * PANEL + (int)lane) * 4 + byte];
            } else {
                words pair[2];
                unpack_pair(block, unit / 2, half, pair, pair + 1, format);
                value = (int)(pair[unit % 2][lane % LANES] >> 8 * byte & 255) - zero;
            }
            to[i] = (float)value * scales.scale[i / 16][lane % LANES] + scales.offset[lane % LANES];
        }
    }
}

/*
 * Self-test: returns whether products of each format are those of the unpacked numbers. The stored bytes are random,
 * with scales of a few hundredths.
 */
static int quantized_sound(void) {
    enum { NUMBERS = 2 * BLOCK * SUPERBLOCK, ROWS = 2 * QUANTIZED_ROWS - 1, BLOCKS = NUMBERS / BLOCK };
    static const uint8_t formats[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4};
    static _Alignas(64) char panel[PANEL * NUMBERS * 2];
    static float rows[ROWS][NUMBERS], weights[NUMBERS], result[ROWS][PANEL];
    static struct rounded x[OCTET_TILE_ROWS][BLOCKS];
    uint32_t state = 1;
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < NUMBERS; i++) rows[row][i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
        round_row(rows[row], NUMBERS, x[row]);
    }
    for (size_t row = ROWS; row < OCTET_TILE_ROWS; row++) memcpy(x[row], x[row % ROWS], sizeof x[row]);
    for (size_t nth = 0; nth < sizeof formats; nth++) {
        const enum format format = (enum format)formats[nth];
        const struct layout layout = layout_of(format);
        memset(panel, 0, sizeof panel);
        for (size_t lane = 0; lane < PANEL; lane++) {
            uint8_t stored[NUMBERS * 2];
            for (size_t i = 0; i < sizeof stored; i++) stored[i] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 24);
            for (size_t at = 0; at < NUMBERS / BLOCK / layout.stored_blocks; at++) {
                uint8_t *scales = stored + at * layout.stored + (format == Q6_K ? layout.stored - 2 : 0);
                scales[1] = 0x28 | (scales[1] & 0x81); /* about 2 ** -5 */
                if (layout.header == 4 || format == Q4_1 || format == Q5_1) scales[3] = 0x28 | (scales[3] & 0x81);
            }
            pack_quantized_row(panel, lane, stored, NUMBERS, format);
        }
        for (size_t count = 1; count <= ROWS; count++) {
            memset(result, 0, sizeof result);
            for (size_t row = 0; row < count; row += QUANTIZED_ROWS)
                multiply_quantized(count - row < QUANTIZED_ROWS ? count - row : QUANTIZED_ROWS, x[row], NUMBERS / BLOCK,
                                   panel, NUMBERS / BLOCK, result[row], format);
            for (size_t lane = 0; lane < PANEL; lane++) {
                unpack_quantized_row(panel, lane, NUMBERS, weights, format);
                for (size_t row = 0; row < count; row++) {
                    double exact = 0.0, size = 1.0;
                    for (size_t i = 0; i < NUMBERS; i++) {
                        const struct rounded *block = &x[row][i / BLOCK];
                        const double product = (double)weights[i] * block->scale * ((const int8_t *)block->units)[i % BLOCK];
                        exact += product, size += product < 0 ? -product : product;
                    }
                    const double error = exact - (double)result[row][lane];
                    if (!(error < 1e-5 * size && error > -1e-5 * size)) return 0;
                }
            }
        }
#if OCTET_TILES
        if (!octet_tile(format) || !tiles_allowed()) continue;
        static _Alignas(64) float tiled[OCTET_TILE_ROWS][PANEL];
        struct tile_shapes before;
        tiles_begin(&before, BLOCK_UNITS);
        octet_tile(format)(x[0], BLOCKS, panel, BLOCKS, tiled[0]);
        tiles_end(&before);
        for (size_t row = 0; row < OCTET_TILE_ROWS; row++)
            if (memcmp(tiled[row], result[row % ROWS], sizeof tiled[row])) return 0;
#endif
    }
    return 1;
}

#endif
