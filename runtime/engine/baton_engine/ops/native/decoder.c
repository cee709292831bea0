/*
 * The forward pass of a Llama-like decoder in one call.
 *
 * The pass is a sequence of phases on a thread pool. Each layer has the phases norm, qkv, rotation, attention,
 * output, norm, gate and up, down. Inputs of products have the kind (data type) of the weights, or 8 bits if those are
 * quantized; all other activations, such as the residual, are float32. A row's numbers are computed from that row only, in an order
 * that does not depend on the batch or on the number of threads.
 */
#define _GNU_SOURCE

#include "draw.h"
#include "products.h"
#include "stored.h"

#define NORM_ROWS 4          /* rows per chunk of a norm, of a rotation and of the embedding */
#define CHUNKS_PER_THREAD 6  /* enough that threads finish a phase at about the same time */
#define LEAST_QUERIES 96     /* query rows of a chunk of attention, if there are too few chunks for the threads */
#define RUNS_PER_THREAD 1    /* a run has 1 / (threads * RUNS_PER_THREAD) of the remaining panels */

/*
 * A step that shrinks is right before the product whose input rows it multiplies with A of their adapters. ROUND_ATTENDED
 * and ROUND_GATED prepare the inputs of quantized products; without one they have nothing to do.
 */
enum step {
    NORM_BEFORE_ATTENTION, SHRINK_FOR_PROJECT, PROJECT, ROTATE, ATTEND, ROUND_ATTENDED, SHRINK_FOR_JOIN, JOIN,
    NORM_BEFORE_MLP, SHRINK_FOR_GATE, GATE, ROUND_GATED, SHRINK_FOR_CLOSE, CLOSE, DENSE_STEPS
};

/* Steps of a layer with experts after NORM_BEFORE_MLP. */
enum expert_step { ROUTE = DENSE_STEPS, GROUP, GATHER, EXPERT_GATE, EXPERT_ROUND, EXPERT_CLOSE, COMBINE, IDLE };
#define EXPERT_STEPS (IDLE - ROUTE)
_Static_assert(EXPERT_STEPS >= DENSE_STEPS - NORM_BEFORE_MLP - 1, "dense layers of a model with experts lack steps");

/* Returns the kind of the rows that are written as input of a product with `weight`. */
INLINE int input_kind(const struct linear *weight, int kind) { return weight->quantized ? FLOAT32 : kind; }

/* Rounds the rows of one chunk for a product with `weight`, if it is quantized. */
INLINE void round_rows(const struct model *model, const struct linear *weight, const char *from, size_t stride,
                       size_t count, size_t chunk) {
    for (size_t row = chunk * NORM_ROWS; weight->quantized && row < count && row < (chunk + 1) * NORM_ROWS; row++)
        round_row((const float *)from + row * stride, weight->inputs, model->rounded + row * model->rounded_stride);
}

INLINE void norm_row(const float *from, const float *weight, size_t count, float epsilon, void *to, const int kind) {
    floats squares = splat(0.0f);
    for (size_t i = 0; i < count; i += LANES) squares += load(from + i) * load(from + i);
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)count + epsilon);
    for (size_t i = 0; i < count; i += LANES) put(to, i, load(from + i) * scale * load(weight + i), kind);
}

/* Adds the normalized row `from`, the output of attention or MLP, to the residual `to`. */
INLINE void add_normed_row(const float *from, const float *weight, size_t count, float epsilon, float factor, float *to) {
    floats squares = splat(0.0f);
    for (size_t i = 0; i < count; i += LANES) squares += load(from + i) * load(from + i);
    float scale = factor / __builtin_sqrtf(sum(squares) / (float)count + epsilon);
    for (size_t i = 0; i < count; i += LANES) store(to + i, load(to + i) + load(from + i) * scale * load(weight + i));
}

INLINE void scale_row(float *row, size_t count, float scale) {
    if (scale != 1.0f)
        for (size_t i = 0; i < count; i++) row[i] *= scale;
}

