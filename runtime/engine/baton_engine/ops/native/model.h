/*
 * Memory layout of a model: packed weights in one arena of huge pages, and buffers for activations.
 *
 * Rows of activations are padded with zeros to whole vectors, so that the kernels need no special case at the end
 * of a row. The padding is never overwritten.
 */
#ifndef BATON_MODEL_H
#define BATON_MODEL_H

#include <stdlib.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "pool.h"
#include "quantized.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Products of 1 row, of a few, of some and of many may be computed in different ways: see products.h. */
#define ROW_CLASSES 4

/* Dimensions of the model; same order as in native_decoder.py. */
struct spec {
    int64_t kind, threads, vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, tied;
    int64_t nodes; /* mask of the NUMA nodes of the threads; 0 if unknown */
    int64_t rotated; /* dimensions of a head that are rotated, the first ones */
    int64_t gelu, joint_norm, post_norm; /* flags: GELU gates, one norm of all heads, norms of outputs */
    /* Experts; 0: none. expert_layers: number of layers that have them. Flags: sigmoid scores, normalized weights. */
    int64_t experts, chosen, expert_intermediate, expert_layers, sigmoid, normalized;
    /* Threads for cores that other workers lend, the address of the workers' seats, their number, and the own seat. */
    int64_t spare, seats, seat_count, seat;
    int64_t ways[ROW_CLASSES], octet_ways[ROW_CLASSES]; /* of products of bfloat16, and of 8 bits, by their rows */
    double epsilon, embedding_scale, residual_scale, logit_scale, logit_cap, score_scale, score_cap, expert_scale; /* cap 0: none */
    double rest; /* between two steps, while other workers compute, per time of the steps */
};

struct adapter; /* lora.h */

#define WIDE_UNITS 128 /* units of a panel that are widened at once: 32 KB, as much as the nearest cache has */
#define WIDE_PANELS 8  /* panels that are multiplied with the same slice of widened rows */
#define ROWS_AT_ONCE (256 / TILE_ROWS * TILE_ROWS) /* maximum rows per chunk of a linear */
#define WIDE_NUMBERS (ROWS_AT_ONCE * 2 * WIDE_UNITS) /* of the rows: 256 KB */

/* Memory of one thread for widened products. */
struct widened {
    _Alignas(64) uint32_t panel[2 * WIDE_UNITS * PANEL];
    uint32_t rows[WIDE_NUMBERS];
    float results[WIDE_PANELS][ROWS_AT_ONCE * PANEL];
};

/* Memory of one thread: of the chunk that it runs. */
struct scratch {
    union {
        struct attention attention;
        struct widened widened;
    };
};

/* Addresses and formats of quantized panels. They are not in the arena, which a file may replace (stored.h). */
struct table {
    struct table *next;
    _Alignas(64) char content[];
};

/* Input and output of one pass; same order as in native_decoder.py. */
struct pass {
    int64_t tokens, rows, wanted;      /* T, R, S */
    const int64_t *ids;                /* [T] */
    const int64_t *positions;          /* [T] */
    const int64_t *slots;              /* [T] */
    const int64_t *starts;             /* [R + 1] */
    const int32_t *blocks;             /* [R, width] */
    int64_t width;
    const int64_t *wanted_at;          /* [S] */
    const float *cosines, *sines;      /* [position, rotated / 2], for all positions of the pass */
    const float *sliding_cosines, *sliding_sines; /* the same, of layers with the rotation SLIDING */
    void *cache;                       /* [block, layer, 2, kv_head, slot, dim] */
    int64_t cache_slots, block_size;   /* cache_slots: blocks * block_size */
    float *logits;                     /* [S, vocab], or NULL if only the states are needed */
    float *states;                     /* [S, states_stride] after the final norm, or NULL */
    int64_t states_stride;             /* hidden, padded to whole vectors */
    const struct adapter *const *adapters; /* [R], NULL for rows of the base model; NULL: no row has one */
};

enum rotation { UNROTATED, FULL, SLIDING };

#define MOST_EXPERTS 1024

/* The experts of a layer. */
struct experts {
    float *router; /* [experts][residual_stride]; NULL: a dense layer */
    struct linear *gate_up, *down; /* [experts] */
};

/*
 * Choices of experts in a pass, of `token_capacity` rows, and the rows sorted by expert. An expert has the sorted rows
 * from starts[expert] to starts[expert + 1], and the chunks of its products from gate_chunks[expert] and
 * down_chunks[expert] on.
 */
