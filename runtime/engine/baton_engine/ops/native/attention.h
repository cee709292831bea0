/*
 * Causal attention of query rows over the blocks of the cache, without gathering them (online softmax).
 *
 * Keys and values are processed in groups of KEYS, aligned to multiples of KEYS from the start of the sequence, and
 * packed into panels, so that `multiply` computes both scores and weighted sums. The softmax keeps a running maximum
 * of the scores. Masked keys have weight exactly 0 in every group. A row's result therefore depends on its own
 * position and context only, not on the other rows or on the chunks of the prompt.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "softmax.h"

#define MOST_HEAD_DIM 256

/* Location of one row's keys and values, for one layer and head. */
struct context {
    const char *keys;         /* of block 0 */
    const char *values;
    size_t block_bytes, slot_bytes, block_size;
    const int32_t *blocks;
    size_t first, end; /* visible positions: from a multiple of KEYS */
};

/* Memory of one thread for attention: 930 KB, too large for a small thread's stack. */
struct attention {
    _Alignas(64) uint32_t keys[KEYS / PANEL][MOST_HEAD_DIM * PANEL];
    uint32_t values[MOST_HEAD_DIM / PANEL][KEYS * PANEL];
    float scores[TILE_ROWS][KEYS];
    uint32_t weights[TILE_ROWS][KEYS];
    uint32_t queries[MOST_QUERIES * MOST_HEAD_DIM]; /* widened ones */
    float sums[MOST_QUERIES * MOST_HEAD_DIM];
    struct softmax softmax;
    struct places places[2]; /* of this group and, with few rows, of the next one */
};

static const _Alignas(64) uint32_t no_slot[MOST_HEAD_DIM];

/* Prefetches keys and values that will be packed next; the hardware prefetcher cannot predict scattered blocks. */
INLINE void fetch_ahead(const struct context *context, size_t first, size_t end) {
    if (end > first + LANES) end = first + LANES;
    while (first < end) {
        size_t slot = first % context->block_size, count = context->block_size - slot;
        if (count > end - first) count = end - first;
        size_t from = (size_t)context->blocks[first / context->block_size] * context->block_bytes + slot * context->slot_bytes;
        for (size_t byte = from; byte < from + count * context->slot_bytes; byte += 64) {
            __builtin_prefetch(context->keys + byte, 0, 2);
            __builtin_prefetch(context->values + byte, 0, 2);
        }
        first += count;
    }
}

/* Returns the number of positions from `first` to `end`, at most KEYS, rounded up to a multiple of PANEL. */
INLINE size_t filled_keys(size_t first, size_t end) { return first + KEYS < end ? KEYS : round_up(end - first, PANEL); }

/* Locates the KEYS positions from `first` on. Those after the last one are zero. */
INLINE void locate(struct places *places, const struct context *context, size_t first) {
    const size_t end = context->end;
    size_t block = first / context->block_size, slot = first % context->block_size;
    for (size_t i = 0; i < KEYS; i++) {
        if (first + i >= end) {
            places->keys[i] = places->values[i] = (const char *)no_slot;
            continue;
        }
        size_t offset = (size_t)context->blocks[block] * context->block_bytes + slot * context->slot_bytes;
        places->keys[i] = context->keys + offset;
        places->values[i] = context->values + offset;
        if (++slot == context->block_size) block++, slot = 0;
    }
}

/*
 * Packs the keys and values of the KEYS positions from `first` on. Positions after the last one are zero up to a
 * multiple of PANEL, and undefined after it; they are masked.
 */
