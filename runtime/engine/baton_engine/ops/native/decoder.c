/*
 * A whole forward pass of a Llama-like decoder in one call.
 *
 * The pass is a sequence of phases over a pool of threads: for each layer norm, qkv, rotation, attention,
 * output, norm, gate and up, down. Activations between products are of the weights' kind, everything else,
 * the residual above all, is float32. Every number of a row is computed from that row alone and in an order
 * that does not depend on the batch or on the number of threads.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "vector.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define NORM_ROWS 4          /* rows of one chunk of a norm, of a rotation, of the embedding */
#define ROWS_AT_ONCE 252     /* rows of one chunk of a linear at most: a multiple of TILE_ROWS */
#define CHUNKS_PER_THREAD 6  /* enough that no thread waits long for another's last one */
#define RUNS_PER_THREAD 1    /* of equal length that would make up the panels that are left */

/* What the model is; the same order as in native.py. */
struct spec {
    int64_t kind, threads, vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, tied;
    double epsilon;
};

/* One pass; the same order as in native.py. */
struct pass {
    int64_t tokens, rows, wanted;      /* T, R, S */
    const int64_t *ids;                /* [T] */
    const int64_t *positions;          /* [T] */
    const int64_t *slots;              /* [T] */
    const int64_t *starts;             /* [R + 1] */
    const int32_t *blocks;             /* [R, width] */
    int64_t width;
    const int64_t *logits_at;          /* [S] */
    const float *cosines, *sines;      /* [position, head_dim / 2], for every position of the pass */
    void *cache;                       /* [block, layer, 2, kv_head, slot, dim] */
    int64_t cache_slots, block_size;   /* cache_slots: blocks times slots of a block */
    float *logits;                     /* [S, vocab] */
};

struct layer {
    float *attention_norm, *mlp_norm, *q_norm, *k_norm;
    struct linear qkv, output, gate_up, down;
    size_t window; /* 0 for none */
};

struct model {
    struct spec spec;
    struct pool *pool;
    char *arena;
    size_t arena_bytes, arena_used;
    struct layer *layers;
    float *final_norm;
    struct linear head;
    const void *embedding; /* [vocab, hidden] where it is not the head */
    /* Activations, in rows of `stride` items, for `room` tokens and `wanted_room` rows of logits. */
    size_t room, wanted_room;
    size_t residual_stride, normed_stride, qkv_stride, query_lanes, attended_stride, gated_stride;
    float *residual, *qkv;
    char *normed, *queries, *attended, *gated, *final;
    const struct pass *pass;
    size_t query_tokens;  /* of one chunk of attention */
    size_t *query_chunks; /* [rows + 1] chunks of attention before row r, for one key head */
    size_t rows_room;
};

/* ---- Memory ---- */

/* Rows lie an odd number of cache lines apart: rows a power of two apart would share cache sets. */
static size_t stride_of(int kind, size_t count) {
    size_t line = 64 / item_bytes(kind), lines = (round_up(count, PANEL) + line - 1) / line;
    return (lines | 1) * line;
}

static void *place(struct model *model, size_t bytes) {
    void *at = model->arena + model->arena_used;
    model->arena_used += round_up(bytes, 64);
    return model->arena_used <= model->arena_bytes ? at : NULL;
}

static void *zeros(size_t bytes) {
    void *at = NULL;
    if (posix_memalign(&at, 64, bytes)) return NULL;
    return memset(at, 0, bytes);
}

static size_t panels_bytes(int kind, size_t outputs, size_t inputs) {
    return round_up(outputs, PANEL) * lanes_of(kind, inputs) * 4;
}

static size_t weights_bytes(const struct spec *spec) {
    const size_t hidden = (size_t)spec->hidden, inner = (size_t)spec->intermediate, dim = (size_t)spec->head_dim;
    const size_t heads = (size_t)spec->heads, qkv = (heads + 2 * (size_t)spec->kv_heads) * dim;
    const int kind = (int)spec->kind;
    size_t layer = panels_bytes(kind, qkv, hidden) + panels_bytes(kind, hidden, heads * dim) +
                   panels_bytes(kind, round_up(inner, LANES) * 2, hidden) + panels_bytes(kind, hidden, inner);
    size_t vectors = 4 * (round_up(qkv, PANEL) + 4 * round_up(hidden, PANEL) + 2 * round_up(inner, LANES) +
                          2 * round_up(dim, PANEL) + 12 * PANEL);
    return (size_t)spec->layers * (layer + vectors) + panels_bytes(kind, (size_t)spec->vocab, hidden) +
           (spec->tied ? 0 : (size_t)(spec->vocab * spec->hidden) * item_bytes(kind)) + 4 * round_up(hidden, PANEL) + HUGE_PAGE;
}

