/*
 * Experts: the router's choice for each row, and products of the rows grouped by expert.
 *
 * Only weights of chosen experts are read, once for all of their rows. A row adds its results in the order of its own
 * choice, so that its numbers do not depend on the other rows. Inputs of quantized weights are rounded row by row: those
 * of gate and up before the rows are sorted, once for all experts of a row.
 */
#ifndef BATON_EXPERTS_H
#define BATON_EXPERTS_H

/* Chooses the experts of row `row` from its residual; the router's input is not rounded to the weights' kind. */
INLINE void route_row(const struct model *model, const struct layer *layer, const float *residual, size_t row) {
    const struct spec *spec = &model->spec;
    const struct expert_rows *rows = &model->expert_rows;
    const size_t hidden = (size_t)spec->hidden, count = (size_t)spec->experts, chosen = (size_t)spec->chosen;
    float scores[MOST_EXPERTS + LANES];
    floats squares = splat(0.0f), top = splat(HIDDEN_SCORE), all = splat(0.0f);
    for (size_t i = 0; i < hidden; i += LANES) squares += load(residual + i) * load(residual + i);
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)hidden + (float)spec->epsilon);
    for (size_t expert = 0; expert < count; expert++) {
        const float *router = layer->experts.router + expert * model->residual_stride;
        floats total = splat(0.0f);
        for (size_t i = 0; i < hidden; i += LANES)
            total += load(residual + i) * load(layer->mlp_norm + i) * load(router + i);
        scores[expert] = sum(total) * scale;
    }
    for (size_t expert = count; expert < round_up(count, LANES); expert++) scores[expert] = HIDDEN_SCORE;
    for (size_t i = 0; i < count; i += LANES) top = larger(top, load(scores + i));
    const float highest = largest(top);
    for (size_t i = 0; i < count; i += LANES) {
        floats score = load(scores + i);
        if (spec->sigmoid) score = 1.0f / (1.0f + exp2s(-larger(splat(-126.0f), score * LOG2_E)));
        else score = exp2s(larger(splat(-126.0f), (score - highest) * LOG2_E));
        store(scores + i, score);
    }
    for (size_t expert = count; expert < round_up(count, LANES); expert++) scores[expert] = 0.0f;
    for (size_t i = 0; i < count; i += LANES) all += load(scores + i);
    float total = spec->normalized ? 0.0f : spec->sigmoid ? 1.0f : sum(all);
    for (size_t nth = 0; nth < chosen; nth++) {
        size_t best = 0;
        for (size_t expert = 1; expert < count; expert++)
            if (scores[expert] > scores[best]) best = expert;
        rows->choices[row * chosen + nth] = (int32_t)best;
        rows->shares[row * chosen + nth] = scores[best];
        if (spec->normalized) total += scores[best];
        scores[best] = -1.0f;
    }
    for (size_t nth = 0; nth < chosen; nth++)
        rows->shares[row * chosen + nth] *= (float)spec->expert_scale / total;
}

/* Returns the product of the rows of one expert. */
static struct product product_of_expert(const struct model *model, size_t layer_index, size_t step, size_t expert) {
    const struct experts *experts = &model->layers[layer_index].experts;
    const struct expert_rows *rows = &model->expert_rows;
    const size_t item = item_bytes((int)model->spec.kind), first = (size_t)rows->starts[expert];
    const int gates = step == EXPERT_GATE, gated_kind = input_kind(experts->down + expert, (int)model->spec.kind);
    char *gated = rows->gated + first * rows->gated_stride * item_bytes(gated_kind);
    return (struct product){
        .weight = gates ? experts->gate_up + expert : experts->down + expert,
        .rows = gates ? rows->inputs + first * model->normed_stride * item : gated,
        .row_bytes = (gates ? model->normed_stride : rows->gated_stride) * item,
        .count = (size_t)rows->starts[expert + 1] - first,
        .mode = gates ? GATED : WRITE,
        .result = gates ? (void *)gated : (void *)(rows->results + first * model->residual_stride),
        .result_stride = gates ? rows->gated_stride : model->residual_stride,
        .scale = 1.0f,
        .result_kind = gated_kind,
        .rounded = (const struct rounded *)rows->inputs + first * model->expert_blocks,
        .rounded_stride = model->expert_blocks,
    };
}

/* Returns the chunks of the product of the rows of one expert. */
static size_t chunks_of_expert(const struct model *model, size_t layer_index, size_t step, size_t expert) {
    const struct product product = product_of_expert(model, layer_index, step, expert);
    if (!product.count) return 0;
    const struct cut cut = cut_product(model, &product);
    return cut.row_blocks * cut.runs;
}

