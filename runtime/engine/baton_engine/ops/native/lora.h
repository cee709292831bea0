/*
 * LoRA adapters: products of low rank that are added to the linears of some rows of a pass.
 *
 * Each row has its own adapter or none. `shrink` multiplies a row with A, and `expand` adds the product of the result
 * with B while a linear's outputs are stored. Both compute a row from that row only, in a fixed order. Intermediate
 * results are float32.
 */
#ifndef BATON_LORA_H
#define BATON_LORA_H

#include "model.h"

#define RANKS_AT_ONCE 16 /* ranks per chunk of `shrink` */
#define MOST_PARTS 3     /* q, k and v */

enum adapted { ADAPT_QKV, ADAPT_OUTPUT, ADAPT_GATE_UP, ADAPT_DOWN, ADAPTED };

/* One part of a linear's outputs, and the ranks on which it depends; same order as in native_decoder.py. */
struct low_rank_part {
    const void *b; /* [outputs, rank] */
    int64_t start, outputs, first_rank, rank;
};

/* The matrices for one linear of one layer; same order as in native_decoder.py. */
struct low_rank_source {
    const void *a; /* [rank, inputs]; NULL: the linear is not adapted */
    int64_t rank, inputs, outputs, parts;
    struct low_rank_part part[MOST_PARTS];
};

/* LANES outputs and the ranks on which they depend. */
struct strip {
    uint32_t first, count;
    size_t at; /* item of `b`: [count, LANES] */
};

struct low_rank {
    size_t rank, stride; /* items per row of `a`, padded with zeros to whole vectors */
    char *a, *b;
    struct strip *strips;
};

struct adapter {
    char *arena;
    size_t arena_bytes, arena_used, most_rank;
    struct low_rank *low_ranks; /* [layers, ADAPTED] */
};

static size_t strips_of(const struct low_rank_source *source) { return round_up((size_t)source->outputs, PANEL) / LANES; }

/* Returns the output that lane 0 of a strip computes. Gate and up lie side by side in panels, see `load_linear`. */
static size_t first_output(const struct low_rank_source *source, size_t strip, int paired) {
    if (!paired) return strip * LANES;
    return strip / 2 * LANES + strip % 2 * (size_t)source->outputs / 2;
}

static size_t strips_in(const struct low_rank_source *source, int paired) {
    return paired ? round_up((size_t)source->outputs / 2, LANES) * 2 / LANES : strips_of(source);
}

/* The first output after those of a strip. */
static size_t last_output(const struct low_rank_source *source, size_t strip, int paired) {
    const size_t all = (size_t)source->outputs, end = first_output(source, strip, paired) + LANES;
    const size_t most = paired && strip % 2 == 0 ? all / 2 : all;
    return end < most ? end : most;
}

static struct strip strip_of(const struct low_rank_source *source, size_t strip, int paired) {
    const size_t first = first_output(source, strip, paired), last = last_output(source, strip, paired);
    size_t low = (size_t)source->rank, high = 0;
    for (int64_t i = 0; i < source->parts; i++) {
        const struct low_rank_part *part = source->part + i;
        if ((size_t)part->start >= last || (size_t)(part->start + part->outputs) <= first) continue;
        if ((size_t)part->first_rank < low) low = (size_t)part->first_rank;
        if ((size_t)(part->first_rank + part->rank) > high) high = (size_t)(part->first_rank + part->rank);
    }
    return (struct strip){.first = (uint32_t)low, .count = high > low ? (uint32_t)(high - low) : 0};
}

static size_t row_items(const struct low_rank_source *source) { return round_up((size_t)source->inputs, 2 * LANES); }

static size_t low_rank_bytes(const struct low_rank_source *source, int paired, int kind) {
    size_t items = 0;
    for (size_t i = 0; i < strips_in(source, paired); i++) items += strip_of(source, i, paired).count * LANES;
    return round_up((size_t)source->rank * row_items(source) * item_bytes(kind), 64) + round_up(items * item_bytes(kind), 64) +
           round_up(strips_in(source, paired) * sizeof(struct strip), 64);
}

static void *adapter_place(struct adapter *adapter, size_t bytes) {
    void *at = adapter->arena + adapter->arena_used;
    adapter->arena_used += round_up(bytes, 64);
    return at;
}

static void pack_strip(const struct low_rank_source *source, const struct strip *strip, size_t first, size_t last, char *b,
                       size_t item) {
    for (int64_t i = 0; i < source->parts; i++) {
        const struct low_rank_part *part = source->part + i;
        for (size_t output = first; output < last; output++) {
            if (output < (size_t)part->start || output >= (size_t)(part->start + part->outputs)) continue;
            for (size_t rank = 0; rank < (size_t)part->rank; rank++) {
                const size_t to = strip->at + ((size_t)part->first_rank + rank - strip->first) * LANES + output - first;
                const size_t from = (output - (size_t)part->start) * (size_t)part->rank + rank;
                memcpy(b + to * item, (const char *)part->b + from * item, item);
            }
        }
    }
}

