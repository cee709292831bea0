/*
 * Products in each way that the processor has, and the rate of each way.
 *
 * The name of an instruction does not tell its rate: on some processors `vdpbf16ps` has half the rate of float32. So
 * each way is timed for each class of rows, and the caller chooses. In WIDENED, a part of a panel is widened once for
 * all rows of a chunk, and its sums have the order and the bits of PAIRS. TILED sums in another order. Those of 8 bits
 * (quantized.h) have the same bits in all ways.
 */
#ifndef BATON_PRODUCTS_H
#define BATON_PRODUCTS_H

#include "lora.h"
#include "quantized.h"

/* Rows of the classes, except for the last one: a product of so many rows, or fewer, is of that class. */
static const size_t class_rows[ROW_CLASSES - 1] = {1, LEAST_TILE_ROWS - 1, 12};

static int is_allowed(void) { return 1; }
#if TILES
#define TILES_ALLOWED tiles_allowed
#else
#define TILES_ALLOWED NULL
#endif
#define IN_INTEGERS "in integers" /* of ways of 8 bits */

/* The ways. Those with the same sums have the same bits. */
static const struct {
    const char *name, *sums;
    int (*allowed)(void); /* NULL: the library is built without it */
    size_t least_rows;    /* with fewer rows, PAIRS or OCTETS is used instead */
} ways[WAYS] = {
    [PAIRS] = {"pairs", "in pairs", is_allowed, 1},
    [WIDENED] = {"widened", "in pairs", WIDENS ? is_allowed : NULL, 2},
    [TILED] = {"amx", "in tiles of AMX", TILES_ALLOWED, LEAST_TILE_ROWS},
    [OCTETS] = {"octets", IN_INTEGERS, is_allowed, 1},
    [TILED_OCTETS] = {"octets-amx", IN_INTEGERS, OCTET_TILES ? TILES_ALLOWED : NULL, OCTET_TILE_ROWS},
};

static int has_way(size_t way, size_t rows) {
    return way < WAYS && ways[way].allowed && rows >= ways[way].least_rows && ways[way].allowed();
}

INLINE size_t class_of(size_t rows) {
    size_t nth = 0;
    while (nth < ROW_CLASSES - 1 && rows > class_rows[nth]) nth++;
    return nth;
}

/* Returns how products of `rows` rows are computed: PAIRS for float32. */
INLINE enum way way_of(const struct model *model, size_t rows) {
    return model->spec.kind == FLOAT32 ? PAIRS : (enum way)model->spec.ways[class_of(rows)];
}

/* How a product is stored: written, added to the result, or gated by the activation of its first half. */
enum store_mode { WRITE, ADD, GATED };

struct product {
    const struct linear *weight;
    const char *rows;
    size_t row_bytes, count;
    enum store_mode mode;
    void *result;
    size_t result_stride; /* items */
    int gelu;     /* GATED: whether the activation is GELU */
    float scale;  /* factor of the result */
    float cap;    /* a scaled result x becomes cap * tanh(x / cap); 0: it stays */
    int result_kind;      /* of gated results; others are float32 */
    const struct adapter *const *adapters; /* of the rows, or NULL */
    size_t layer;
    enum adapted linear;
    const float *shrunk;
    size_t shrunk_stride; /* items */
    const struct rounded *rounded; /* the rows, if the weights are quantized */
    size_t rounded_stride;         /* blocks */
};

/* Rows and panels of a product that one thread computes. */
struct area {
    size_t first_row, rows_end, first_panel, panels_end;
};

INLINE void finish_tile(const struct product *product, const float *tile, size_t row, size_t count, size_t panel,
                        const int kind) {
    const struct linear *weight = product->weight;
    const size_t from = panel * PANEL;
    floats left_bias = weight->bias ? load(weight->bias + from) : splat(0.0f);
    floats right_bias = weight->bias ? load(weight->bias + from + LANES) : splat(0.0f);
    for (size_t i = 0; i < count; i++) {
        floats left = load(tile + i * PANEL) + left_bias, right = load(tile + i * PANEL + LANES) + right_bias;
        if (product->adapters) {
            const struct low_rank *low_rank = low_rank_at(product->adapters[row + i], product->layer, product->linear);
            const float *shrunk = product->shrunk + (row + i) * product->shrunk_stride;
            if (low_rank) {
                left = expand(low_rank, 2 * panel, shrunk, left, kind);
                right = expand(low_rank, 2 * panel + 1, shrunk, right, kind);
            }
        }
        if (product->mode == GATED) {
            const floats gate = product->gelu ? gelu_tanh(left) : silu(left);
            put(product->result, (row + i) * product->result_stride + panel * LANES, gate * right, product->result_kind);
            continue;
        }
        if (product->scale != 1.0f) left *= product->scale, right *= product->scale;
        if (product->cap != 0.0f) {
            left = tanhs(left / product->cap) * product->cap;
            right = tanhs(right / product->cap) * product->cap;
        }
        float *to = (float *)product->result + (row + i) * product->result_stride + from;
        if (product->mode == ADD) left += load(to), right += load(to + LANES);
        if (from + PANEL <= weight->outputs) {
            store(to, left), store(to + LANES, right);
        } else {
            float rest[PANEL];
            store(rest, left), store(rest + LANES, right);
            memcpy(to, rest, (weight->outputs - from) * 4);
        }
    }
}

