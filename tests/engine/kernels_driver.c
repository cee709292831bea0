/*
 * Runs the decoder's passes without Python, so that the sanitizers of a C compiler can watch them.
 *
 * For random models and batches, four threads must write the same logits, states and cache as one thread does, bit by
 * bit. Two of the four are on cores that another worker lends and takes back all the time, and in some of their passes
 * memory is exhausted. Exits with 1 and says which case differs otherwise.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>

static int left_to_fail; /* allocations up to the one that fails; 0: none fails */

static int has_memory(void) { return !left_to_fail || --left_to_fail; }

static void *calloc_or_fail(size_t count, size_t size) { return has_memory() ? calloc(count, size) : NULL; }

static int memalign_or_fail(void **at, size_t alignment, size_t size) { return !has_memory() || posix_memalign(at, alignment, size); }

#define calloc calloc_or_fail
#define posix_memalign memalign_or_fail

#define SHARED_PACKING ((size_t)1) /* all threads pack all weights */
#ifndef RANDOM_BATCHES
#define RANDOM_BATCHES 6 /* for each model */
#endif
#include "decoder.c"

#include <stdio.h>

enum { BLOCK_SIZE = 16, BLOCKS = 40, MOST_ROWS = 6, MOST_TOKENS = 200 };

static uint32_t state = 1;

static uint32_t draw(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}

/* `count` numbers of `kind` between -0.5 and 0.5. */
static void *numbers(size_t count, int kind) {
    char *all = zeros(round_up(count * item_bytes(kind), 64) + 64);
    for (size_t i = 0; all && i < count; i++) {
        float value = (float)draw(1 << 16) / (1 << 16) - 0.5f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (kind == BFLOAT16) ((bfloat16 *)all)[i] = (bfloat16)(bits >> 16);
        else ((float *)all)[i] = value;
    }
    return all;
}

static int64_t stored_format; /* of the matrices of the next model */

static int is_matrix(enum place place) {
    return place == QKV || place == OUTPUT || place == GATE_UP || place == DOWN || place == HEAD || place == EMBEDDING;
}

/* Random blocks whose scales are between 2 ** -8 and 2 ** -6. */
static uint8_t *blocks_of(size_t outputs, size_t inputs) {
    const struct layout layout = layout_of((enum format)stored_format);
    const size_t count = outputs * inputs / BLOCK / layout.stored_blocks;
    uint8_t *all = zeros(count * layout.stored + 64);
    for (size_t i = 0; i < count * layout.stored; i++) all[i] = (uint8_t)draw(256);
    for (size_t block = 0; block < count; block++) {
        uint8_t *scale = all + block * layout.stored + (stored_format == Q6_K ? layout.stored - 2 : 0);
        scale[1] = 0x1c | (scale[1] & 0x83);
        if (layout.header == 4 || stored_format == Q4_1 || stored_format == Q5_1) scale[3] = 0x1c | (scale[3] & 0x83);
    }
    return all;
}

static void fill(struct model *model, enum place place, int64_t layer, int64_t outputs, int64_t inputs, int biased) {
    const int kind = inputs > 1 ? (int)model->spec.kind : FLOAT32; /* norms */
    const int quantized = stored_format && is_matrix(place);
    void *from = quantized ? (void *)blocks_of((size_t)outputs, (size_t)inputs) : numbers((size_t)(outputs * inputs), kind);
    void *bias = biased ? numbers((size_t)outputs, kind) : NULL;
    const struct part part = {stored_format, outputs, from};
    if (!(quantized ? baton_load_quantized(model, layer, place, &part, 1, bias, inputs)
                    : baton_load(model, layer, place, from, bias, outputs, inputs))) {
        printf("weight %d does not fit\n", (int)place);
        exit(1);
    }
    free(from), free(bias);
}

/* Gate and up, or down, of all experts of a layer. */
static void fill_experts(struct model *model, enum place place, int64_t layer, int64_t outputs, int64_t inputs) {
    struct part *parts = calloc((size_t)model->spec.experts, sizeof *parts);
    for (int64_t expert = 0; parts && expert < model->spec.experts; expert++) {
        const size_t rows = (size_t)outputs, columns = (size_t)inputs;
        const void *from = stored_format ? (void *)blocks_of(rows, columns) : numbers(rows * columns, (int)model->spec.kind);
        parts[expert] = (struct part){stored_format, outputs, from};
    }
    if (!parts || !baton_load_experts(model, layer, place, parts, 1)) {
        printf("experts %d do not fit\n", (int)place);
        exit(1);
    }
    for (int64_t expert = 0; expert < model->spec.experts; expert++) free((void *)parts[expert].rows);
    free(parts);
}

