/*
 * Products of a few rows with a packed matrix: the kernel of linears and attention.
 *
 * A matrix [n, k] is packed into panels of PANEL outputs (two vectors). A panel is [units][PANEL] lanes, where a unit
 * is one k of float32 or two of bfloat16. A panel is thus one sequential stream of memory, read once, while the rows'
 * numbers are broadcast. Each output is summed along k in the same order for any number of rows, so that a row's
 * result does not depend on the other rows.
 *
 * Products of bfloat16 have several ways, whose rates differ between processors: `ways` in products.h.
 */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include "tiles.h"
#include "vector.h"

#define PANEL (2 * LANES)

/* Rows per tile: limited by the registers for the accumulators, two vectors per row. */
#if TILES
#define TILE_ROWS 32
#elif defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif

/* Ways to multiply bfloat16, and numbers of 8 bits, in the order of `ways` (products.h). */
enum way { PAIRS, WIDENED, TILED, OCTETS, TILED_OCTETS, WAYS };

#define LEAST_TILE_ROWS 5 /* with fewer rows, AMX is not faster */

/* Whether numbers widened to float32 are summed to the bits of PAIRS. Arm's bfloat16 products round otherwise. */
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WIDENS 0
#else
#define WIDENS 1
#endif

#define WIDE_ROWS (TILE_ROWS > 6 ? 12 : 6) /* rows per tile of float32 */

/*
 * Memory that later products read, requested while this one is computed. Otherwise memory would wait during products
 * of several rows: the processor itself reads ahead too little, and not beyond a page of 4 KB.
 */
struct ahead {
    const char *from;
    size_t step; /* bytes per unit, at most two cache lines; 0: nothing is requested */
};

#define AHEAD_BYTES 8192 /* distance of requests of a single product; benchmarks/LOG.md compares others */

static const struct ahead nothing_ahead;

/*
 * Returns what product `nth` of `parts` with the same panel requests. A single one requests what it reads itself soon;
 * of several, only the first reads a panel from memory, and each requests a part of the next panel.
 */
INLINE struct ahead part_ahead(const uint32_t *panel, size_t units, size_t nth, size_t parts) {
    if (parts == 1) return (struct ahead){(const char *)panel + AHEAD_BYTES, PANEL * 4};
    return (struct ahead){(const char *)(panel + units * PANEL) + nth * units * PANEL * 4 / parts, PANEL * 4 / parts};
}

/* result[row][PANEL] = rows . panel, in lanes, plus result[row] * factors[row] if there are factors. */
#define DEFINE_TILE(ROWS, KIND, NAME)                                                                      \
    static void NAME(const uint32_t *rows, size_t row_stride, const uint32_t *panel, size_t units,         \
                     float *result, size_t result_stride, const float *factors, struct ahead ahead) {      \
        floats total[ROWS][2];                                                                             \
        _Pragma("GCC unroll 12") for (int row = 0; row < ROWS; row++) {                                    \
            total[row][0] = factors ? load(result + row * result_stride) * factors[row] : splat(0.0f);     \
            total[row][1] = factors ? load(result + row * result_stride + LANES) * factors[row] : splat(0.0f); \
        }                                                                                                  \
        for (size_t unit = 0; unit < units; unit++) {                                                      \
            words left = load_words(panel + unit * PANEL), right = load_words(panel + unit * PANEL + LANES); \
            if (ahead.step) {                                                                              \
                __builtin_prefetch(ahead.from + unit * ahead.step, 0, 2);                                  \
                __builtin_prefetch(ahead.from + unit * ahead.step + ahead.step / 2, 0, 2);                 \
            }                                                                                              \
            _Pragma("GCC unroll 12") for (int row = 0; row < ROWS; row++) {                                \
                uint32_t x = rows[row * row_stride + unit];                                                \
                total[row][0] = dot(total[row][0], left, x, KIND);                                         \
                total[row][1] = dot(total[row][1], right, x, KIND);                                        \
            }                                                                                              \
        }                                                                                                  \
        _Pragma("GCC unroll 12") for (int row = 0; row < ROWS; row++) {                                    \
            store(result + row * result_stride, total[row][0]);                                            \
            store(result + row * result_stride + LANES, total[row][1]);                                    \
        }                                                                                                  \
    }