void baton_destroy(struct model *model);

/* NULL if there is no memory for it. */
struct model *baton_create(const struct spec *spec) {
    struct model *model = calloc(1, sizeof *model);
    if (!model) return NULL;
    model->spec = *spec;
    const int kind = (int)spec->kind;
    model->residual_stride = stride_of(FLOAT32, (size_t)spec->hidden);
    model->normed_stride = stride_of(kind, (size_t)spec->hidden);
    model->qkv_stride = stride_of(FLOAT32, (size_t)((spec->heads + 2 * spec->kv_heads) * spec->head_dim));
    model->query_lanes = stride_of(FLOAT32, lanes_of(kind, (size_t)spec->head_dim));
    model->attended_stride = stride_of(kind, (size_t)(spec->heads * spec->head_dim));
    model->gated_stride = stride_of(kind, (size_t)spec->intermediate);
    size_t group = (size_t)(spec->heads / spec->kv_heads);
    model->query_tokens = group < MOST_QUERIES ? MOST_QUERIES / group : 1;
    model->arena_bytes = round_up(weights_bytes(spec), HUGE_PAGE);
    model->arena = mmap(NULL, model->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (model->arena == MAP_FAILED) model->arena = NULL;
#if defined(MADV_HUGEPAGE)
    if (model->arena) madvise(model->arena, model->arena_bytes, MADV_HUGEPAGE);
#endif
    model->layers = calloc((size_t)spec->layers, sizeof(struct layer));
    model->pool = pool_create((int)spec->threads);
    if (model->arena && model->layers && model->pool) return model;
    baton_destroy(model);
    return NULL;
}

static void forget_activations(struct model *model) {
    free(model->residual), free(model->qkv), free(model->normed), free(model->queries);
    free(model->attended), free(model->gated), free(model->final), free(model->query_chunks);
    model->residual = model->qkv = NULL;
    model->normed = model->queries = model->attended = model->gated = model->final = NULL;
    model->query_chunks = NULL;
    model->room = model->wanted_room = model->rows_room = 0;
}

void baton_destroy(struct model *model) {
    if (model->pool) pool_destroy(model->pool);
    forget_activations(model);
    if (model->arena) munmap(model->arena, model->arena_bytes);
    free(model->layers);
    free(model);
}

/* Makes room for a pass; 0 if there is no memory. What lies between the rows is zero and stays so. */
static int make_room(struct model *model, size_t tokens, size_t wanted, size_t rows) {
    if (tokens <= model->room && wanted <= model->wanted_room && rows <= model->rows_room) return 1;
    const size_t item = item_bytes((int)model->spec.kind);
    tokens = round_up(tokens > model->room ? tokens : model->room, 64);
    wanted = round_up(wanted > model->wanted_room ? wanted : model->wanted_room, 16);
    rows = round_up(rows > model->rows_room ? rows : model->rows_room, 64);
    forget_activations(model);
    model->residual = zeros(tokens * model->residual_stride * 4);
    model->qkv = zeros(tokens * model->qkv_stride * 4);
    model->normed = zeros(tokens * model->normed_stride * item);
    model->queries = zeros(tokens * (size_t)model->spec.heads * model->query_lanes * 4);
    model->attended = zeros(tokens * model->attended_stride * item);
    model->gated = zeros(tokens * model->gated_stride * item);
    model->final = zeros(wanted * model->normed_stride * item);
    model->query_chunks = zeros((rows + 1) * sizeof(size_t));
    if (!model->residual || !model->qkv || !model->normed || !model->queries || !model->attended || !model->gated ||
        !model->final || !model->query_chunks) {
        forget_activations(model);
        return 0;
    }
    model->room = tokens, model->wanted_room = wanted, model->rows_room = rows;
    return 1;
}

/* ---- Weights ---- */

enum place { ATTENTION_NORM, QKV, Q_NORM, K_NORM, OUTPUT, MLP_NORM, GATE_UP, DOWN, FINAL_NORM, HEAD, EMBEDDING };

static float *load_vector(struct model *model, const void *from, size_t count) {
    float *vector = place(model, round_up(count, PANEL) * 4);
    for (size_t i = 0; vector && i < count; i++) vector[i] = get(from, i, (int)model->spec.kind);
    return vector;
}

/* Gate and up, stacked in `from`, are packed side by side: one tile holds 16 of each. */
static int load_linear(struct model *model, struct linear *weight, const void *from, const void *bias, size_t outputs,
                       size_t inputs, int paired) {
    const int kind = (int)model->spec.kind;
    size_t half = outputs / 2;
    weight->inputs = inputs;
    weight->units = lanes_of(kind, inputs);
    weight->outputs = paired ? round_up(half, LANES) * 2 : outputs;
    weight->panels = place(model, panels_bytes(kind, weight->outputs, inputs));
    weight->bias = bias ? place(model, round_up(weight->outputs, PANEL) * 4) : NULL;
    if (!weight->panels || (bias && !weight->bias)) return 0;
    for (size_t output = 0; output < outputs; output++) {
        size_t within = output % half, at = output;
        if (paired) at = within / LANES * PANEL + (output < half ? 0 : LANES) + within % LANES;
        pack_row(weight->panels + at / PANEL * weight->units * PANEL, at % PANEL,
                 (const char *)from + output * inputs * item_bytes(kind), inputs, kind);
        if (bias) weight->bias[at] = get(bias, output, kind);
    }
    return 1;
}

/* Takes in one tensor [outputs, inputs], or [outputs] for a norm; copies it. 0 if it does not fit. */
int baton_load(struct model *model, int64_t layer_index, int64_t where, const void *from, const void *bias,
               int64_t outputs_given, int64_t inputs_given) {
    struct layer *layer = model->layers + layer_index;
    size_t outputs = (size_t)outputs_given, inputs = (size_t)inputs_given;
    switch ((enum place)where) {
    case ATTENTION_NORM: return (layer->attention_norm = load_vector(model, from, outputs)) != NULL;
    case MLP_NORM: return (layer->mlp_norm = load_vector(model, from, outputs)) != NULL;
    case Q_NORM: return (layer->q_norm = load_vector(model, from, outputs)) != NULL;
    case K_NORM: return (layer->k_norm = load_vector(model, from, outputs)) != NULL;
    case FINAL_NORM: return (model->final_norm = load_vector(model, from, outputs)) != NULL;
    case QKV: return load_linear(model, &layer->qkv, from, bias, outputs, inputs, 0);
    case OUTPUT: return load_linear(model, &layer->output, from, bias, outputs, inputs, 0);
    case GATE_UP: return load_linear(model, &layer->gate_up, from, bias, outputs, inputs, 1);
    case DOWN: return load_linear(model, &layer->down, from, bias, outputs, inputs, 0);
    case HEAD: return load_linear(model, &model->head, from, bias, outputs, inputs, 0);
    case EMBEDDING: {
        size_t bytes = outputs * inputs * item_bytes((int)model->spec.kind);
        void *copy = place(model, bytes);
        if (copy) model->embedding = memcpy(copy, from, bytes);
        return copy != NULL;
    }
    }
    return 0;
}

void baton_slide(struct model *model, int64_t layer, int64_t window) { model->layers[layer].window = (size_t)window; }

int64_t baton_bytes(const struct model *model) { return (int64_t)model->arena_used; }

/* ---- Phases ---- */

enum step { NORM_BEFORE_ATTENTION, PROJECT, ROTATE, ATTEND, JOIN, NORM_BEFORE_MLP, GATE, CLOSE, STEPS };

/* What becomes of a product. */
enum fate { WRITE, ADD, GATED };

struct product {
    const struct linear *weight;
    const char *rows;
    size_t row_bytes, count;
    enum fate fate;
    void *result;
    size_t result_stride; /* items */
};

INLINE void norm_row(const float *from, const float *weight, size_t count, float epsilon, void *to, const int kind) {
    floats squares = splat(0.0f);
    for (size_t i = 0; i < count; i += LANES) squares += load(from + i) * load(from + i);
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)count + epsilon);
    for (size_t i = 0; i < count; i += LANES) put(to, i, load(from + i) * scale * load(weight + i), kind);
}