static void fill_mlp(struct model *model, int64_t layer) {
    const struct spec *spec = &model->spec;
    if (!spec->experts || layer < spec->layers - spec->expert_layers) {
        fill(model, GATE_UP, layer, 2 * spec->intermediate, spec->hidden, layer % 2 == 0);
        fill(model, DOWN, layer, spec->hidden, spec->intermediate, 1);
        return;
    }
    float *router = numbers((size_t)(spec->experts * spec->hidden), FLOAT32);
    if (!router || !baton_load_router(model, layer, router)) exit(1);
    free(router);
    fill_experts(model, GATE_UP, layer, 2 * spec->expert_intermediate, spec->hidden);
    fill_experts(model, DOWN, layer, spec->hidden, spec->expert_intermediate);
}

enum { OWN, OTHER, SEATS };

static struct seat seats[SEATS];
static _Atomic int ended;
static struct model *interruptible; /* a model that computes a pass */
static pthread_mutex_t of_interruptible = PTHREAD_MUTEX_INITIALIZER;

static void let_interrupt(struct model *model) {
    pthread_mutex_lock(&of_interruptible);
    interruptible = model;
    pthread_mutex_unlock(&of_interruptible);
}

/* The other worker: it computes and pauses, or dies within a step, and comes back. Passes are interrupted beside it. */
static void *compute_and_pause(void *argument) {
    (void)argument;
    atomic_store(&seats[OTHER].threads, 2);
    for (int i = 0; !atomic_load(&ended); i++) {
        atomic_store(&seats[OTHER].doing, i % 3);
        atomic_store(&seats[OTHER].at, nanoseconds() - (i % 5 ? LEND_NANOSECONDS : i % 3 ? SILENT_NANOSECONDS : 0));
        for (volatile int pause = 0; pause < i % 7 * 1000; pause++) {}
        pthread_mutex_lock(&of_interruptible);
        if (interruptible) baton_interrupt(interruptible);
        pthread_mutex_unlock(&of_interruptible);
    }
    return NULL;
}

static struct model *make(struct spec spec, int64_t threads, uint32_t seed) {
    spec.threads = threads;
    if (threads > 1) {
        spec.threads = spec.spare = threads / 2;
        spec.seats = (int64_t)(intptr_t)seats, spec.seat_count = SEATS, spec.seat = OWN, spec.rest = 1;
    }
    struct model *model = baton_create(&spec);
    const int64_t qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim, attended = spec.heads * spec.head_dim;
    if (!model) exit(1);
    state = seed;
    for (int64_t layer = 0; layer < spec.layers; layer++) {
        if (!spec.joint_norm) fill(model, ATTENTION_NORM, layer, spec.hidden, 1, 0);
        if (!spec.joint_norm) fill(model, MLP_NORM, layer, spec.hidden, 1, 0);
        if (spec.post_norm) fill(model, ATTENTION_POST_NORM, layer, spec.hidden, 1, 0);
        if (spec.post_norm) fill(model, MLP_POST_NORM, layer, spec.hidden, 1, 0);
        if (layer % 2) fill(model, Q_NORM, layer, spec.head_dim * (spec.joint_norm ? spec.heads : 1), 1, 0);
        if (layer % 2) fill(model, K_NORM, layer, spec.head_dim * (spec.joint_norm ? spec.kv_heads : 1), 1, 0);
        fill(model, QKV, layer, qkv, spec.hidden, 1);
        fill(model, OUTPUT, layer, spec.hidden, attended, 0);
        fill_mlp(model, layer);
        baton_set_attention(model, layer, layer == 1 ? 20 : 0, spec.rotated == spec.head_dim ? FULL : layer % 3);
    }
    fill(model, FINAL_NORM, 0, spec.hidden, 1, 0);
    fill(model, HEAD, 0, spec.vocab, spec.hidden, 0);
    if (!spec.tied) fill(model, EMBEDDING, 0, spec.vocab, spec.hidden, 0);
    return model;
}