/* Copies the input of gate and up to the sorted row `place`: a row of `normed`, or its rounded blocks. */
INLINE void gather_row(const struct model *model, const struct layer *layer, size_t place, const int kind) {
    const struct expert_rows *rows = &model->expert_rows;
    const size_t source = (size_t)rows->sources[place], row_bytes = model->normed_stride * item_bytes(kind);
    if (layer->experts.gate_up->quantized)
        memcpy((struct rounded *)rows->inputs + place * model->expert_blocks, model->rounded + source * model->rounded_stride,
               (size_t)model->spec.hidden / BLOCK * sizeof(struct rounded));
    else memcpy(rows->inputs + place * row_bytes, model->normed + source * row_bytes, row_bytes);
}

/* Sorts the choices of all rows by expert, and counts the chunks of the products. */
static void group_rows(const struct model *model, size_t layer_index, size_t count) {
    const struct expert_rows *rows = &model->expert_rows;
    const size_t experts = (size_t)model->spec.experts, choices = count * (size_t)model->spec.chosen;
    memset(rows->starts, 0, (experts + 1) * sizeof(int64_t));
    for (size_t choice = 0; choice < choices; choice++) rows->starts[rows->choices[choice] + 1]++;
    for (size_t expert = 0; expert < experts; expert++) {
        rows->starts[expert + 1] += rows->starts[expert];
        rows->next[expert] = rows->starts[expert];
    }
    for (size_t choice = 0; choice < choices; choice++) {
        const int64_t place = rows->next[rows->choices[choice]]++;
        rows->places[choice] = place, rows->sources[place] = (int64_t)(choice / (size_t)model->spec.chosen);
    }
    rows->gate_chunks[0] = rows->down_chunks[0] = 0;
    for (size_t expert = 0; expert < experts; expert++) {
        const size_t gates = chunks_of_expert(model, layer_index, EXPERT_GATE, expert);
        const size_t downs = chunks_of_expert(model, layer_index, EXPERT_CLOSE, expert);
        rows->gate_chunks[expert + 1] = rows->gate_chunks[expert] + (int64_t)gates;
        rows->down_chunks[expert + 1] = rows->down_chunks[expert] + (int64_t)downs;
    }
}

/* Returns the chunks of a step of a layer with experts, for `count` rows. */
static size_t chunks_of_experts(const struct model *model, size_t layer_index, size_t step, size_t count) {
    const struct expert_rows *rows = &model->expert_rows;
    switch (step) {
    case ROUTE:
    case COMBINE: return (count + NORM_ROWS - 1) / NORM_ROWS;
    case EXPERT_ROUND:
        if (!model->layers[layer_index].experts.down->quantized) return 1;
        return (count * (size_t)model->spec.chosen + NORM_ROWS - 1) / NORM_ROWS;
    case GATHER: return (count * (size_t)model->spec.chosen + NORM_ROWS - 1) / NORM_ROWS;
    case EXPERT_GATE: return (size_t)rows->gate_chunks[model->spec.experts];
    case EXPERT_CLOSE: return (size_t)rows->down_chunks[model->spec.experts];
    default: return 1;
    }
}

/* Runs a chunk of a step of a layer with experts. `residual` has `count` rows. */
INLINE void run_experts(const struct model *model, size_t layer_index, size_t step, size_t chunk, float *residual,
                        size_t count, size_t thread, const int kind) {
    const struct expert_rows *rows = &model->expert_rows;
    const struct layer *layer = model->layers + layer_index;
    const size_t chosen = (size_t)model->spec.chosen, stride = model->residual_stride, from = chunk * NORM_ROWS;
    const size_t to = from + NORM_ROWS < count ? from + NORM_ROWS : count;
    switch (step) {
    case ROUTE:
        for (size_t row = from; row < to; row++) route_row(model, layer, residual + row * stride, row);
        return;
    case GROUP: group_rows(model, layer_index, count); return;
    case GATHER:
        for (size_t place = from; place < from + NORM_ROWS && place < count * chosen; place++)
            gather_row(model, layer, place, kind);
        return;
    case EXPERT_ROUND: /* over the inputs of gate and up, which are not needed any more */
        for (size_t place = from; layer->experts.down->quantized && place < from + NORM_ROWS && place < count * chosen; place++)
            round_row((const float *)rows->gated + place * rows->gated_stride, (size_t)model->spec.expert_intermediate,
                      (struct rounded *)rows->inputs + place * model->expert_blocks);
        return;
    case COMBINE:
        for (size_t choice = from * chosen; choice < to * chosen; choice++) {
            const float *result = rows->results + (size_t)rows->places[choice] * stride, share = rows->shares[choice];
            float *sums = residual + choice / chosen * stride;
            for (size_t i = 0; i < (size_t)model->spec.hidden; i++) sums[i] += result[i] * share;
        }
        return;
    default: {
        const int64_t *chunks = step == EXPERT_GATE ? rows->gate_chunks : rows->down_chunks;
        const size_t expert = find(chunks, (size_t)model->spec.experts, (int64_t)chunk);
        const struct product product = product_of_expert(model, layer_index, step, expert);
        multiply_chunk(model, &product, chunk - (size_t)chunks[expert], thread, kind);
    }
    }
}

#endif