struct expert_rows {
    int32_t *choices; /* [rows][chosen] */
    float *shares;    /* [rows][chosen] weights of the choices */
    int64_t *places, *sources; /* sorted row of a choice, and row of a sorted row */
    int64_t *starts, *next, *gate_chunks, *down_chunks; /* [experts + 1] */
    /* Sorted inputs of a product: rows of `normed`, or rows of rounded blocks if its weights are quantized. */
    char *inputs;
    char *gated;    /* sorted gated states in rows of gated_stride */
    float *results;         /* sorted rows in rows of residual_stride */
    size_t gated_stride;
};

struct layer {
    /* NULL: no such norm. A post norm is applied to the output of attention or MLP. */
    float *attention_norm, *mlp_norm, *q_norm, *k_norm, *attention_post_norm, *mlp_post_norm;
    struct linear qkv, output, gate_up, down;
    struct experts experts;
    size_t window; /* visible keys per token; 0: all */
    enum rotation rotation;
};

struct model {
    struct spec spec;
    struct pool *pool;
    struct scratch *scratches; /* one per thread of the pool */
    char *arena; /* aligned to huge pages */
    size_t arena_bytes, arena_used;
    struct table *tables;
    struct layer *layers;
    float *final_norm;
    struct linear head;
    const void *embedding; /* [vocab, hidden]; NULL if tied to the head, or quantized */
    struct linear embedding_rows; /* a quantized embedding of its own */
    /* Activations, in rows of `stride` items, for `token_capacity` tokens and `wanted_capacity` rows of logits. */
    size_t token_capacity, wanted_capacity;
    size_t residual_stride, normed_stride, qkv_stride, query_lanes, attended_stride, gated_stride;
    float *residual, *qkv, *chosen; /* chosen: residual of the tokens whose logits are needed */
    float *joined; /* outputs of attention or MLP before their post norm; NULL without post norms */
    char *normed, *queries, *attended, *gated, *final;
    struct expert_rows expert_rows;
    /* Inputs of quantized products: the rows of normed, attended, gated or final, rounded to 8 bits. */
    struct rounded *rounded;
    /* Blocks per row of `rounded`, and of the sorted rows of experts; 0 if no such weight is quantized. */
    size_t rounded_stride, expert_blocks;
    const struct pass *pass;
    size_t query_tokens;  /* tokens per chunk of attention in this pass */
    int64_t *query_chunks; /* [rows + 1] number of attention chunks before row r, per key head */
    size_t row_capacity;
    /* Of the adapters of a pass: by token and by wanted token, and the rows' products with A. */
    const struct adapter **token_adapters, **wanted_adapters;
    float *shrunk;
    size_t adapted_tokens, adapted_wanted, shrunk_stride, shrunk_capacity;
};

/* ---- Memory ---- */

/* The stride of rows is an odd number of cache lines: with a power of two, rows would share cache sets. */
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

static void *add_table(struct model *model, size_t bytes) {
    struct table *table = zeros(sizeof *table + bytes);
    if (!table) return NULL;
    table->next = model->tables;
    model->tables = table;
    return table->content;
}

static size_t panels_bytes(int kind, size_t outputs, size_t inputs) {
    return round_up(outputs, PANEL) * units_of(kind, inputs) * 4;
}

static size_t weights_bytes(const struct spec *spec) {
    const size_t hidden = (size_t)spec->hidden, inner = (size_t)spec->intermediate, dim = (size_t)spec->head_dim;
    const size_t heads = (size_t)spec->heads, qkv = (heads + 2 * (size_t)spec->kv_heads) * dim;
    const int kind = (int)spec->kind;
    const size_t expert_inner = (size_t)spec->expert_intermediate, expert_layers = (size_t)spec->expert_layers;
    size_t attention = panels_bytes(kind, qkv, hidden) + panels_bytes(kind, hidden, heads * dim);
    size_t mlp = panels_bytes(kind, round_up(inner, LANES) * 2, hidden) + panels_bytes(kind, hidden, inner);
    size_t expert = panels_bytes(kind, round_up(expert_inner, LANES) * 2, hidden) + panels_bytes(kind, hidden, expert_inner) +
                    4 * stride_of(FLOAT32, hidden) + 2 * 64;
    size_t vectors = 4 * (2 * round_up(qkv, PANEL) + 6 * round_up(hidden, PANEL) + 2 * round_up(inner, LANES) +
                          2 * round_up(dim, PANEL) + 16 * PANEL);
    return (size_t)spec->layers * (attention + vectors) + ((size_t)spec->layers - expert_layers) * mlp +
           expert_layers * ((size_t)spec->experts * expert + 64) + panels_bytes(kind, (size_t)spec->vocab, hidden) +
           (spec->tied ? 0 : (size_t)(spec->vocab * spec->hidden) * item_bytes(kind)) + 4 * round_up(hidden, PANEL) + HUGE_PAGE;
}