/* Some parts of some linears, each with a rank of its own. */
static struct adapter *make_adapter(const struct model *model) {
    const struct spec *spec = &model->spec;
    const int64_t dim = spec->head_dim, attended = spec->heads * dim, keys = spec->kv_heads * dim;
    const int64_t sizes[ADAPTED][MOST_PARTS] = {
        {attended, keys, keys}, {spec->hidden}, {spec->intermediate, spec->intermediate}, {spec->hidden}};
    const int64_t inputs[ADAPTED] = {spec->hidden, attended, spec->hidden, spec->intermediate};
    struct low_rank_source *sources = calloc((size_t)spec->layers * ADAPTED, sizeof *sources);
    for (int64_t i = 0; sources && i < spec->layers * ADAPTED; i++) {
        struct low_rank_source *source = sources + i;
        source->inputs = inputs[i % ADAPTED];
        for (int64_t part = 0; part < MOST_PARTS; part++) {
            const int64_t outputs = sizes[i % ADAPTED][part], rank = draw(4) * draw(7);
            if (rank && outputs) {
                void *b = numbers((size_t)(outputs * rank), (int)spec->kind);
                source->part[source->parts++] = (struct low_rank_part){b, source->outputs, outputs, source->rank, rank};
                source->rank += rank;
            }
            source->outputs += outputs;
        }
        if (source->rank) source->a = numbers((size_t)(source->rank * source->inputs), (int)spec->kind);
    }
    struct adapter *adapter = baton_adapter_create(model, sources);
    for (int64_t i = 0; i < spec->layers * ADAPTED; i++) {
        for (int64_t part = 0; part < sources[i].parts; part++) free((void *)sources[i].part[part].b);
        free((void *)sources[i].a);
    }
    free(sources);
    return adapter;
}

struct results {
    float *logits, *states, *projected;
    char *cache;
};

static struct results run(struct model *model, struct pass pass, const char *cache, size_t cache_bytes, int fails) {
    const size_t vocab = (size_t)model->spec.vocab, wanted = (size_t)pass.wanted;
    struct results results = {
        .logits = zeros(wanted * vocab * 4 + 64),
        .states = zeros(wanted * (size_t)pass.states_stride * 4 + 64),
        .projected = zeros(wanted * vocab * 4 + 64),
        .cache = zeros(cache_bytes),
    };
    memcpy(results.cache, cache, cache_bytes);
    pass.logits = results.logits, pass.states = results.states, pass.cache = results.cache;
    struct pass head = {.wanted = pass.wanted, .logits = results.projected, .states = results.states,
                        .states_stride = pass.states_stride};
    let_interrupt(model);
    left_to_fail = fails;
    int result = baton_forward(model, &pass);
    left_to_fail = 0;
    let_interrupt(NULL);
    if (result == NO_MEMORY && fails) result = INTERRUPTED;
    while (result == INTERRUPTED) result = baton_forward(model, &pass);
    if (result || (wanted && baton_project(model, &head))) exit(1);
    return results;
}

static void forget(struct results results) {
    free(results.logits), free(results.states), free(results.projected), free(results.cache);
}

struct shape {
    int64_t rows, tokens; /* of each row; 0: random */
    uint32_t wanted_of;   /* one of so many tokens is wanted */
    int fails;            /* the allocation of the first attempt that fails, from 1; 0: none */
};

static struct shape random_shape(void) {
    return (struct shape){1 + draw(MOST_ROWS), 0, draw(3) ? 4 : 1, draw(3) ? 0 : 1 + (int)draw(28)};
}