INLINE void embed(struct model *model, size_t token, const int kind) {
    const size_t hidden = (size_t)model->spec.hidden, id = (size_t)model->pass->ids[token];
    float *to = model->residual + token * model->residual_stride;
    if (model->embedding) {
        for (size_t i = 0; i < hidden; i++) to[i] = get(model->embedding, id * hidden + i, kind);
        return;
    }
    const uint32_t *from = panel_at(&model->head, id / PANEL) + id % PANEL;
    if (kind == FLOAT32) {
        for (size_t i = 0; i < hidden; i++) memcpy(to + i, from + i * PANEL, 4);
        return;
    }
    for (size_t i = 0; i < hidden; i++) {
        uint32_t lane = from[i / 2 * PANEL];
        to[i] = widen((bfloat16)(i % 2 ? lane >> 16 : lane));
    }
}

INLINE char *cache_at(const struct model *model, size_t block, size_t layer, size_t which, size_t head, size_t slot,
                      const int kind) {
    const struct spec *spec = &model->spec;
    size_t index = (block * (size_t)spec->layers + layer) * 2 + which;
    index = (index * (size_t)spec->kv_heads + head) * (size_t)model->pass->block_size + slot;
    return (char *)model->pass->cache + index * (size_t)spec->head_dim * item_bytes(kind);
}