/*
 * Interleaves the pages of `at` over several NUMA nodes. Otherwise all pages are on the node of the thread that loads
 * the weights, and threads of other nodes read through one link. If the kernel refuses, the pages stay there.
 */
static void spread_over_nodes(void *at, size_t bytes, unsigned long nodes) {
#if defined(SYS_mbind)
    enum { INTERLEAVE = 3 };
    if (nodes & (nodes - 1)) syscall(SYS_mbind, at, bytes, INTERLEAVE, &nodes, 8 * sizeof nodes + 1, 0);
#else
    (void)at, (void)bytes, (void)nodes;
#endif
}

/*
 * Makes the arena anonymous memory, at its address if it has one. Returns 0 if memory is exhausted. It has the size of
 * weights that are not quantized. Quantized ones write a part of it, so the system need not have memory for all of it.
 */
static int reserve_arena(struct model *model) {
    char *at = model->arena;
    const int fixed = at ? MAP_FIXED : 0;
    const size_t spare = at ? 0 : HUGE_PAGE;
    at = mmap(at, model->arena_bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    if (at == MAP_FAILED) return 0;
    if (spare) {
        const size_t before = round_up((size_t)at, HUGE_PAGE) - (size_t)at;
        if (before) munmap(at, before);
        if (spare - before) munmap(at + before + model->arena_bytes, spare - before);
        model->arena = at + before;
    }
    spread_over_nodes(model->arena, model->arena_bytes, (unsigned long)model->spec.nodes);
#if defined(MADV_HUGEPAGE)
    madvise(model->arena, model->arena_bytes, MADV_HUGEPAGE);
#endif
    return 1;
}

void baton_destroy(struct model *model);

/* Returns NULL if memory is exhausted. */
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
    model->arena_bytes = round_up(weights_bytes(spec), HUGE_PAGE);
    reserve_arena(model);
    model->layers = calloc((size_t)spec->layers, sizeof(struct layer));
    const struct lending lending = {
        .seats = (struct seat *)(intptr_t)spec->seats,
        .count = spec->seat_count,
        .own = spec->seat,
        .cores = spec->threads + spec->spare,
        .rest = spec->rest,
    };
    model->pool = pool_create((int)spec->threads, (int)spec->spare, lending);
    if (model->pool) model->scratches = zeros((size_t)model->pool->threads * sizeof(struct scratch));
    if (model->arena && model->layers && model->scratches) return model;
    baton_destroy(model);
    return NULL;
}

static void forget_expert_rows(struct expert_rows *rows) {
    free(rows->choices), free(rows->shares), free(rows->places), free(rows->sources), free(rows->starts), free(rows->next);
    free(rows->gate_chunks), free(rows->down_chunks), free(rows->inputs), free(rows->gated), free(rows->results);
    memset(rows, 0, sizeof *rows);
}

/* Allocates the rows of experts for `tokens` tokens; returns 0 if memory is exhausted. */
static int reserve_expert_rows(struct model *model, size_t tokens) {
    struct expert_rows *rows = &model->expert_rows;
    const size_t experts = (size_t)model->spec.experts, choices = tokens * (size_t)model->spec.chosen;
    const size_t item = item_bytes((int)model->spec.kind), read = choices + TILE_ROWS;
    const size_t plain = model->normed_stride * item, rounded = model->expert_blocks * sizeof(struct rounded);
    if (!experts) return 1;
    rows->gated_stride = stride_of((int)model->spec.kind, (size_t)model->spec.expert_intermediate);
    rows->choices = zeros(choices * sizeof(int32_t)), rows->shares = zeros(choices * sizeof(float));
    rows->places = zeros(choices * sizeof(int64_t)), rows->sources = zeros(choices * sizeof(int64_t));
    rows->starts = zeros((experts + 1) * sizeof(int64_t)), rows->next = zeros((experts + 1) * sizeof(int64_t));
    rows->gate_chunks = zeros((experts + 1) * sizeof(int64_t)), rows->down_chunks = zeros((experts + 1) * sizeof(int64_t));
    rows->inputs = zeros(read * (plain > rounded ? plain : rounded));
    rows->gated = zeros(read * rows->gated_stride * (model->expert_blocks ? 4 : item));
    rows->results = zeros(choices * model->residual_stride * 4);
    return rows->choices && rows->shares && rows->places && rows->sources && rows->starts && rows->next &&
           rows->gate_chunks && rows->down_chunks && rows->inputs && rows->gated && rows->results;
}