INLINE void embed_row(struct model *model, size_t token, const int kind) {
    const size_t hidden = (size_t)model->spec.hidden, id = (size_t)model->pass->ids[token];
    float *to = model->residual + token * model->residual_stride;
    if (model->embedding) {
        for (size_t i = 0; i < hidden; i++) to[i] = get(model->embedding, id * hidden + i, kind);
        return;
    }
    const struct linear *rows = model->embedding_rows.quantized ? &model->embedding_rows : &model->head;
    if (rows->quantized) {
        unpack_quantized_row(rows->quantized[id / PANEL], id % PANEL, hidden, to, (enum format)rows->formats[id / PANEL]);
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

INLINE void embed(struct model *model, size_t token, const int kind) {
    embed_row(model, token, kind);
    scale_row(model->residual + token * model->residual_stride, (size_t)model->spec.hidden, (float)model->spec.embedding_scale);
}

INLINE char *cache_at(const struct model *model, size_t block, size_t layer, size_t which, size_t head, size_t slot,
                      const int kind) {
    const struct spec *spec = &model->spec;
    size_t index = (block * (size_t)spec->layers + layer) * 2 + which;
    index = (index * (size_t)spec->kv_heads + head) * (size_t)model->pass->block_size + slot;
    return (char *)model->pass->cache + index * (size_t)spec->head_dim * item_bytes(kind);
}

/* Normalizes `heads` heads of `dim` numbers: each one, or all of them together. */
INLINE void norm_heads(float *from, const float *norm, size_t heads, size_t dim, int joint, float epsilon) {
    const size_t count = joint ? heads * dim : dim;
    for (float *head = from; norm && head < from + heads * dim; head += count) {
        float squares = 0.0f;
        for (size_t i = 0; i < count; i++) squares += head[i] * head[i];
        float scale = 1.0f / __builtin_sqrtf(squares / (float)count + epsilon);
        for (size_t i = 0; i < count; i++) head[i] = head[i] * scale * norm[i];
    }
}

/* Rotates the first `rotated` numbers of one head into `to`, which is padded to whole vectors; the others stay. */
INLINE void rotate_head(const float *restrict from, float *restrict to, const float *restrict cosines,
                        const float *restrict sines, size_t dim, size_t rotated) {
    size_t half = rotated / 2;
    for (size_t i = 0; i < half; i++) {
        to[i] = from[i] * cosines[i] - from[i + half] * sines[i];
        to[i + half] = from[i + half] * cosines[i] + from[i] * sines[i];
    }
    for (size_t i = rotated; i < dim; i++) to[i] = from[i];
}

/* Rotates a token's queries and keys, and writes keys and values to the cache. */
INLINE void rotate(struct model *model, size_t layer_index, size_t token, const int kind) {
    const struct spec *spec = &model->spec;
    const struct layer *layer = model->layers + layer_index;
    const struct pass *pass = model->pass;
    const size_t dim = (size_t)spec->head_dim, heads = (size_t)spec->heads, kv_heads = (size_t)spec->kv_heads;
    const size_t group = heads / kv_heads, bytes = dim * item_bytes(kind);
    const size_t block = (size_t)(pass->slots[token] / pass->block_size), slot = (size_t)(pass->slots[token] % pass->block_size);
    const size_t angle = (size_t)(pass->positions[token] * spec->rotated / 2);
    const size_t rotated = layer->rotation == UNROTATED ? 0 : (size_t)spec->rotated;
    const float *cosines = (layer->rotation == SLIDING ? pass->sliding_cosines : pass->cosines) + angle;
    const float *sines = (layer->rotation == SLIDING ? pass->sliding_sines : pass->sines) + angle;
    float *qkv = model->qkv + token * model->qkv_stride;
    norm_heads(qkv, layer->q_norm, heads, dim, (int)spec->joint_norm, (float)spec->epsilon);
    norm_heads(qkv + heads * dim, layer->k_norm, kv_heads, dim, (int)spec->joint_norm, (float)spec->epsilon);
    float turned[MOST_HEAD_DIM + LANES] = {0};
    char packed[(MOST_HEAD_DIM + LANES) * 4];
    for (size_t head = 0; head < heads; head++) {
        rotate_head(qkv + head * dim, turned, cosines, sines, dim, rotated);
        size_t row = (head / group * (size_t)pass->tokens + token) * group + head % group;
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(turned + i), kind);
        memcpy(model->queries + row * model->query_lanes * 4, packed, bytes);
    }
    for (size_t head = 0; head < kv_heads; head++) {
        rotate_head(qkv + (heads + head) * dim, turned, cosines, sines, dim, rotated);
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(turned + i), kind);
        memcpy(cache_at(model, block, layer_index, 0, head, slot, kind), packed, bytes);
        /* Reads up to LANES numbers beyond the value; the rows of qkv are padded. */
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(qkv + (heads + kv_heads + head) * dim + i), kind);
        memcpy(cache_at(model, block, layer_index, 1, head, slot, kind), packed, bytes);
    }
}

static int is_last(const struct model *model, size_t layer) { return layer + 1 == (size_t)model->spec.layers; }

/* Returns the last index in offsets [0, count] whose value is at most `value`. */
INLINE size_t find(const int64_t *offsets, size_t count, int64_t value) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (offsets[middle] <= value) low = middle;
        else high = middle;
    }
    return low;
}

/* Consecutive tokens of one row, whose attention is computed together. */
struct attention_part {
    size_t row, token, tokens;
    size_t to; /* index of the first token's result */
};

static size_t attention_parts(const struct model *model, size_t layer) {
    return (size_t)(is_last(model, layer) ? model->pass->wanted : model->query_chunks[model->pass->rows]);
}