INLINE void pack_keys(struct attention *scratch, const struct context *context, size_t first, size_t dim, const int kind) {
    const size_t end = context->end;
    const struct places *places = scratch->places;
    const uint32_t *const *keys = (const uint32_t *const *)places->keys;
    const char *const *values = places->values;
    const size_t lanes = lanes_of(kind, dim), whole = lanes / LANES * LANES, filled = filled_keys(first, end);
    locate(scratch->places, context, first);
    for (size_t group = 0; group < filled / LANES; group++) {
        uint32_t *to = scratch->keys[group / 2] + group % 2 * LANES;
        fetch_ahead(context, first + KEYS + group * LANES, end);
        for (size_t lane = 0; lane < whole; lane += LANES) transpose(keys + group * LANES, lane, to + lane * PANEL, PANEL);
        for (size_t lane = whole; lane < lanes; lane++)
            for (size_t i = 0; i < LANES; i++) {
                size_t bytes = dim * item_bytes(kind) - lane * 4;
                uint32_t value = 0;
                memcpy(&value, (const char *)keys[group * LANES + i] + lane * 4, bytes < 4 ? bytes : 4);
                to[lane * PANEL + i] = value;
            }
    }
    for (size_t d = 0; d < dim; d += PANEL) {
        uint32_t *to = scratch->values[d / PANEL];
        size_t width = dim - d < PANEL ? dim - d : PANEL;
        if (kind == FLOAT32) {
            for (size_t i = 0; i < filled; i++) memcpy(to + i * PANEL, values[i] + d * 4, width * 4);
            continue;
        }
        for (size_t i = 0; i < filled; i += 2, to += PANEL) {
            const bfloat16 *first_value = (const bfloat16 *)(values[i] + d * 2), *second_value = (const bfloat16 *)(values[i + 1] + d * 2);
            if (width == PANEL)
                interleave(first_value, second_value, to);
            else
                for (size_t j = 0; j < width; j++) to[j] = (uint32_t)first_value[j] | (uint32_t)second_value[j] << 16;
        }
    }
}

/*
 * Query rows of `tokens` consecutive tokens from `position` on, with `group` rows per token, for one key head.
 * `queries` is [tokens * group][query_lanes].
 */
struct span {
    const uint32_t *queries;
    size_t query_lanes;
    size_t tokens, group;
    size_t position;  /* position of the first token */
    size_t window;    /* visible keys per token, including itself; 0: all */
    size_t dim;
    float scale;      /* factor of the scores */
    float cap;        /* a scaled score s becomes cap * tanh(s / cap); 0: it stays */
};

/* Converts the scores of `count` rows of `span` from `row` on to weights, for the keys from `first` on. */
INLINE void soften(struct attention *scratch, const struct span *span, size_t row, size_t count, size_t first, float scale,
                   float cap_scale, const int kind) {
    size_t member = row % span->group;
    long to = (long)(span->position + row / span->group) + 1 - (long)first;
    for (size_t i = 0; i < count; i++) {
        const struct visible visible = {span->window ? to - (long)span->window : 0, to};
        if (visible.from > 0 || to < KEYS || cap_scale != 0.0f) prepare_scores(scratch->scores[i], cap_scale, visible);
        if (++member == span->group) member = 0, to++;
    }
    (kind == BFLOAT16 ? weigh_bfloat : weigh_float)(&scratch->softmax, row, count, (const float (*)[KEYS])scratch->scores,
                                                    scratch->weights, scale);
}

/* The weighted sums of the values for a few rows. Requests the first keys and values of `next_context` from memory. */
INLINE void attend_few(struct attention *scratch, const struct context *context, const struct context *next_context,
                       const struct span *span, float scale, float cap_scale, const int kind) {
    const size_t count = span->tokens * span->group, lanes = lanes_of(kind, span->dim);
    struct places *places = scratch->places, *next = scratch->places + 1;
    locate(places, context, context->first);
    for (size_t first = context->first; first < context->end; first += KEYS) {
        const size_t keys = filled_keys(first, context->end), units = units_of(kind, keys);
        const int is_last = first + KEYS >= context->end;
        locate(next, is_last ? next_context : context, is_last ? next_context->first : first + KEYS);
        FOR_FEW(scores, span->queries, span->query_lanes, places, next, keys, lanes, scratch->scores[0]);
        soften(scratch, span, 0, count, first, scale, cap_scale, kind);
        FOR_FEW(means, scratch->weights[0], places, next, units, span->dim, scratch->softmax.factors, scratch->sums);
        struct places *read = places;
        places = next, next = read;
    }
}