static void forget_activations(struct model *model) {
    forget_expert_rows(&model->expert_rows);
    free(model->residual), free(model->qkv), free(model->chosen), free(model->normed), free(model->queries);
    free(model->attended), free(model->gated), free(model->final), free(model->query_chunks), free(model->joined);
    free(model->rounded);
    model->rounded = NULL;
    model->residual = model->qkv = model->chosen = model->joined = NULL;
    model->normed = model->queries = model->attended = model->gated = model->final = NULL;
    model->query_chunks = NULL;
    model->token_capacity = model->wanted_capacity = model->row_capacity = 0;
}

void baton_destroy(struct model *model) {
    if (model->pool) pool_destroy(model->pool);
    forget_activations(model);
    free(model->scratches);
    free(model->token_adapters), free(model->wanted_adapters), free(model->shrunk);
    if (model->arena) munmap(model->arena, model->arena_bytes);
    for (struct table *table = model->tables, *next; table; table = next) next = table->next, free(table);
    for (int64_t layer = 0; model->layers && layer < model->spec.layers; layer++)
        free(model->layers[layer].experts.gate_up), free(model->layers[layer].experts.down);
    free(model->layers);
    free(model);
}

/* Allocates the activations of a pass; returns 0 if memory is exhausted. The padding of rows is zero. */
static int reserve_activations(struct model *model, size_t tokens, size_t wanted, size_t rows) {
    if (tokens <= model->token_capacity && wanted <= model->wanted_capacity && rows <= model->row_capacity) return 1;
    /* The inputs of quantized products are float32 before they are rounded. */
    const size_t item = model->rounded_stride ? 4 : item_bytes((int)model->spec.kind);
    tokens = round_up(tokens > model->token_capacity ? tokens : model->token_capacity, 64);
    wanted = round_up(wanted > model->wanted_capacity ? wanted : model->wanted_capacity, 64);
    rows = round_up(rows > model->row_capacity ? rows : model->row_capacity, 64);
    forget_activations(model);
    model->residual = zeros(tokens * model->residual_stride * 4);
    model->qkv = zeros(tokens * model->qkv_stride * 4);
    model->normed = zeros(tokens * model->normed_stride * item);
    model->queries = zeros((tokens * (size_t)model->spec.heads + TILE_ROWS) * model->query_lanes * 4);
    model->attended = zeros(tokens * model->attended_stride * item);
    model->gated = zeros(tokens * model->gated_stride * item);
    model->chosen = zeros(wanted * model->residual_stride * 4);
    model->final = zeros(wanted * model->normed_stride * item);
    model->query_chunks = zeros((rows + 1) * sizeof(int64_t));
    if (model->spec.post_norm) model->joined = zeros(tokens * model->residual_stride * 4);
    model->rounded = zeros((tokens > wanted ? tokens : wanted) * model->rounded_stride * sizeof(struct rounded) + 64);
    if (!model->residual || !model->qkv || !model->chosen || !model->normed || !model->queries || !model->attended || !model->gated ||
        !model->final || !model->query_chunks || !model->rounded || !reserve_expert_rows(model, tokens) ||
        (model->spec.post_norm && !model->joined)) {
        forget_activations(model);
        return 0;
    }
    model->token_capacity = tokens, model->wanted_capacity = wanted, model->row_capacity = rows;
    return 1;
}

/* ---- Weights ---- */

enum place {
    ATTENTION_NORM, QKV, Q_NORM, K_NORM, OUTPUT, ATTENTION_POST_NORM, MLP_NORM, GATE_UP, DOWN, MLP_POST_NORM, FINAL_NORM, HEAD,
    EMBEDDING
};