/*
 * Parts are ordered by tokens, the last and longest first. The last layer computes attention only for tokens whose
 * logits are needed, because no later layer reads the others.
 */
INLINE struct attention_part attention_part(const struct model *model, size_t layer_index, size_t nth) {
    const struct pass *pass = model->pass;
    const size_t rows = (size_t)pass->rows;
    if (is_last(model, layer_index)) {
        const size_t token = (size_t)pass->wanted_at[nth];
        return (struct attention_part){find(pass->starts, rows, (int64_t)token), token, 1, nth};
    }
    const int64_t within = model->query_chunks[rows] - 1 - (int64_t)nth;
    const size_t row = find(model->query_chunks, rows, within);
    const size_t token = (size_t)pass->starts[row] + (size_t)(within - model->query_chunks[row]) * model->query_tokens;
    const size_t left = (size_t)pass->starts[row + 1] - token;
    return (struct attention_part){row, token, left < model->query_tokens ? left : model->query_tokens, token};
}

/*
 * Returns how many key heads a chunk has: all of them in a decode step with enough rows, because they are adjacent in
 * memory. Otherwise there are more chunks, of one head each.
 */
static size_t heads_at_once(const struct model *model, size_t layer) {
    const int is_decode = model->pass->tokens == model->pass->rows;
    const size_t enough = model->pool->threads > 1 ? 4 * (size_t)model->pool->threads : 1;
    return is_decode && attention_parts(model, layer) >= enough ? (size_t)model->spec.kv_heads : 1;
}

INLINE struct context context_of(const struct model *model, size_t layer_index, size_t head, const struct attention_part *part,
                                 const int kind) {
    const struct pass *pass = model->pass;
    const size_t position = (size_t)pass->positions[part->token], window = model->layers[layer_index].window;
    return (struct context){
        .keys = cache_at(model, 0, layer_index, 0, head, 0, kind),
        .values = cache_at(model, 0, layer_index, 1, head, 0, kind),
        .block_bytes = (size_t)(cache_at(model, 1, 0, 0, 0, 0, kind) - cache_at(model, 0, 0, 0, 0, 0, kind)),
        .slot_bytes = (size_t)model->spec.head_dim * item_bytes(kind),
        .block_size = (size_t)pass->block_size,
        .blocks = pass->blocks + part->row * (size_t)pass->width,
        .first = window && position + 1 > window ? (position + 1 - window) / KEYS * KEYS : 0,
        .end = position + part->tokens,
    };
}

/* Attention of one part and key head. `next` is what the thread will probably read after it. */
INLINE void attend_part(struct model *model, size_t layer_index, size_t head, const struct attention_part *part,
                        const struct context *next, struct attention *scratch, const int kind) {
    const struct spec *spec = &model->spec;
    const size_t group = (size_t)(spec->heads / spec->kv_heads), dim = (size_t)spec->head_dim;
    const struct context context = context_of(model, layer_index, head, part, kind);
    const struct span span = {
        .queries = (const uint32_t *)model->queries +
                   (head * (size_t)model->pass->tokens + part->token) * group * model->query_lanes,
        .query_lanes = model->query_lanes,
        .tokens = part->tokens,
        .group = group,
        .position = (size_t)model->pass->positions[part->token],
        .window = model->layers[layer_index].window,
        .dim = dim,
        .scale = (float)spec->score_scale,
        .cap = (float)spec->score_cap,
    };
    attend(scratch, &context, next, &span, way_of(model, part->tokens * group), kind);
    char packed[MOST_HEAD_DIM * 4];
    const int to_kind = input_kind(&model->layers[layer_index].output, kind);
    for (size_t query = 0; query < part->tokens * group; query++) {
        const float *sums = scratch->sums + query * round_up(dim, PANEL);
        for (size_t i = 0; i < dim; i += LANES) put(packed, i, load(sums + i), to_kind);
        size_t item = (part->to + query / group) * model->attended_stride + (head * group + query % group) * dim;
        memcpy(model->attended + item * item_bytes(to_kind), packed, dim * item_bytes(to_kind));
    }
}