/* One random batch of this shape through both models. */
static int differ(struct model *one, struct model *four, struct adapter *const *adapters, struct shape shape) {
    const struct spec *spec = &one->spec;
    const int kind = (int)spec->kind;
    int64_t ids[MOST_TOKENS], positions[MOST_TOKENS], slots[MOST_TOKENS], starts[MOST_ROWS + 1] = {0}, wanted[MOST_TOKENS];
    int32_t blocks[MOST_ROWS * BLOCKS] = {0};
    struct pass pass = {.rows = shape.rows, .width = BLOCKS / MOST_ROWS, .block_size = BLOCK_SIZE};
    const struct adapter *of_rows[MOST_ROWS];
    if (shape.tokens || draw(4)) pass.adapters = of_rows;
    int32_t next = 1;
    for (int64_t row = 0; row < pass.rows; row++) {
        const int64_t from = draw(60), count = shape.tokens ? shape.tokens : draw(3) ? 1 : 1 + draw(30);
        for (int64_t i = 0; i < pass.width; i++) blocks[row * pass.width + i] = next++;
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = pass.tokens++, position = from + i;
            ids[token] = draw((uint32_t)spec->vocab);
            positions[token] = position;
            slots[token] = blocks[row * pass.width + position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE;
            if (draw(shape.wanted_of) == 0) wanted[pass.wanted++] = token;
        }
        starts[row + 1] = pass.tokens;
        of_rows[row] = draw(3) ? adapters[draw(2)] : NULL;
    }
    const size_t items = (size_t)(BLOCKS * spec->layers * 2 * spec->kv_heads * BLOCK_SIZE * spec->head_dim);
    const size_t vocab = (size_t)spec->vocab, angles = (size_t)(BLOCKS * BLOCK_SIZE * spec->head_dim / 2);
    float *cosines = numbers(angles, FLOAT32), *sines = numbers(angles, FLOAT32);
    char *cache = numbers(items, kind);
    pass.ids = ids, pass.positions = positions, pass.slots = slots, pass.starts = starts, pass.blocks = blocks;
    pass.wanted_at = wanted, pass.cosines = cosines, pass.sines = sines, pass.sliding_cosines = sines, pass.sliding_sines = cosines;
    pass.cache_slots = BLOCKS * BLOCK_SIZE, pass.states_stride = (int64_t)round_up((size_t)spec->hidden, LANES);
    const size_t bytes = items * item_bytes(kind);
    struct results a = run(one, pass, cache, bytes, 0), b = run(four, pass, cache, bytes, shape.fails);
    const size_t logits = (size_t)pass.wanted * vocab * 4;
    const int bad = memcmp(a.logits, b.logits, logits) || memcmp(a.projected, b.projected, logits) ||
                    memcmp(a.cache, b.cache, bytes);
    forget(a), forget(b);
    free(cosines), free(sines), free(cache);
    return bad;
}

/* Returns whether one and four threads write the same for a model with these sizes. */
static int agree(struct spec spec, const char *name) {
    spec.epsilon = 1e-5, spec.nodes = 3;
    if (!spec.rotated) spec.rotated = spec.head_dim;
    spec.embedding_scale = spec.score_cap ? 3 : 1, spec.residual_scale = spec.joint_norm ? 0.5 : 1;
    spec.logit_scale = spec.score_cap ? 0.5 : 1, spec.score_scale = 0.3, spec.expert_scale = 1.5;
    struct model *one = make(spec, 1, 7), *four = make(spec, 4, 7);
    /* Adapters are only for weights that are not quantized. */
    struct adapter *adapters[] = {stored_format ? NULL : make_adapter(one), stored_format ? NULL : make_adapter(four)};
    int agreed = stored_format || (adapters[0] && adapters[1]);
    /* Without memory for a pass, the next one has fewer tokens, of which more are wanted. */
    agreed = agreed && !differ(one, four, adapters, (struct shape){MOST_ROWS, 30, 60, 0});
    agreed = agreed && !differ(one, four, adapters, (struct shape){MOST_ROWS, 20, 1, 1});
    for (int round = 0; agreed && round < RANDOM_BATCHES; round++) agreed = !differ(one, four, adapters, random_shape());
    if (!agreed) printf("%s, kind %d, format %d: four threads do not write what one writes\n", name, (int)spec.kind,
                        (int)stored_format);
    if (adapters[0]) baton_adapter_destroy(adapters[0]);
    if (adapters[1]) baton_adapter_destroy(adapters[1]);
    baton_destroy(one), baton_destroy(four);
    return agreed;
}

/* Of 8 cores, the worker with seat 0 has 2. */
static int lends_what_others_leave(void) {
    const int64_t now = 100 * SILENT_NANOSECONDS, paused = now - LEND_NANOSECONDS, dead = now - SILENT_NANOSECONDS;
    const struct {
        const char *name;
        int64_t threads, doing, at, more_threads, more_at, lent;
    } cases[] = {
        {"an empty seat", 0, BETWEEN_STEPS, 0, 0, 0, 6},
        {"never computed", 6, BETWEEN_STEPS, 0, 0, 0, 6},
        {"computes", 6, WITHIN_STEP, now, 0, 0, 0},
        {"rests", 6, RESTING, now, 0, 0, 6},
        {"died in a rest", 6, RESTING, dead, 0, 0, 6},
        {"rests for two", 2, RESTING, now, 4, now, 1},
        {"within a long phase", 6, WITHIN_STEP, dead + 1, 0, 0, 0},
        {"died within a step", 6, WITHIN_STEP, dead, 0, 0, 6},
        {"between two steps", 6, BETWEEN_STEPS, paused + 1, 0, 0, 0},
        {"paused", 6, BETWEEN_STEPS, paused, 0, 0, 6},
        {"two divide a third one's cores", 2, WITHIN_STEP, now, 4, 0, 2},
        {"two others compute", 2, WITHIN_STEP, now, 4, now, 0},
        {"more threads than cores", 8, WITHIN_STEP, now, 8, now, 0},
    };
    for (size_t nth = 0; nth < sizeof cases / sizeof *cases; nth++) {
        struct seat all[3] = {
            {.threads = 2, .doing = WITHIN_STEP, .at = now},
            {.threads = cases[nth].threads, .doing = cases[nth].doing, .at = cases[nth].at},
            {.threads = cases[nth].more_threads, .doing = WITHIN_STEP, .at = cases[nth].more_at},
        };
        const int64_t got = lent(&(struct lending){.seats = all, .count = 3, .own = 0, .cores = 8}, now);
        if (got != cases[nth].lent) printf("%s: %d cores are lent\n", cases[nth].name, (int)got);
        if (got != cases[nth].lent) return 0;
    }
    return 1;
}