#define ROWS_AHEAD 4  /* distance of requests of rows that are widened */
#define AHEAD_TILES 4 /* so many tiles of rows request the part of a panel that is widened next */

/* Returns what tile `nth` requests of `units` from `panel` on. Its product has twice as many steps. */
INLINE struct ahead ahead_of(const uint32_t *panel, size_t units, size_t nth, size_t tiles) {
    const size_t parts = tiles < AHEAD_TILES ? tiles : AHEAD_TILES;
    if (nth >= parts) return nothing_ahead;
    return (struct ahead){(const char *)panel + nth * units * PANEL * 4 / parts, PANEL * 2 / parts};
}

/*
 * Widened: a part of a panel is kept in the nearest cache, while all rows are multiplied with it. If the widened rows do
 * not fit into the next cache, they are cut into slices of inputs, and several panels are multiplied with each slice.
 */
static void multiply_widened(const struct product *product, const struct area *area, struct widened *to, const int kind) {
    const struct linear *weight = product->weight;
    const size_t count = area->rows_end - area->first_row, tiles = (count + WIDE_ROWS - 1) / WIDE_ROWS;
    const size_t part = tiles > 1 ? WIDE_UNITS : WIDE_UNITS / 4, most = WIDE_NUMBERS / 2 / count / part * part;
    const size_t slice = most < weight->units ? most : weight->units, stride = 2 * slice;
    const int is_whole = slice == weight->units;
    const size_t group = is_whole ? 1 : WIDE_PANELS;
    float ones[WIDE_ROWS];
    for (size_t row = 0; row < WIDE_ROWS; row++) ones[row] = 1.0f;
    for (size_t first = area->first_panel; first < area->panels_end; first += group) {
        const size_t panels = area->panels_end - first < group ? area->panels_end - first : group;
        for (size_t from = 0; from < weight->units; from += slice) {
            const size_t end = weight->units - from < slice ? weight->units : from + slice;
            for (size_t row = 0; row < count && (!is_whole || first == area->first_panel); row++) {
                const char *numbers = product->rows + (area->first_row + row) * product->row_bytes + from * 4;
                for (size_t byte = 0; byte < (end - from) * 4; byte += 64)
                    __builtin_prefetch(numbers + ROWS_AHEAD * product->row_bytes + byte);
                widen_row(numbers, end - from, to->rows + row * stride);
            }
            for (size_t nth = 0; nth < panels; nth++)
                for (size_t unit = from; unit < end; unit += part) {
                    const size_t units = end - unit < part ? end - unit : part;
                    const uint32_t *panel = panel_at(weight, first + nth) + unit * PANEL;
                    const size_t later = is_whole || unit + units < end ? units : weight->units + from - unit;
                    const uint32_t *next = panel + (tiles > 1 ? later * PANEL : AHEAD_BYTES / 4);
                    widen_panel(panel, units, to->panel);
                    const unsigned before = flush_begin();
                    for (size_t tile = 0; tile < tiles; tile++) {
                        const size_t row = tile * WIDE_ROWS;
                        multiply(count - row < WIDE_ROWS ? count - row : WIDE_ROWS, to->rows + row * stride + 2 * (unit - from),
                                 stride, to->panel, 2 * units, to->results[nth] + row * PANEL, PANEL, unit ? ones : NULL,
                                 ahead_of(next, units, tile, tiles), PAIRS, FLOAT32);
                    }
                    flush_end(before);
                }
        }
        for (size_t nth = 0; nth < panels; nth++)
            finish_tile(product, to->results[nth], area->first_row, count, first + nth, kind);
    }
}

/* Multiplies an area of a product of numbers of `kind`. */
INLINE void multiply_area(const struct product *product, const struct area *area, enum way way, struct scratch *scratch,
                          const int kind) {
    const struct linear *weight = product->weight;
    if (way == WIDENED) {
        multiply_widened(product, area, &scratch->widened, kind);
        return;
    }
    _Alignas(64) float tile[TILE_ROWS * PANEL];
    struct tile_shapes before;
    if (way == TILED) tiles_begin(&before, TILE_SIDE);
    const size_t tiles = (area->rows_end - area->first_row + TILE_ROWS - 1) / TILE_ROWS;
    for (size_t panel = area->first_panel; panel < area->panels_end; panel++)
        for (size_t row = area->first_row; row < area->rows_end; row += TILE_ROWS) {
            const size_t count = area->rows_end - row < TILE_ROWS ? area->rows_end - row : TILE_ROWS;
            const size_t nth = (row - area->first_row) / TILE_ROWS;
            multiply(count, (const uint32_t *)(product->rows + row * product->row_bytes), product->row_bytes / 4,
                     panel_at(weight, panel), weight->units, tile, PANEL, NULL,
                     part_ahead(panel_at(weight, panel), weight->units, nth, tiles), way, kind);
            finish_tile(product, tile, row, count, panel, kind);
        }
    if (way == TILED) tiles_end(&before);
}