/*
 * Without an address to copy from (NULL), the functions below only reserve the space, for weights that are stored in
 * packed form (stored.h).
 */

/* Copies a norm's weights, which are float32 for any kind. */
static float *load_vector(struct model *model, const void *from, size_t count) {
    float *vector = place(model, round_up(count, PANEL) * 4);
    return vector && from ? memcpy(vector, from, count * 4) : vector;
}

/* Returns where an output is packed. Gate and up are stacked, but packed side by side: one tile has a vector of each. */
static size_t packed_at(size_t output, size_t outputs, int paired) {
    const size_t half = outputs / 2, upper = output >= half, within = upper ? output - half : output;
    return paired ? within / LANES * PANEL + upper * LANES + within % LANES : output;
}

static size_t packed_outputs(size_t outputs, int paired) { return paired ? round_up(outputs / 2, LANES) * 2 : outputs; }

/* Rows of a tensor as stored in GGUF, or in format 0 those of the weights' kind; same order as in native_weights.py. */
struct part {
    int64_t format, outputs;
    const uint8_t *rows;
};

/* A weight [outputs, inputs] to pack, as a job of the pool: numbers in `from`, or stacked quantized parts. */
struct packing {
    struct linear *weight;
    const char *from;
    const struct part *parts; /* of all outputs; NULL if `from` is set */
    const void *bias;         /* [outputs], or NULL */
    size_t outputs;
    int paired, kind;
    size_t rows; /* outputs per chunk */
};

/* Weights with fewer numbers are packed by the caller alone: to wake other threads and to wait for them takes longer. */
#ifndef SHARED_PACKING
#define SHARED_PACKING ((size_t)1 << 22)
#endif

static size_t packing_chunks(void *self, size_t phase) {
    (void)phase;
    const struct packing *job = self;
    return (job->outputs + job->rows - 1) / job->rows;
}

/* Packs some outputs. Several chunks may write to one panel, but to different lanes. */
static void pack_chunk(void *self, size_t phase, size_t chunk, size_t thread) {
    (void)phase, (void)thread;
    const struct packing *job = self;
    struct linear *weight = job->weight;
    const struct part *part = job->parts;
    const size_t inputs = weight->inputs, end = (chunk + 1) * job->rows;
    size_t first = 0; /* output of the part */
    for (size_t output = chunk * job->rows; output < (end < job->outputs ? end : job->outputs); output++) {
        const size_t at = packed_at(output, job->outputs, job->paired), panel = at / PANEL, lane = at % PANEL;
        if (job->bias) weight->bias[at] = get(job->bias, output, job->kind);
        if (!part) {
            pack_row(weight->panels + panel * weight->units * PANEL, lane,
                     job->from + output * inputs * item_bytes(job->kind), inputs, job->kind);
            continue;
        }
        for (; output - first >= (size_t)part->outputs; part++) first += (size_t)part->outputs;
        const struct layout layout = layout_of((enum format)part->format);
        const size_t row_bytes = inputs / (layout.stored_blocks * BLOCK) * layout.stored;
        pack_quantized_row(weight->quantized[panel], lane, part->rows + (output - first) * row_bytes, inputs,
                           (enum format)part->format);
    }
}

static void pack(struct model *model, struct packing packing) {
    const struct job job = {&packing, 1, packing_chunks, pack_chunk, 0};
    const int shared = packing.outputs * packing.weight->inputs >= SHARED_PACKING;
    packing.rows = shared ? PANEL : packing.outputs;
    if (shared) pool_run(model->pool, &job);
    else pack_chunk(&packing, 0, 0, 0);
}

/* Reserves the space of a weight of the model's kind. Returns 0 if it does not fit. */
static int place_linear(struct model *model, struct linear *weight, size_t outputs, size_t inputs, int paired, int biased) {
    const int kind = (int)model->spec.kind;
    weight->inputs = inputs;
    weight->units = units_of(kind, inputs);
    weight->outputs = packed_outputs(outputs, paired);
    weight->panels = place(model, panels_bytes(kind, weight->outputs, inputs));
    weight->bias = biased ? place(model, round_up(weight->outputs, PANEL) * 4) : NULL;
    return weight->panels && (!biased || weight->bias);
}