/* One chunk of attention: some key heads of a part. */
INLINE void attend_chunk(struct model *model, size_t layer_index, size_t chunk, size_t thread, const int kind) {
    const size_t heads = heads_at_once(model, layer_index), runs = (size_t)model->spec.kv_heads / heads;
    const size_t nth = chunk / runs, later = nth + (size_t)model->pool->threads, dim = (size_t)model->spec.head_dim;
    const struct attention_part part = attention_part(model, layer_index, nth);
    const struct attention_part next_part =
        later < attention_parts(model, layer_index) ? attention_part(model, layer_index, later) : part;
    if (is_last(model, layer_index) && chunk % runs == 0)
        memcpy(model->chosen + nth * model->residual_stride, model->residual + part.token * model->residual_stride,
               model->residual_stride * 4);
    struct attention *scratch = &model->scratches[thread].attention;
    if (dim % PANEL) {
        memset(scratch->keys, 0, sizeof scratch->keys);
        memset(scratch->values, 0, sizeof scratch->values);
    }
    struct tile_shapes before;
    const int is_tiled = way_of(model, part.tokens * (size_t)(model->spec.heads / model->spec.kv_heads)) == TILED;
    if (is_tiled) tiles_begin(&before, TILE_SIDE);
    for (size_t nth_head = 0; nth_head < heads; nth_head++) {
        const size_t head = chunk % runs * heads + nth_head, is_end = nth_head + 1 == heads;
        const struct context next = context_of(model, layer_index, is_end ? head + 1 - heads : head + 1,
                                               is_end ? &next_part : &part, kind);
        attend_part(model, layer_index, head, &part, &next, scratch, kind);
    }
    if (is_tiled) tiles_end(&before);
}

/* Partition of a product: blocks of rows, and runs of panels in each block. */
struct cut {
    size_t rows, row_blocks, panels;
    size_t runs;   /* number of runs per block of rows */
    size_t shares; /* a run has 1 / shares of the remaining panels, so that runs become shorter */
};

static size_t run_length(size_t left, size_t shares) { return (left + shares - 1) / shares; }