/* Multiplies an area of a product with quantized weights. */
INLINE void multiply_octets(const struct product *product, const struct area *area, enum way way, const int kind) {
    const struct linear *weight = product->weight;
    const size_t blocks = weight->inputs / BLOCK, stride = product->rounded_stride;
    _Alignas(64) float result[OCTET_TILE_ROWS * PANEL];
    struct tile_shapes before;
    if (way == TILED_OCTETS) tiles_begin(&before, BLOCK_UNITS);
    for (size_t panel = area->first_panel; panel < area->panels_end; panel++) {
        const enum format format = (enum format)weight->formats[panel];
        const quantized_tile tile = way == TILED_OCTETS ? octet_tile(format) : NULL;
        for (size_t row = area->first_row, count; row < area->rows_end; row += count) {
            const struct rounded *rows = product->rounded + row * stride;
            const size_t left = area->rows_end - row;
            if (tile && left >= OCTET_TILE_ROWS) {
                count = OCTET_TILE_ROWS;
                tile(rows, stride, weight->quantized[panel], blocks, result);
            } else {
                count = left < QUANTIZED_ROWS ? left : QUANTIZED_ROWS;
                multiply_quantized(count, rows, stride, weight->quantized[panel], blocks, result, format);
            }
            finish_tile(product, result, row, count, panel, kind);
        }
    }
    if (way == TILED_OCTETS) tiles_end(&before);
}

/* ---- Rates ---- */

/* Returns the name of a way, and how it sums; NULL if there is no such way. */
const char *baton_way(int64_t way) { return way < WAYS ? ways[way].name : NULL; }
const char *baton_way_sums(int64_t way) { return way < WAYS ? ways[way].sums : NULL; }

/* Returns the number of rows of a class, or 0 for the last one, which has no limit. */
int64_t baton_class_rows(int64_t nth) { return nth < ROW_CLASSES - 1 ? (int64_t)class_rows[nth] : 0; }

/*
 * Returns the operations per second of a product of `rows` rows, at most ROWS_AT_ONCE, in one thread with weights in the
 * cache: the best of some repeats, in a tenth of a millisecond or two. Weights are bfloat16, or Q8_0 for ways of 8 bits.
 * 0: the processor does not have this way, or no memory is left.
 */
double baton_rate(int64_t way, int64_t rows) {
    enum { NUMBERS = 512, PANELS = 4, LEAST_REPEATS = 5, NANOSECONDS = 100000 };
    const size_t units = units_of(BFLOAT16, NUMBERS), count = (size_t)rows, padded = round_up(count, TILE_ROWS);
    const size_t panel_bytes = quantized_panel_bytes(Q8_0, NUMBERS), blocks = NUMBERS / BLOCK;
    if (!has_way((size_t)way, count)) return 0;
    uint32_t *panels = zeros(PANELS * units * PANEL * 4), *from = zeros(padded * units * 4);
    float *result = zeros(padded * PANELS * PANEL * 4);
    struct rounded *rounded = zeros(count * blocks * sizeof *rounded);
    struct scratch *scratch = zeros(sizeof *scratch);
    int64_t best = INT64_MAX;
    for (size_t i = 0; panels && i < PANELS * units * PANEL; i++) panels[i] = 0x3f803f00u + (uint32_t)(i % 61);
    for (size_t i = 0; from && i < padded * units; i++) from[i] = 0x3f80bf80u + (uint32_t)(i % 53);
    char *quantized[PANELS];
    uint8_t formats[PANELS];
    for (size_t i = 0; i < PANELS; i++) quantized[i] = (char *)panels + i * panel_bytes, formats[i] = Q8_0;
    const int octets = way == OCTETS || way == TILED_OCTETS;
    const struct linear weight = {.panels = panels, .inputs = NUMBERS, .outputs = PANELS * PANEL, .units = units,
                                  .quantized = octets ? quantized : NULL, .formats = formats};
    const struct product product = {.weight = &weight, .rows = (const char *)from, .row_bytes = units * 4, .count = count,
                                    .mode = WRITE, .result = result, .result_stride = PANELS * PANEL, .scale = 1.0f,
                                    .rounded = rounded, .rounded_stride = blocks};
    const struct area area = {0, count, 0, PANELS};
    const int64_t began = nanoseconds();
    const int is_whole = panels && from && result && rounded && scratch;
    for (int nth = 0; is_whole && (nth < LEAST_REPEATS || nanoseconds() - began < NANOSECONDS); nth++) {
        const int64_t start = nanoseconds();
        if (octets) multiply_octets(&product, &area, (enum way)way, BFLOAT16);
        else multiply_area(&product, &area, (enum way)way, scratch, BFLOAT16);
        const int64_t took = nanoseconds() - start;
        if (took < best) best = took;
    }
    free(panels), free(from), free(result), free(rounded), free(scratch);
    return best == INT64_MAX ? 0 : 2e9 * NUMBERS * PANELS * PANEL * (double)rows / (double)(best > 0 ? best : 1);
}

#endif