static void pack_low_rank(struct adapter *adapter, struct low_rank *to, const struct low_rank_source *source, int paired,
                          int kind) {
    const size_t item = item_bytes(kind), inputs = (size_t)source->inputs, strips = strips_in(source, paired);
    to->rank = (size_t)source->rank, to->stride = row_items(source);
    to->a = adapter_place(adapter, to->rank * to->stride * item);
    for (size_t row = 0; row < to->rank; row++)
        memcpy(to->a + row * to->stride * item, (const char *)source->a + row * inputs * item, inputs * item);
    to->strips = adapter_place(adapter, strips * sizeof(struct strip));
    size_t items = 0;
    for (size_t i = 0; i < strips; i++) {
        to->strips[i] = strip_of(source, i, paired);
        to->strips[i].at = items;
        items += to->strips[i].count * LANES;
    }
    to->b = adapter_place(adapter, items * item);
    for (size_t i = 0; i < strips; i++)
        pack_strip(source, to->strips + i, first_output(source, i, paired), last_output(source, i, paired), to->b, item);
    if (to->rank > adapter->most_rank) adapter->most_rank = to->rank;
}

void baton_adapter_destroy(struct adapter *adapter) {
    if (adapter->arena) munmap(adapter->arena, adapter->arena_bytes);
    free(adapter->low_ranks);
    free(adapter);
}

/* Copies the matrices `sources` [layers, ADAPTED], which have the model's kind. Returns NULL without memory. */
struct adapter *baton_adapter_create(const struct model *model, const struct low_rank_source *sources) {
    const size_t count = (size_t)model->spec.layers * ADAPTED;
    const int kind = (int)model->spec.kind;
    struct adapter *adapter = calloc(1, sizeof *adapter);
    if (!adapter) return NULL;
    for (size_t i = 0; i < count; i++)
        if (sources[i].a) adapter->arena_bytes += low_rank_bytes(sources + i, i % ADAPTED == ADAPT_GATE_UP, kind);
    adapter->arena_bytes = round_up(adapter->arena_bytes + 1, HUGE_PAGE);
    adapter->low_ranks = calloc(count, sizeof *adapter->low_ranks);
    adapter->arena = mmap(NULL, adapter->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (adapter->arena == MAP_FAILED) adapter->arena = NULL;
    if (!adapter->arena || !adapter->low_ranks) {
        baton_adapter_destroy(adapter);
        return NULL;
    }
#if defined(MADV_HUGEPAGE)
    madvise(adapter->arena, adapter->arena_bytes, MADV_HUGEPAGE);
#endif
    for (size_t i = 0; i < count; i++)
        if (sources[i].a) pack_low_rank(adapter, adapter->low_ranks + i, sources + i, i % ADAPTED == ADAPT_GATE_UP, kind);
    return adapter;
}

/* Returns the matrices of a row's adapter for one linear, or NULL. */
INLINE const struct low_rank *low_rank_at(const struct adapter *adapter, size_t layer, size_t linear) {
    if (!adapter) return NULL;
    const struct low_rank *low_rank = adapter->low_ranks + layer * ADAPTED + linear;
    return low_rank->rank ? low_rank : NULL;
}

/* Returns total + the products of 2 * LANES numbers of bfloat16, or of LANES numbers of float32. */
INLINE floats dot_words(floats total, words left, words right, const int kind) {
    if (kind == FLOAT32) return total + (floats)left * (floats)right;
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)right);
#else
    total += (floats)(left << 16) * (floats)(right << 16);
    return total + (floats)(left & 0xffff0000u) * (floats)(right & 0xffff0000u);
#endif
}

INLINE floats load_kind(const char *from, size_t index, const int kind) {
    if (kind == FLOAT32) return load((const float *)from + index);
    loose_halves narrow_values = *(const loose_halves *)((const bfloat16 *)from + index);
    return (floats)(__builtin_convertvector((halves)narrow_values, words) << 16);
}

/*
 * Computes ranks `first` to `last` of the product of one row of float32 with A. It is the input of a quantized product,
 * before it is rounded.
 */
INLINE void shrink_floats(const struct low_rank *low_rank, const float *row, size_t first, size_t last, float *to,
                          const int kind) {
    const size_t stride = low_rank->stride;
    for (size_t rank = first; rank < last; rank++) {
        floats even = splat(0.0f), odd = splat(0.0f);
        for (size_t at = 0; at < stride; at += 2 * LANES) {
            even += load(row + at) * load_kind(low_rank->a, rank * stride + at, kind);
            odd += load(row + at + LANES) * load_kind(low_rank->a, rank * stride + at + LANES, kind);
        }
        to[rank] = sum(even + odd);
    }
}

/* The same for a row of the model's kind. The row is padded like those of activations. */
INLINE void shrink(const struct low_rank *low_rank, const char *row, size_t first, size_t last, float *to, const int kind) {
    const size_t bytes = low_rank->stride * item_bytes(kind);
    for (size_t rank = first; rank < last; rank++) {
        const char *a = low_rank->a + rank * bytes;
        floats even = splat(0.0f), odd = splat(0.0f);
        size_t at = 0;
        for (; at + 2 * VECTOR_BYTES <= bytes; at += 2 * VECTOR_BYTES) {
            even = dot_words(even, load_words(row + at), load_words(a + at), kind);
            odd = dot_words(odd, load_words(row + at + VECTOR_BYTES), load_words(a + at + VECTOR_BYTES), kind);
        }
        if (at < bytes) even = dot_words(even, load_words(row + at), load_words(a + at), kind);
        to[rank] = sum(even + odd);
    }
}

/* Returns `total` + B times the `shrunk` numbers of a row, for the outputs of one strip. */
INLINE floats expand(const struct low_rank *low_rank, size_t strip_index, const float *shrunk, floats total, const int kind) {
    const struct strip strip = low_rank->strips[strip_index];
    for (size_t rank = 0; rank < strip.count; rank++)
        total += load_kind(low_rank->b, strip.at + rank * LANES, kind) * splat(shrunk[strip.first + rank]);
    return total;
}

#endif