static struct cut cut_product(const struct model *model, const struct product *product) {
    const size_t threads = (size_t)model->pool->threads;
    struct cut cut = {.panels = panel_count(product->weight), .shares = threads == 1 ? 1 : RUNS_PER_THREAD * threads};
    cut.row_blocks = (product->count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    cut.rows = round_up((product->count + cut.row_blocks - 1) / cut.row_blocks, TILE_ROWS);
    /* With many threads and few panels, blocks of rows are shorter, down to two tiles. */
    while (threads > 1 && cut.row_blocks * cut.panels < threads * CHUNKS_PER_THREAD && cut.rows > 2 * TILE_ROWS) {
        cut.rows = round_up(cut.rows / 2, TILE_ROWS);
        cut.row_blocks = (product->count + cut.rows - 1) / cut.rows;
    }
    cut.row_blocks = (product->count + cut.rows - 1) / cut.rows;
    for (size_t left = cut.panels; left; left -= run_length(left, cut.shares)) cut.runs++;
    return cut;
}

INLINE void multiply_chunk(const struct model *model, const struct product *product, size_t chunk, size_t thread,
                           const int kind) {
    const struct cut cut = cut_product(model, product);
    const struct linear *weight = product->weight;
    const size_t first_row = chunk / cut.runs * cut.rows;
    const size_t rows_end = first_row + cut.rows < product->count ? first_row + cut.rows : product->count;
    size_t left = cut.panels;
    for (size_t run = 0; run < chunk % cut.runs; run++) left -= run_length(left, cut.shares);
    const size_t first_panel = cut.panels - left, panels_end = first_panel + run_length(left, cut.shares);
    const struct area area = {first_row, rows_end, first_panel, panels_end};
    if (weight->quantized) {
        const enum way way = (enum way)model->spec.octet_ways[class_of(product->count)];
        multiply_octets(product, &area, way, kind);
        return;
    }
    multiply_area(product, &area, way_of(model, product->count), model->scratches + thread, kind);
}

#include "experts.h"

/* After the attention of the last layer, only the wanted tokens are computed, in the rows of `chosen`. */
static int among_chosen(const struct model *model, size_t layer, size_t step) {
    return is_last(model, layer) && step > ROTATE;
}

/* Returns the product of a phase that computes one. */
static struct product product_of(const struct model *model, size_t layer_index, size_t step) {
    const struct layer *layer = model->layers + layer_index;
    const int chosen = among_chosen(model, layer_index, step), joins = step == JOIN || step == CLOSE;
    struct product product = {
        .rows = step == JOIN ? model->attended : step == CLOSE ? model->gated : model->normed,
        .count = (size_t)(chosen ? model->pass->wanted : model->pass->tokens),
        .mode = step == GATE ? GATED : joins && !model->joined ? ADD : WRITE,
        .result = model->joined ? model->joined : chosen ? model->chosen : model->residual,
        .result_stride = model->residual_stride,
        .gelu = (int)model->spec.gelu,
        .scale = joins && !model->joined ? (float)model->spec.residual_scale : 1.0f,
        .result_kind = input_kind(&layer->down, (int)model->spec.kind),
        .adapters = !model->pass->adapters ? NULL : chosen ? model->wanted_adapters : model->token_adapters,
        .layer = layer_index,
        .linear = step == PROJECT ? ADAPT_QKV : step == JOIN ? ADAPT_OUTPUT : step == GATE ? ADAPT_GATE_UP : ADAPT_DOWN,
        .shrunk = model->shrunk,
        .shrunk_stride = model->shrunk_stride,
        .rounded = model->rounded,
        .rounded_stride = model->rounded_stride,
    };
    switch (step) {
    case PROJECT: product.weight = &layer->qkv, product.result = model->qkv, product.result_stride = model->qkv_stride; break;
    case JOIN: product.weight = &layer->output; break;
    case GATE: product.weight = &layer->gate_up, product.result = model->gated, product.result_stride = model->gated_stride; break;
    default: product.weight = &layer->down; break;
    }
    product.row_bytes = (step == JOIN ? model->attended_stride : step == CLOSE ? model->gated_stride : model->normed_stride) *
                        item_bytes(input_kind(product.weight, (int)model->spec.kind));
    return product;
}

static struct product product_of_head(const struct model *model) {
    return (struct product){
        .weight = &model->head,
        .rows = model->final,
        .row_bytes = model->normed_stride * item_bytes((int)model->spec.kind),
        .count = (size_t)model->pass->wanted,
        .mode = WRITE,
        .result = model->pass->logits,
        .result_stride = (size_t)model->spec.vocab,
        .scale = (float)model->spec.logit_scale,
        .cap = (float)model->spec.logit_cap,
        .rounded = model->rounded,
        .rounded_stride = model->rounded_stride,
    };
}

/* Returns the number of steps per layer. In a model with experts, dense layers have idle steps. */
static size_t step_count(const struct model *model) {
    return model->spec.experts ? NORM_BEFORE_MLP + 1 + EXPERT_STEPS : DENSE_STEPS;
}

static size_t step_at(const struct model *model, size_t layer, size_t nth) {
    if (!model->layers[layer].experts.router) return nth < DENSE_STEPS ? nth : IDLE;
    return nth <= NORM_BEFORE_MLP ? nth : nth - NORM_BEFORE_MLP - 1 + ROUTE;
}

/* Phase 0 is the embedding, followed by the steps of each layer, the final norm and the head. */
static size_t final_norm_phase(const struct model *model) { return 1 + (size_t)model->spec.layers * step_count(model); }

/* Without wanted logits, a pass ends when the last layer's keys and values are stored. */
static size_t phase_count(const struct model *model) {
    const size_t norm = final_norm_phase(model);
    if (!model->pass->wanted) return norm - step_count(model) + ROTATE + 1;
    return norm + (model->pass->logits ? 2 : 1);
}

static int shrinks(size_t step) {
    return step == SHRINK_FOR_PROJECT || step == SHRINK_FOR_JOIN || step == SHRINK_FOR_GATE || step == SHRINK_FOR_CLOSE;
}

static size_t rank_blocks(const struct model *model) { return (model->shrunk_stride + RANKS_AT_ONCE - 1) / RANKS_AT_ONCE; }

/* One chunk of a step that shrinks: RANKS_AT_ONCE ranks of NORM_ROWS rows. */
INLINE void shrink_chunk(const struct model *model, size_t layer, size_t step, size_t chunk, const int kind) {
    if (!model->pass->adapters) return;
    const struct product product = product_of(model, layer, step + 1);
    const size_t from = chunk / rank_blocks(model) * NORM_ROWS, first = chunk % rank_blocks(model) * RANKS_AT_ONCE;
    for (size_t row = from; row < product.count && row < from + NORM_ROWS; row++) {
        const struct low_rank *low_rank = low_rank_at(product.adapters[row], layer, product.linear);
        if (!low_rank || first >= low_rank->rank) continue;
        const size_t last = first + RANKS_AT_ONCE < low_rank->rank ? first + RANKS_AT_ONCE : low_rank->rank;
        const char *from_row = product.rows + row * product.row_bytes;
        float *to = model->shrunk + row * model->shrunk_stride;
        if (product.weight->quantized) shrink_floats(low_rank, (const float *)from_row, first, last, to, kind);
        else shrink(low_rank, from_row, first, last, to, kind);
    }
}

/* Finds the adapter of each token of the pass. Returns 0 if memory is exhausted. */
static int reserve_adapters(struct model *model, const struct pass *pass) {
    size_t most = 1;
    for (int64_t row = 0; pass->adapters && row < pass->rows; row++)
        if (pass->adapters[row] && pass->adapters[row]->most_rank > most) most = pass->adapters[row]->most_rank;
    if (!pass->adapters) return 1;
    if (model->adapted_tokens < model->token_capacity || model->adapted_wanted < model->wanted_capacity) {
        free(model->token_adapters), free(model->wanted_adapters);
        model->token_adapters = calloc(model->token_capacity, sizeof *model->token_adapters);
        model->wanted_adapters = calloc(model->wanted_capacity + 1, sizeof *model->wanted_adapters);
        const int allocated = model->token_adapters && model->wanted_adapters;
        model->adapted_tokens = allocated ? model->token_capacity : 0;
        model->adapted_wanted = allocated ? model->wanted_capacity : 0;
    }
    model->shrunk_stride = round_up(most, LANES);
    if (model->shrunk_capacity < model->token_capacity * model->shrunk_stride) {
        free(model->shrunk);
        model->shrunk = zeros(model->token_capacity * model->shrunk_stride * 4);
        model->shrunk_capacity = model->shrunk ? model->token_capacity * model->shrunk_stride : 0;
    }
    if (!model->adapted_tokens || !model->shrunk_capacity) return 0;
    for (int64_t row = 0; row < pass->rows; row++)
        for (int64_t token = pass->starts[row]; token < pass->starts[row + 1]; token++)
            model->token_adapters[token] = pass->adapters[row];
    for (int64_t nth = 0; nth < pass->wanted; nth++) model->wanted_adapters[nth] = model->token_adapters[pass->wanted_at[nth]];
    return 1;
}

static size_t chunks_of_product(const struct model *model, const struct product product) {
    struct cut cut = cut_product(model, &product);
    return cut.row_blocks * cut.runs;
}

static size_t chunks_in(void *self, size_t phase) {
    const struct model *model = self;
    const size_t by_tokens = ((size_t)model->pass->tokens + NORM_ROWS - 1) / NORM_ROWS;
    const size_t by_wanted = ((size_t)model->pass->wanted + NORM_ROWS - 1) / NORM_ROWS;
    if (phase == 0) return by_tokens;
    if (phase == final_norm_phase(model)) return by_wanted;
    if (phase > final_norm_phase(model)) return chunks_of_product(model, product_of_head(model));
    const size_t layer = (phase - 1) / step_count(model), step = step_at(model, layer, (phase - 1) % step_count(model));
    if (step >= ROUTE)
        return chunks_of_experts(model, layer, step, (size_t)(is_last(model, layer) ? model->pass->wanted : model->pass->tokens));
    if (shrinks(step))
        return model->pass->adapters ? (among_chosen(model, layer, step) ? by_wanted : by_tokens) * rank_blocks(model) : 1;
    switch (step) {
    case NORM_BEFORE_ATTENTION:
    case NORM_BEFORE_MLP:
    case ROTATE: return among_chosen(model, layer, step) ? by_wanted : by_tokens;
    case ROUND_ATTENDED:
    case ROUND_GATED: {
        const struct layer *of = model->layers + layer;
        if (!(step == ROUND_GATED ? &of->down : &of->output)->quantized) return 1;
        return among_chosen(model, layer, step) ? by_wanted : by_tokens;
    }
    case ATTEND: return attention_parts(model, layer) * (size_t)model->spec.kv_heads / heads_at_once(model, layer);
    default: return chunks_of_product(model, product_of(model, layer, step));
    }
}

/*
 * Stores the normalized rows of one chunk in `to`: NORM_ROWS rows from `chunk` * NORM_ROWS on, below `count`. Before,
 * adds the output of attention or MLP to the residual if it has the norm `post`. Without `weight`, rows are only rounded.
 * The rows are the input of a product with `next`.
 */
INLINE void norm_rows(const struct model *model, float *residual, const float *post, const float *weight, size_t count,
                      size_t chunk, char *to, const struct linear *next, const int kind) {
    const size_t hidden = (size_t)model->spec.hidden;
    const float epsilon = (float)model->spec.epsilon;
    const int to_kind = input_kind(next, kind);
    for (size_t row = chunk * NORM_ROWS; row < count && row < (chunk + 1) * NORM_ROWS; row++) {
        float *from = residual + row * model->residual_stride;
        char *normed = to + row * model->normed_stride * item_bytes(to_kind);
        if (post)
            add_normed_row(model->joined + row * model->residual_stride, post, hidden, epsilon,
                           (float)model->spec.residual_scale, from);
        if (weight) norm_row(from, weight, hidden, epsilon, normed, to_kind);
        else
            for (size_t i = 0; i < hidden; i += LANES) put(normed, i, load(from + i), to_kind);
    }
    round_rows(model, next, to, model->normed_stride, count, chunk);
}

/* The same rows before rounding to the weights' kind. */
INLINE void show_rows(const struct model *model, size_t chunk) {
    const struct pass *pass = model->pass;
    const size_t wanted = (size_t)pass->wanted;
    for (size_t row = chunk * NORM_ROWS; row < wanted && row < (chunk + 1) * NORM_ROWS; row++)
        norm_row(model->chosen + row * model->residual_stride, model->final_norm, (size_t)model->spec.hidden,
                 (float)model->spec.epsilon, pass->states + row * (size_t)pass->states_stride, FLOAT32);
}

INLINE void run_chunk(struct model *model, size_t phase, size_t chunk, size_t thread, const int kind) {
    const size_t tokens = (size_t)model->pass->tokens, wanted = (size_t)model->pass->wanted;
    const size_t from = chunk * NORM_ROWS, to = from + NORM_ROWS < tokens ? from + NORM_ROWS : tokens;
    if (phase == 0) {
        for (size_t token = from; token < to; token++) embed(model, token, kind);
        return;
    }
    if (phase == final_norm_phase(model)) {
        norm_rows(model, model->chosen, model->layers[model->spec.layers - 1].mlp_post_norm, model->final_norm, wanted, chunk,
                  model->final, &model->head, kind);
        if (model->pass->states) show_rows(model, chunk);
        return;
    }
    const int at_head = phase > final_norm_phase(model);
    const size_t layer_index = (phase - 1) / step_count(model);
    const size_t step = at_head ? (size_t)IDLE : step_at(model, layer_index, (phase - 1) % step_count(model));
    const struct layer *layer = model->layers + layer_index;
    if (shrinks(step)) {
        shrink_chunk(model, layer_index, step, chunk, kind);
        return;
    }
    if (step >= ROUTE && !at_head) {
        const int last = is_last(model, layer_index);
        if (step != IDLE)
            run_experts(model, layer_index, step, chunk, last ? model->chosen : model->residual, last ? wanted : tokens, thread, kind);
        return;
    }
    switch (step) {
    case NORM_BEFORE_ATTENTION:
        norm_rows(model, model->residual, layer_index ? layer[-1].mlp_post_norm : NULL, layer->attention_norm, tokens, chunk,
                  model->normed, &layer->qkv, kind);
        return;
    case ROTATE:
        for (size_t token = from; token < to; token++) rotate(model, layer_index, token, kind);
        return;
    case ATTEND: attend_chunk(model, layer_index, chunk, thread, kind); return;
    case NORM_BEFORE_MLP: {
        const int last = is_last(model, layer_index);
        norm_rows(model, last ? model->chosen : model->residual, layer->attention_post_norm, layer->mlp_norm,
                  last ? wanted : tokens, chunk, model->normed, layer->experts.router ? layer->experts.gate_up : &layer->gate_up,
                  kind);
        return;
    }
    case ROUND_ATTENDED:
    case ROUND_GATED: {
        const size_t count = among_chosen(model, layer_index, step) ? wanted : tokens;
        if (step == ROUND_GATED) round_rows(model, &layer->down, model->gated, model->gated_stride, count, chunk);
        else round_rows(model, &layer->output, model->attended, model->attended_stride, count, chunk);
        return;
    }
    default: {
        const struct product product = at_head ? product_of_head(model) : product_of(model, layer_index, step);
        multiply_chunk(model, &product, chunk, thread, kind);
    }
    }
}

static void run_float(void *self, size_t phase, size_t chunk, size_t thread) { run_chunk(self, phase, chunk, thread, FLOAT32); }
static void run_bfloat(void *self, size_t phase, size_t chunk, size_t thread) { run_chunk(self, phase, chunk, thread, BFLOAT16); }

static int is_sound(const struct model *model, const struct pass *pass) {
    for (int64_t token = 0; token < pass->tokens; token++) {
        if (pass->ids[token] < 0 || pass->ids[token] >= model->spec.vocab) return 0;
        if (pass->slots[token] < 0 || pass->slots[token] >= pass->cache_slots) return 0;
    }
    for (int64_t i = 0; i < pass->rows * pass->width; i++)
        if (pass->blocks[i] < 0 || pass->blocks[i] >= pass->cache_slots / pass->block_size) return 0;
    return 1;
}

/* Cuts the rows into chunks of attention: long ones, which pack keys seldom, if there are enough for the threads. */
static void cut_rows(struct model *model) {
    const struct pass *pass = model->pass;
    const size_t group = (size_t)(model->spec.heads / model->spec.kv_heads), threads = (size_t)model->pool->threads;
    model->query_chunks[0] = 0;
    for (size_t queries = MOST_QUERIES;; queries /= 2) {
        const int64_t most = group < queries ? (int64_t)(queries / group) : 1;
        for (int64_t row = 0; row < pass->rows; row++)
            model->query_chunks[row + 1] = model->query_chunks[row] + (pass->starts[row + 1] - pass->starts[row] + most - 1) / most;
        model->query_tokens = (size_t)most;
        const size_t chunks = (size_t)(model->query_chunks[pass->rows] * model->spec.kv_heads);
        if (threads == 1 || chunks >= 2 * threads * CHUNKS_PER_THREAD || queries <= LEAST_QUERIES) return;
    }
}

enum result { DONE, NO_MEMORY, OUT_OF_RANGE, INTERRUPTED };

/* Runs one pass. Calls for the same model must not overlap. */
int baton_forward(struct model *model, const struct pass *pass) {
    if (!is_sound(model, pass)) return OUT_OF_RANGE;
    if (!reserve_activations(model, (size_t)pass->tokens, (size_t)pass->wanted, (size_t)pass->rows)) return NO_MEMORY;
    if (!reserve_adapters(model, pass)) return NO_MEMORY;
    model->pass = pass;
    cut_rows(model);
    struct job job = {
        .self = model,
        .phases = phase_count(model),
        .chunks = chunks_in,
        .run = model->spec.kind == BFLOAT16 ? run_bfloat : run_float,
        .interruptible = 1,
    };
    atomic_store(&model->pool->interrupted, 0);
    const int whole = pool_run(model->pool, &job);
    model->pass = NULL;
    return whole ? DONE : INTERRUPTED;
}

/* Ends the pass in progress after its current phase, if there is one. From any thread. */
void baton_interrupt(struct model *model) { atomic_store(&model->pool->interrupted, 1); }

/* The head only: phase 0 rounds the states to the weights' kind or to 8 bits, phase 1 multiplies. */
static size_t chunks_of_head(void *self, size_t phase) {
    const struct model *model = self;
    return phase ? chunks_of_product(model, product_of_head(model)) : ((size_t)model->pass->wanted + NORM_ROWS - 1) / NORM_ROWS;
}

static void run_head(void *self, size_t phase, size_t chunk, size_t thread) {
    const struct model *model = self;
    const struct pass *pass = model->pass;
    const int kind = (int)model->spec.kind;
    const size_t hidden = (size_t)model->spec.hidden, wanted = (size_t)pass->wanted;
    if (phase) {
        const struct product product = product_of_head(model);
        if (kind == BFLOAT16) multiply_chunk(model, &product, chunk, thread, BFLOAT16);
        else multiply_chunk(model, &product, chunk, thread, FLOAT32);
        return;
    }
    round_rows(model, &model->head, (const char *)pass->states, (size_t)pass->states_stride, wanted, chunk);
    for (size_t row = chunk * NORM_ROWS; !model->head.quantized && row < wanted && row < (chunk + 1) * NORM_ROWS; row++) {
        const float *from = pass->states + row * (size_t)pass->states_stride;
        char *to = model->final + row * model->normed_stride * item_bytes(kind);
        for (size_t i = 0; i < hidden; i += LANES) put(to, i, load(from + i), kind);
    }
}

/* Computes logits of the `wanted` states of an earlier pass; other fields of `pass` are ignored. */
int baton_project(struct model *model, const struct pass *pass) {
    if (!reserve_activations(model, 0, (size_t)pass->wanted, 0)) return NO_MEMORY;
    model->pass = pass;
    struct job job = {.self = model, .phases = 2, .chunks = chunks_of_head, .run = run_head};
    pool_run(model->pool, &job);
    model->pass = NULL;
    return DONE;
}

/* Integers from -8 to 7: sums of their products are exact in any order. */
static bfloat16 small_number(int seed) {
    float value = (float)(seed % 16 - 8);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bfloat16)(bits >> 16);
}