static int rests_for_others_that_compute(void) {
    const int64_t now = 100 * SILENT_NANOSECONDS;
    const struct {
        const char *name;
        struct seat other;
        int rests;
    } cases[] = {
        {"no other", {0}, 0},
        {"within a step", {.threads = 1, .doing = WITHIN_STEP, .at = now}, 1},
        {"between two steps", {.threads = 1, .doing = BETWEEN_STEPS, .at = now}, 1},
        {"pauses", {.threads = 1, .doing = BETWEEN_STEPS, .at = now - LEND_NANOSECONDS}, 0},
        {"rests itself", {.threads = 1, .doing = RESTING, .at = now}, 0},
        {"within a step, and yields too", {.threads = 1, .doing = WITHIN_STEP, .at = now, .yields = 1}, 0},
        {"died within a step", {.threads = 1, .doing = WITHIN_STEP, .at = now - SILENT_NANOSECONDS}, 0},
    };
    for (size_t nth = 0; nth < sizeof cases / sizeof *cases; nth++) {
        struct seat all[2] = {{.threads = 1, .doing = WITHIN_STEP, .at = now, .yields = 1}, cases[nth].other};
        const struct lending lending = {.seats = all, .count = 2, .own = 0, .cores = 2, .rest = 1};
        if (others_compute(&lending, now) == cases[nth].rests) continue;
        printf("%s: others_compute is not %d\n", cases[nth].name, cases[nth].rests);
        return 0;
    }
    return 1;
}

static size_t two_chunks(void *self, size_t phase) {
    (void)self, (void)phase;
    return 2;
}

static void compute_a_moment(void *self, size_t phase, size_t chunk, size_t thread) {
    (void)self, (void)phase, (void)chunk, (void)thread;
    for (int64_t end = nanoseconds() + SHORTEST_REST_NANOSECONDS; nanoseconds() < end;) {}
}

/* Returns whether a rest is owed for steps beside others only, a pause counts as one, and an interrupt ends it. */
static int owes_rests_for_steps_beside_others(void) {
    const int64_t ever = INT64_MAX / 2;
    struct seat all[2] = {{0}, {.threads = 1}};
    struct pool *pool = pool_create(1, 1, (struct lending){.seats = all, .count = 2, .own = 0, .cores = 2, .rest = 1});
    const struct job job = {.phases = 1, .chunks = two_chunks, .run = compute_a_moment, .interruptible = 1};
    if (!pool) return 0;
    pool_run(pool, &job);
    const int64_t alone = pool->owed;
    all[1].doing = WITHIN_STEP;
    all[1].at = ever;
    pool_run(pool, &job);
    const int64_t beside = pool->owed;
    pool->ended -= beside + LEND_NANOSECONDS;
    rest(pool, &job);
    const int64_t paused = pool->owed, doing = all[0].doing;
    pool->owed = 60 * SILENT_NANOSECONDS, pool->ended = nanoseconds(), pool->interrupted = 1;
    rest(pool, &job);
    pool_destroy(pool);
    if (alone || beside < SHORTEST_REST_NANOSECONDS || paused || doing == RESTING)
        printf("owed: %d alone, %d beside others, %d after a pause\n", (int)alone, (int)beside, (int)paused);
    return !alone && beside >= SHORTEST_REST_NANOSECONDS && !paused && doing != RESTING;
}