static int load_linear(struct model *model, struct linear *weight, const void *from, const void *bias, size_t outputs,
                       size_t inputs, int paired) {
    if (!place_linear(model, weight, outputs, inputs, paired, bias != NULL)) return 0;
    if (from) pack(model, (struct packing){weight, from, NULL, bias, outputs, paired, (int)model->spec.kind, 0});
    return 1;
}

/* Copies one tensor [outputs, inputs], or [outputs] for a norm. Returns 0 if its shape does not match. */
int baton_load(struct model *model, int64_t layer_index, int64_t where, const void *from, const void *bias,
               int64_t outputs_given, int64_t inputs_given) {
    struct layer *layer = model->layers + layer_index;
    size_t outputs = (size_t)outputs_given, inputs = (size_t)inputs_given;
    switch ((enum place)where) {
    case ATTENTION_NORM: return (layer->attention_norm = load_vector(model, from, outputs)) != NULL;
    case ATTENTION_POST_NORM: return (layer->attention_post_norm = load_vector(model, from, outputs)) != NULL;
    case MLP_POST_NORM: return (layer->mlp_post_norm = load_vector(model, from, outputs)) != NULL;
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
        if (copy && from) memcpy(copy, from, bytes);
        return (model->embedding = copy) != NULL;
    }
    }
    return 0;
}

/* Copies a router [experts, hidden] of float32, and prepares the layer's experts. Returns 0 if it does not fit. */
int baton_load_router(struct model *model, int64_t layer_index, const float *from) {
    const size_t experts = (size_t)model->spec.experts, hidden = (size_t)model->spec.hidden;
    struct experts *layer = &model->layers[layer_index].experts;
    layer->router = place(model, experts * model->residual_stride * 4);
    layer->gate_up = calloc(experts, sizeof(struct linear)), layer->down = calloc(experts, sizeof(struct linear));
    if (!layer->router || !layer->gate_up || !layer->down) return 0;
    for (size_t expert = 0; from && expert < experts; expert++)
        memcpy(layer->router + expert * model->residual_stride, from + expert * hidden, hidden * 4);
    return 1;
}

/*
 * Reserves the space of a quantized weight. Returns 0 if the parts do not add up to the outputs, if two formats would
 * share a panel, if a format does not suit the number of inputs, or if memory is exhausted.
 */
static int place_quantized(struct model *model, struct linear *weight, const struct part *parts, size_t count,
                           size_t outputs, size_t inputs, int paired, int biased) {
    weight->inputs = inputs;
    weight->outputs = packed_outputs(outputs, paired);
    weight->bias = biased ? place(model, round_up(weight->outputs, PANEL) * 4) : NULL;
    if (biased && !weight->bias) return 0;
    weight->quantized = add_table(model, panel_count(weight) * sizeof(char *));
    weight->formats = add_table(model, panel_count(weight));
    if (!weight->quantized || !weight->formats) return 0;
    size_t output = 0, given = 0;
    for (size_t nth = 0; nth < count; nth++) given += (size_t)parts[nth].outputs;
    if (given != outputs) return 0;
    for (const struct part *part = parts; part < parts + count; part++)
        for (size_t row = 0; row < (size_t)part->outputs; row++) {
            uint8_t *format = weight->formats + packed_at(output++, outputs, paired) / PANEL;
            if (*format && *format != part->format) return 0;
            *format = (uint8_t)part->format;
        }
    for (size_t panel = 0; panel < panel_count(weight); panel++) {
        const size_t bytes = quantized_panel_bytes((enum format)weight->formats[panel], weight->inputs);
        weight->quantized[panel] = bytes ? place(model, bytes) : NULL;
        if (!weight->quantized[panel]) return 0;
    }
    return 1;
}

static int load_quantized(struct model *model, struct linear *weight, const struct part *parts, size_t count,
                          const void *bias, size_t inputs, int paired) {
    size_t outputs = 0;
    for (size_t nth = 0; nth < count; nth++) outputs += (size_t)parts[nth].outputs;
    if (!place_quantized(model, weight, parts, count, outputs, inputs, paired, bias != NULL)) return 0;
    if (parts->rows) pack(model, (struct packing){weight, NULL, parts, bias, outputs, paired, (int)model->spec.kind, 0});
    if (model->rounded_stride < inputs / BLOCK) model->rounded_stride = inputs / BLOCK;
    return 1;
}