/* Self-test: returns whether products are exact on this machine. Runs in a separate process before first use. */
int baton_sound(void) {
    enum { ROWS = 2 * TILE_ROWS, UNITS = 2 * LANES, NUMBERS = 2 * UNITS };
    static _Alignas(64) bfloat16 rows[ROWS][NUMBERS], weights[PANEL][NUMBERS];
    static _Alignas(64) uint32_t panel[UNITS * PANEL];
    static _Alignas(64) float result[ROWS][PANEL];
    float ones[TILE_ROWS];
    struct tile_shapes before;
    for (int row = 0; row < TILE_ROWS; row++) ones[row] = 1.0f;
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < NUMBERS; i++) rows[row][i] = small_number(row * 7 + i * 3);
    for (int output = 0; output < PANEL; output++) {
        for (int i = 0; i < NUMBERS; i++) weights[output][i] = small_number(output * 5 + i * 11);
        pack_row(panel, (size_t)output, weights[output], NUMBERS, BFLOAT16);
    }
    const int is_tiled = has_way(TILED, LEAST_TILE_ROWS);
    if (is_tiled) tiles_begin(&before, TILE_SIDE);
    for (size_t count = 1; count <= TILE_ROWS; count++) {
        for (int add = 0; add < 2; add++)
            multiply(count, (const uint32_t *)rows, UNITS, panel, UNITS, result[0], PANEL, add ? ones : NULL, nothing_ahead,
                     is_tiled ? TILED : PAIRS, BFLOAT16);
        for (size_t row = 0; row < count; row++)
            for (int output = 0; output < PANEL; output++) {
                float expected = 0.0f;
                for (int i = 0; i < NUMBERS; i++) expected += 2.0f * widen(rows[row][i]) * widen(weights[output][i]);
                if (result[row][output] != expected) return 0;
            }
    }
    if (is_tiled) tiles_end(&before);
    return quantized_sound();
}