/* Returns whether a row of infinities has NaN as its scale. The sums of its bytes overflow. */
static int rounds_infinities(void) {
    float row[BLOCK];
    struct rounded rounded;
    for (size_t i = 0; i < BLOCK; i++) row[i] = INFINITY;
    round_row(row, BLOCK, &rounded);
    if (!isnan(rounded.scale)) printf("a row of infinities has the scale %f\n", (double)rounded.scale);
    return isnan(rounded.scale);
}

/* 255 rows are no down projection of 256 outputs, though each panel has some of them. */
static int refuses_parts_that_do_not_add_up(void) {
    const struct spec spec = {.vocab = 1, .hidden = 256, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 64, .kind = BFLOAT16,
                              .intermediate = 256, .experts = 1, .chosen = 1, .expert_intermediate = 256, .expert_layers = 1,
                              .threads = 1, .nodes = 1};
    const struct part short_of[] = {{Q8_0, 128, NULL}, {Q8_0, 127, NULL}}, whole[] = {{Q8_0, 128, NULL}, {Q8_0, 128, NULL}};
    struct model *model = baton_create(&spec);
    if (!model || !baton_load_router(model, 0, NULL)) exit(1);
    const int refused = !baton_load_experts(model, 0, DOWN, short_of, 2) && baton_load_experts(model, 0, DOWN, whole, 2);
    if (!refused) printf("parts of an expert's matrix that do not add up to it are not what is refused\n");
    baton_destroy(model);
    return refused;
}

int main(void) {
    static const int64_t formats[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4};
    const struct spec specs[] = {
        {.vocab = 96, .hidden = 64, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16, .intermediate = 96, .tied = 1},
        {.vocab = 33, .hidden = 51, .layers = 3, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 77},
        {.vocab = 1, .hidden = 17, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 2, .intermediate = 1},
        {.vocab = 40, .hidden = 96, .layers = 1, .heads = 7, .kv_heads = 1, .head_dim = 80, .intermediate = 33},
        {.vocab = 35, .hidden = 51, .layers = 3, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 33, .rotated = 6,
         .post_norm = 1, .gelu = 1, .logit_cap = 9, .score_cap = 5},
        {.vocab = 35, .hidden = 51, .layers = 4, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 33, .rotated = 2,
         .post_norm = 1, .joint_norm = 1},
        {.vocab = 35, .hidden = 51, .layers = 3, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 33, .experts = 5,
         .chosen = 2, .expert_intermediate = 21, .expert_layers = 2, .normalized = 1},
    };
    pthread_t other;
    if (!baton_sound() || !lends_what_others_leave() || !rests_for_others_that_compute() || !owes_rests_for_steps_beside_others() || !rounds_infinities() ||
        !refuses_parts_that_do_not_add_up()) return 1;
    if (pthread_create(&other, NULL, compute_and_pause, NULL)) return 1;
    for (size_t nth = 0; nth < sizeof specs / sizeof *specs; nth++)
        for (int kind = FLOAT32; kind <= BFLOAT16; kind++)
            for (size_t way = 0; way < (kind == BFLOAT16 ? OCTETS : 1); way++) {
                struct spec spec = specs[nth];
                spec.kind = kind;
                for (size_t class = 0; class < ROW_CLASSES; class++)
                    spec.ways[class] = has_way(way, class ? class_rows[class - 1] + 1 : 1) ? (int64_t)way : PAIRS;
                if (!agree(spec, ways[way].name)) return 1;
            }
    for (size_t nth = 0; nth < sizeof formats / sizeof *formats; nth++)
        for (size_t way = OCTETS; way < WAYS; way++) {
            stored_format = formats[nth];
            struct spec spec = {.vocab = 40, .hidden = 256, .layers = 3, .heads = 4, .kv_heads = 2, .head_dim = 64,
                                .intermediate = 256, .kind = nth % 2, .tied = nth % 3 == 0, .experts = 5, .chosen = 2,
                                .expert_intermediate = 256, .expert_layers = 1 + nth % 2};
            for (size_t class = 0; class < ROW_CLASSES; class++) {
                const size_t rows = class == ROW_CLASSES - 1 ? OCTET_TILE_ROWS : class ? class_rows[class - 1] + 1 : 1;
                spec.octet_ways[class] = has_way(way, rows) ? (int64_t)way : OCTETS;
            }
            if (!agree(spec, ways[way].name)) return 1;
        }
    atomic_store(&ended, 1);
    return pthread_join(other, NULL);
}