/* Norms and rotates one head into `to`, which has room for whole vectors. */
INLINE void rotate_head(float *restrict from, float *restrict to, const float *norm, float epsilon,
                        const float *restrict cosines, const float *restrict sines, size_t dim) {
    if (norm) {
        float squares = 0.0f;
        for (size_t i = 0; i < dim; i++) squares += from[i] * from[i];
        float scale = 1.0f / __builtin_sqrtf(squares / (float)dim + epsilon);
        for (size_t i = 0; i < dim; i++) from[i] = from[i] * scale * norm[i];
    }
    size_t half = dim / 2;
    for (size_t i = 0; i < half; i++) {
        to[i] = from[i] * cosines[i] - from[i + half] * sines[i];
        to[i + half] = from[i + half] * cosines[i] + from[i] * sines[i];
    }
}

/* Rotates a token's queries and keys; writes keys and values to the cache. */
INLINE void rotate(struct model *model, size_t layer_index, size_t token, const int kind) {
    const struct spec *spec = &model->spec;
    const struct layer *layer = model->layers + layer_index;
    const struct pass *pass = model->pass;
    const size_t dim = (size_t)spec->head_dim, heads = (size_t)spec->heads, kv_heads = (size_t)spec->kv_heads;
    const size_t group = heads / kv_heads, bytes = dim * item_bytes(kind);
    const size_t block = (size_t)(pass->slots[token] / pass->block_size), slot = (size_t)(pass->slots[token] % pass->block_size);
    const size_t angle = (size_t)pass->positions[token] * dim / 2;
    const float *cosines = pass->cosines + angle, *sines = pass->sines + angle;
    float *qkv = model->qkv + token * model->qkv_stride, epsilon = (float)spec->epsilon;
    float rotated[MOST_HEAD_DIM + LANES] = {0};
    char packed[(MOST_HEAD_DIM + LANES) * 4];
    for (size_t head = 0; head < heads; head++) {
        rotate_head(qkv + head * dim, rotated, layer->q_norm, epsilon, cosines, sines, dim);
        size_t row = (head / group * (size_t)pass->tokens + token) * group + head % group;
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(rotated + i), kind);
        memcpy(model->queries + row * model->query_lanes * 4, packed, bytes);
    }
    for (size_t head = 0; head < kv_heads; head++) {
        rotate_head(qkv + (heads + head) * dim, rotated, layer->k_norm, epsilon, cosines, sines, dim);
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(rotated + i), kind);
        memcpy(cache_at(model, block, layer_index, 0, head, slot, kind), packed, bytes);
        /* Reads up to LANES beyond the value: the rows of qkv are padded. */
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(qkv + (heads + kv_heads + head) * dim + i), kind);
        memcpy(cache_at(model, block, layer_index, 1, head, slot, kind), packed, bytes);
    }
}