/* Copies a quantized tensor of `count` stacked parts. Returns 0 if it does not fit. */
int baton_load_quantized(struct model *model, int64_t layer_index, int64_t where, const struct part *parts, int64_t count,
                         const void *bias, int64_t inputs) {
    struct layer *layer = model->layers + layer_index;
    const size_t given = (size_t)count, wide = (size_t)inputs;
    switch ((enum place)where) {
    case QKV: return load_quantized(model, &layer->qkv, parts, given, bias, wide, 0);
    case OUTPUT: return load_quantized(model, &layer->output, parts, given, bias, wide, 0);
    case GATE_UP: return load_quantized(model, &layer->gate_up, parts, given, bias, wide, 1);
    case DOWN: return load_quantized(model, &layer->down, parts, given, bias, wide, 0);
    case HEAD: return load_quantized(model, &model->head, parts, given, bias, wide, 0);
    case EMBEDDING: return load_quantized(model, &model->embedding_rows, parts, given, bias, wide, 0);
    default: return 0;
    }
}

/* Weights of experts to pack, as a job of the pool: each one by one thread. */
struct expert_packing {
    struct packing *all;
    size_t count;
};

static size_t packed_experts(void *self, size_t phase) {
    (void)phase;
    return ((const struct expert_packing *)self)->count;
}

static void pack_expert(void *self, size_t phase, size_t chunk, size_t thread) {
    pack_chunk(((const struct expert_packing *)self)->all + chunk, phase, 0, thread);
}

static int load_experts(struct model *model, struct packing *all, struct linear *weights, const struct part *parts,
                        size_t count, size_t outputs, size_t inputs, int paired) {
    const size_t experts = (size_t)model->spec.experts;
    for (size_t expert = 0; expert < experts; expert++, parts += count) {
        struct linear *weight = weights + expert;
        const int quantized = parts->format != 0;
        if (!(quantized ? place_quantized(model, weight, parts, count, outputs, inputs, paired, 0)
                        : place_linear(model, weight, outputs, inputs, paired, 0)))
            return 0;
        all[expert] = (struct packing){.weight = weight, .from = (const char *)parts->rows, .parts = quantized ? parts : NULL,
                                       .outputs = outputs, .paired = paired, .kind = (int)model->spec.kind, .rows = outputs};
    }
    struct expert_packing packing = {all, all->from ? experts : 0};
    const struct job job = {&packing, 1, packed_experts, pack_expert, 0};
    /* The pool runs a chunk of a phase that has none. */
    if (packing.count && experts * outputs * inputs >= SHARED_PACKING) pool_run(model->pool, &job);
    else
        for (size_t expert = 0; expert < packing.count; expert++) pack_expert(&packing, 0, expert, 0);
    if (weights->quantized && model->expert_blocks < inputs / BLOCK) model->expert_blocks = inputs / BLOCK;
    return 1;
}

/*
 * Copies a matrix of all experts of a layer: gate and up [2 * expert_intermediate, hidden], or down [hidden,
 * expert_intermediate]. That of each expert is `count` stacked parts, one in format 0. Returns 0 if it does not fit.
 */
int baton_load_experts(struct model *model, int64_t layer_index, int64_t where, const struct part *parts, int64_t count) {
    const size_t hidden = (size_t)model->spec.hidden, inner = (size_t)model->spec.expert_intermediate;
    const size_t blocks = parts->format ? hidden / BLOCK : 0;
    struct experts *of = &model->layers[layer_index].experts;
    struct packing *all = calloc((size_t)model->spec.experts, sizeof *all);
    int fits = all != NULL;
    if (fits && where == GATE_UP) {
        fits = load_experts(model, all, of->gate_up, parts, (size_t)count, 2 * inner, hidden, 1);
        if (model->rounded_stride < blocks) model->rounded_stride = blocks; /* rows are rounded before they are sorted */
    } else if (fits) {
        fits = load_experts(model, all, of->down, parts, (size_t)count, hidden, inner, 0);
    }
    free(all);
    return fits;
}

/* Sets how a layer attends: `window` 0 is all keys. */
void baton_set_attention(struct model *model, int64_t layer, int64_t window, int64_t rotation) {
    model->layers[layer].window = (size_t)window;
    model->layers[layer].rotation = (enum rotation)rotation;
}

int64_t baton_bytes(const struct model *model) { return (int64_t)model->arena_used; }

#endif