/*
 * Writes the weighted means of the values, for each row of `span`, to scratch->sums [rows][padded dim]. The context
 * `next` is the one that this thread will probably read after this one. `way` is that of the products.
 */
INLINE void attend(struct attention *scratch, const struct context *context, const struct context *next,
                   const struct span *span, enum way way, const int kind) {
    const size_t rows = span->tokens * span->group, padded = round_up(span->dim, PANEL);
    const float scale = exponent_unit(kind) * LOG2_E * (span->cap != 0.0f ? span->cap : span->scale);
    const float cap_scale = span->cap != 0.0f ? span->scale / span->cap : 0.0f;
    const size_t end = context->end;
    size_t first = context->first;
    memset(scratch->sums, 0, rows * padded * sizeof(float));
    for (size_t row = 0; row < rows; row++) scratch->softmax.best[row] = HIDDEN_SCORE, scratch->softmax.total[row] = splat(0.0f);
    if (are_few(rows, span->dim, way, kind)) {
        attend_few(scratch, context, next, span, scale, cap_scale, kind);
        first = end;
    }
    const int is_wide = way == WIDENED, by = is_wide ? FLOAT32 : kind;
    const size_t lanes = lanes_of(kind, span->dim), query_lanes = is_wide ? 2 * round_up(lanes, LANES) : span->query_lanes;
    const uint32_t *queries = is_wide ? scratch->queries : span->queries;
    for (size_t row = 0; is_wide && first < end && row < rows; row++)
        widen_row(span->queries + row * span->query_lanes, query_lanes / 2, scratch->queries + row * query_lanes);
    for (; first < end; first += KEYS) {
        pack_keys(scratch, context, first, span->dim, kind);
        if (is_wide) {
            const size_t filled = filled_keys(first, end);
            for (size_t key = 0; key < filled; key += PANEL) widen_panel(scratch->keys[key / PANEL], lanes, scratch->keys[key / PANEL]);
            for (size_t d = 0; d < span->dim; d += PANEL) widen_panel(scratch->values[d / PANEL], filled / 2, scratch->values[d / PANEL]);
        }
        for (size_t row = 0; row < rows; row += TILE_ROWS) {
            const size_t count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
            const size_t last_position = span->position + (row + count - 1) / span->group;
            if (last_position < first) continue;
            const size_t seen = filled_keys(first, last_position + 1); /* by some row of the tile */
            unsigned before = is_wide ? flush_begin() : 0;
            for (size_t panel = 0; panel * PANEL < seen; panel++)
                multiply(count, queries + row * query_lanes, query_lanes, scratch->keys[panel],
                         is_wide ? 2 * lanes : units_of(kind, span->dim), scratch->scores[0] + panel * PANEL, KEYS, NULL,
                         nothing_ahead, way, by);
            if (is_wide) flush_end(before);
            soften(scratch, span, row, count, first, scale, cap_scale, kind);
            for (size_t i = 0; is_wide && i < count; i++) widen_row(scratch->weights[i], KEYS / 2, scratch->weights[i]);
            if (is_wide) before = flush_begin();
            for (size_t d = 0; d < padded; d += PANEL)
                multiply(count, scratch->weights[0], KEYS, scratch->values[d / PANEL], is_wide ? seen : units_of(kind, seen),
                         scratch->sums + row * padded + d, padded, scratch->softmax.factors, nothing_ahead, way, by);
            if (is_wide) flush_end(before);
        }
    }
    for (size_t row = 0; row < rows; row++) {
        float inverse = 1.0f / sum(scratch->softmax.total[row]);
        for (size_t i = 0; i < padded; i += LANES)
            store(scratch->sums + row * padded + i, load(scratch->sums + row * padded + i) * inverse);
    }
}

#endif