/* Attention chunks: key heads, then rows, then tokens of the row, the last and longest first. */
INLINE void attend_chunk(struct model *model, size_t layer_index, size_t chunk, const int kind) {
    const struct spec *spec = &model->spec;
    const struct pass *pass = model->pass;
    const size_t per_head = model->query_chunks[pass->rows], head = chunk % (size_t)spec->kv_heads;
    const size_t group = (size_t)(spec->heads / spec->kv_heads), dim = (size_t)spec->head_dim;
    size_t within = per_head - 1 - chunk / (size_t)spec->kv_heads, low = 0, high = (size_t)pass->rows;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (model->query_chunks[middle] <= within) low = middle;
        else high = middle;
    }
    const size_t start = (size_t)pass->starts[low], end = (size_t)pass->starts[low + 1];
    const size_t token = start + (within - model->query_chunks[low]) * model->query_tokens;
    const size_t tokens = end - token < model->query_tokens ? end - token : model->query_tokens;
    struct scratch scratch;
    if (dim % PANEL) memset(scratch.values, 0, sizeof scratch.values);
    const struct context context = {
        .keys = cache_at(model, 0, layer_index, 0, head, 0, kind),
        .values = cache_at(model, 0, layer_index, 1, head, 0, kind),
        .block_bytes = (size_t)(cache_at(model, 1, 0, 0, 0, 0, kind) - cache_at(model, 0, 0, 0, 0, 0, kind)),
        .slot_bytes = dim * item_bytes(kind),
        .block_size = (size_t)pass->block_size,
        .blocks = pass->blocks + low * (size_t)pass->width,
    };
    const struct span span = {
        .queries = (const uint32_t *)model->queries + (head * (size_t)pass->tokens + token) * group * model->query_lanes,
        .query_lanes = model->query_lanes,
        .tokens = tokens,
        .group = group,
        .position = (size_t)pass->positions[token],
        .window = model->layers[layer_index].window,
        .dim = dim,
    };
    attend(&scratch, &context, &span, kind);
    char packed[MOST_HEAD_DIM * 4];
    for (size_t row = 0; row < tokens * group; row++) {
        const float *sums = scratch.sums + row * round_up(dim, PANEL);
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(sums + i), kind);
        size_t item = (token + row / group) * model->attended_stride + (head * group + row % group) * dim;
        memcpy(model->attended + item * item_bytes(kind), packed, dim * item_bytes(kind));
    }
}

INLINE void finish_tile(const struct product *product, const float *tile, size_t row, size_t count, size_t panel,
                        const int kind) {
    const struct linear *weight = product->weight;
    const size_t from = panel * PANEL;
    floats left_bias = weight->bias ? load(weight->bias + from) : splat(0.0f);
    floats right_bias = weight->bias ? load(weight->bias + from + LANES) : splat(0.0f);
    for (size_t i = 0; i < count; i++) {
        floats left = load(tile + i * PANEL) + left_bias, right = load(tile + i * PANEL + LANES) + right_bias;
        if (product->fate == GATED) {
            put(product->result, (row + i) * product->result_stride + panel * LANES, silu(left) * right, kind);
            continue;
        }
        float *to = (float *)product->result + (row + i) * product->result_stride + from;
        if (product->fate == ADD) left += load(to), right += load(to + LANES);
        if (from + PANEL <= weight->outputs) {
            store(to, left), store(to + LANES, right);
        } else {
            float rest[PANEL];
            store(rest, left), store(rest + LANES, right);
            memcpy(to, rest, (weight->outputs - from) * 4);
        }
    }
}

/* How a product is cut: blocks of rows, and in each runs of panels. */
struct cut {
    size_t rows, row_blocks, panels;
    size_t runs;   /* of a block of rows */
    size_t shares; /* a run takes this part of the panels that are left: long runs first, short ones to end on */
};

static size_t run_length(size_t left, size_t shares) { return (left + shares - 1) / shares; }