#define DEFINE_TILES(ROWS)                         \
    DEFINE_TILE(ROWS, FLOAT32, tile_float_##ROWS)  \
    DEFINE_TILE(ROWS, BFLOAT16, tile_bfloat_##ROWS)

DEFINE_TILES(1)
DEFINE_TILES(2)
DEFINE_TILES(3)
DEFINE_TILES(4)
DEFINE_TILES(6)
#if TILE_ROWS >= 12
DEFINE_TILES(8)
DEFINE_TILES(12)
#endif

#define TILE(ROWS)                                                                                   \
    do {                                                                                             \
        (kind == BFLOAT16 ? tile_bfloat_##ROWS : tile_float_##ROWS)(rows, row_stride, panel, units,  \
                                                                    result, result_stride, factors, ahead); \
        rows += ROWS * row_stride, result += ROWS * result_stride, count -= ROWS;                    \
        if (factors) factors += ROWS;                                                                \
    } while (0)

/*
 * Multiplies `count` rows, at most TILE_ROWS, with one panel. `way` is PAIRS or TILED, and PAIRS for float32. Rows and
 * results need memory for TILE_ROWS rows: AMX reads and writes all of them. Results beyond `count` are undefined.
 */
INLINE void multiply(size_t count, const uint32_t *rows, size_t row_stride, const uint32_t *panel, size_t units,
                     float *result, size_t result_stride, const float *factors, struct ahead ahead, enum way way,
                     const int kind) {
#if TILES
    if (way == TILED && count >= LEAST_TILE_ROWS) {
        for (size_t row = 0; factors && row < count; row++) {
            store(result + row * result_stride, load(result + row * result_stride) * factors[row]);
            store(result + row * result_stride + LANES, load(result + row * result_stride + LANES) * factors[row]);
        }
        multiply_tiles(count > TILE_SIDE, rows, row_stride, panel, units, result, result_stride, factors != NULL);
        return;
    }
#else
    (void)way;
#endif
    while (count) {
#if TILE_ROWS >= 12
        if (count >= 12) TILE(12);
        else if (count >= 8) TILE(8);
        else
#endif
        if (count >= 6) TILE(6);
        else if (count >= 4) TILE(4);
        else if (count >= 3) TILE(3);
        else if (count >= 2) TILE(2);
        else TILE(1);
    }
}

/* Widens `units` of a panel to twice as many of float32. `to` may be `panel`. */
INLINE void widen_panel(const uint32_t *panel, size_t units, uint32_t *to) {
    for (size_t unit = units; unit-- > 0;) { /* from the end, so that nothing is overwritten before it is read */
        const words left = load_words(panel + unit * PANEL), right = load_words(panel + unit * PANEL + LANES);
        store_words(to + 2 * unit * PANEL, left & 0xffff0000u);
        store_words(to + 2 * unit * PANEL + LANES, right & 0xffff0000u);
        store_words(to + (2 * unit + 1) * PANEL, left << 16);
        store_words(to + (2 * unit + 1) * PANEL + LANES, right << 16);
    }
}

/* Widens `units` of a row, a multiple of LANES / 2, to twice as many of float32. `to` may be `row`. */
INLINE void widen_row(const void *row, size_t units, uint32_t *to) {
    for (size_t number = 2 * units; number > 0; number -= LANES)
        store_words(to + number - LANES, widen_pairs((const bfloat16 *)row + number - LANES));
}

/* Returns the units of a panel for rows of `count` numbers; bfloat16 is padded with zeros to the tiles of AMX. */
INLINE size_t units_of(int kind, size_t count) {
    return kind == BFLOAT16 ? round_up(lanes_of(kind, count), LANES) : count;
}

/* A packed weight, padded with zeros beyond n and k. */
struct linear {
    uint32_t *panels;
    float *bias; /* padded to whole panels; NULL: no bias */
    size_t inputs, outputs, units;
    char **quantized; /* panels of quantized.h, NULL if `panels` are set */
    uint8_t *formats; /* of each quantized panel */
};

INLINE size_t panel_count(const struct linear *weight) { return (weight->outputs + PANEL - 1) / PANEL; }

INLINE const uint32_t *panel_at(const struct linear *weight, size_t panel) {
    return weight->panels + panel * weight->units * PANEL;
}

/* Copies row `from` [inputs] to lane `lane` of a panel. */
INLINE void pack_row(uint32_t *panel, size_t lane, const void *from, size_t inputs, const int kind) {
    if (kind == FLOAT32) {
        const uint32_t *row = from;
        for (size_t i = 0; i < inputs; i++) panel[i * PANEL + lane] = row[i];
        return;
    }
    const bfloat16 *row = from;
    for (size_t i = 0; i < inputs / 2; i++)
        panel[i * PANEL + lane] = (uint32_t)row[2 * i] | (uint32_t)row[2 * i + 1] << 16;
    if (inputs % 2) panel[inputs / 2 * PANEL + lane] = row[inputs - 1];
}

#endif