static struct cut cut_product(const struct model *model, const struct product *product) {
    const size_t threads = (size_t)model->pool->threads;
    struct cut cut = {.panels = panel_count(product->weight), .shares = threads == 1 ? 1 : RUNS_PER_THREAD * threads};
    cut.row_blocks = (product->count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    cut.rows = round_up((product->count + cut.row_blocks - 1) / cut.row_blocks, TILE_ROWS);
    /* Many threads and few panels: shorter blocks of rows, down to two tiles. */
    while (threads > 1 && cut.row_blocks * cut.panels < threads * CHUNKS_PER_THREAD && cut.rows > 2 * TILE_ROWS) {
        cut.rows = round_up(cut.rows / 2, TILE_ROWS);
        cut.row_blocks = (product->count + cut.rows - 1) / cut.rows;
    }
    cut.row_blocks = (product->count + cut.rows - 1) / cut.rows;
    for (size_t left = cut.panels; left; left -= run_length(left, cut.shares)) cut.runs++;
    return cut;
}

INLINE void multiply_chunk(const struct model *model, const struct product *product, size_t chunk, const int kind) {
    const struct cut cut = cut_product(model, product);
    const struct linear *weight = product->weight;
    const size_t first_row = chunk / cut.runs * cut.rows;
    const size_t rows_end = first_row + cut.rows < product->count ? first_row + cut.rows : product->count;
    size_t left = cut.panels;
    for (size_t run = 0; run < chunk % cut.runs; run++) left -= run_length(left, cut.shares);
    const size_t first_panel = cut.panels - left, panels_end = first_panel + run_length(left, cut.shares);
    _Alignas(64) float tile[TILE_ROWS * PANEL];
    for (size_t panel = first_panel; panel < panels_end; panel++)
        for (size_t row = first_row; row < rows_end; row += TILE_ROWS) {
            size_t count = rows_end - row < TILE_ROWS ? rows_end - row : TILE_ROWS;
            multiply(count, (const uint32_t *)(product->rows + row * product->row_bytes), product->row_bytes / 4,
                     panel_at(weight, panel), weight->units, tile, PANEL, 0, kind);
            finish_tile(product, tile, row, count, panel, kind);
        }
}

/* The product that a phase computes, if it is one. */
static struct product product_of(const struct model *model, const struct layer *layer, size_t step) {
    const size_t item = item_bytes((int)model->spec.kind), tokens = (size_t)model->pass->tokens;
    switch (step) {
    case PROJECT:
        return (struct product){&layer->qkv, model->normed, model->normed_stride * item, tokens, WRITE, model->qkv, model->qkv_stride};
    case JOIN:
        return (struct product){&layer->output, model->attended, model->attended_stride * item, tokens, ADD, model->residual, model->residual_stride};
    case GATE:
        return (struct product){&layer->gate_up, model->normed, model->normed_stride * item, tokens, GATED, model->gated, model->gated_stride};
    case CLOSE:
        return (struct product){&layer->down, model->gated, model->gated_stride * item, tokens, ADD, model->residual, model->residual_stride};
    default: /* the head */
        return (struct product){&model->head, model->final, model->normed_stride * item, (size_t)model->pass->wanted, WRITE,
                                model->pass->logits, (size_t)model->spec.vocab};
    }
}

/* Phase 0 is the embedding; then STEPS for each layer; then the final norm and the head. */
static size_t phase_count(const struct model *model) {
    return 1 + (size_t)model->spec.layers * STEPS + (model->pass->wanted ? 2 : 0);
}

static int is_final(const struct model *model, size_t phase) { return phase > (size_t)model->spec.layers * STEPS; }

static size_t chunks_of_product(const struct model *model, const struct product product) {
    struct cut cut = cut_product(model, &product);
    return cut.row_blocks * cut.runs;
}

static size_t chunks_in(void *self, size_t phase) {
    const struct model *model = self;
    const size_t by_rows = ((size_t)model->pass->tokens + NORM_ROWS - 1) / NORM_ROWS;
    if (phase == 0) return by_rows;
    if (is_final(model, phase)) {
        if (phase + 2 == phase_count(model)) return ((size_t)model->pass->wanted + NORM_ROWS - 1) / NORM_ROWS;
        return chunks_of_product(model, product_of(model, NULL, STEPS));
    }
    const size_t step = (phase - 1) % STEPS;
    switch (step) {
    case NORM_BEFORE_ATTENTION:
    case NORM_BEFORE_MLP:
    case ROTATE: return by_rows;
    case ATTEND: return model->query_chunks[model->pass->rows] * (size_t)model->spec.kv_heads;
    default: return chunks_of_product(model, product_of(model, model->layers + (phase - 1) / STEPS, step));
    }
}

INLINE void run_chunk(struct model *model, size_t phase, size_t chunk, const int kind) {
    const size_t hidden = (size_t)model->spec.hidden, tokens = (size_t)model->pass->tokens;
    const size_t from = chunk * NORM_ROWS, item = item_bytes(kind);
    const size_t to = from + NORM_ROWS < tokens ? from + NORM_ROWS : tokens;
    const float epsilon = (float)model->spec.epsilon;
    if (phase == 0) {
        for (size_t token = from; token < to; token++) embed(model, token, kind);
        return;
    }
    if (is_final(model, phase)) {
        if (phase + 2 == phase_count(model)) {
            const size_t wanted = (size_t)model->pass->wanted, end = from + NORM_ROWS < wanted ? from + NORM_ROWS : wanted;
            for (size_t i = from; i < end; i++)
                norm_row(model->residual + (size_t)model->pass->logits_at[i] * model->residual_stride, model->final_norm,
                         hidden, epsilon, model->final + i * model->normed_stride * item, kind);
            return;
        }
        const struct product product = product_of(model, NULL, STEPS);
        multiply_chunk(model, &product, chunk, kind);
        return;
    }
    const size_t layer_index = (phase - 1) / STEPS, step = (phase - 1) % STEPS;
    const struct layer *layer = model->layers + layer_index;
    switch (step) {
    case NORM_BEFORE_ATTENTION:
    case NORM_BEFORE_MLP:
        for (size_t token = from; token < to; token++)
            norm_row(model->residual + token * model->residual_stride,
                     step == NORM_BEFORE_MLP ? layer->mlp_norm : layer->attention_norm, hidden, epsilon,
                     model->normed + token * model->normed_stride * item, kind);
        return;
    case ROTATE:
        for (size_t token = from; token < to; token++) rotate(model, layer_index, token, kind);
        return;
    case ATTEND: attend_chunk(model, layer_index, chunk, kind); return;
    default: {
        const struct product product = product_of(model, layer, step);
        multiply_chunk(model, &product, chunk, kind);
    }
    }
}

static void run_float(void *self, size_t phase, size_t chunk) { run_chunk(self, phase, chunk, FLOAT32); }
static void run_bfloat(void *self, size_t phase, size_t chunk) { run_chunk(self, phase, chunk, BFLOAT16); }

static int is_sound(const struct model *model, const struct pass *pass) {
    for (int64_t token = 0; token < pass->tokens; token++) {
        if (pass->ids[token] < 0 || pass->ids[token] >= model->spec.vocab) return 0;
        if (pass->slots[token] < 0 || pass->slots[token] >= pass->cache_slots) return 0;
    }
    for (int64_t i = 0; i < pass->rows * pass->width; i++)
        if (pass->blocks[i] < 0 || pass->blocks[i] >= pass->cache_slots / pass->block_size) return 0;
    return 1;
}

enum result { DONE, NO_MEMORY, OUT_OF_RANGE };

/* Runs one pass; one at a time for a model. */
int baton_forward(struct model *model, const struct pass *pass) {
    if (!is_sound(model, pass)) return OUT_OF_RANGE;
    if (!make_room(model, (size_t)pass->tokens, (size_t)pass->wanted, (size_t)pass->rows)) return NO_MEMORY;
    model->pass = pass;
    model->query_chunks[0] = 0;
    for (int64_t row = 0; row < pass->rows; row++) {
        size_t tokens = (size_t)(pass->starts[row + 1] - pass->starts[row]);
        model->query_chunks[row + 1] = model->query_chunks[row] + (tokens + model->query_tokens - 1) / model->query_tokens;
    }
    struct job job = {
        .self = model,
        .phases = phase_count(model),
        .chunks = chunks_in,
        .run = model->spec.kind == BFLOAT16 ? run_bfloat : run_float,
    };
    pool_run(model->pool, &job);
    model->pass = NULL;
    return DONE;
}
