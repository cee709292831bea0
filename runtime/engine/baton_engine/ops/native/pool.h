/*
 * A thread pool for the phases of a step; threads sleep between steps.
 *
 * A step is a sequence of phases. A phase has a number of chunks, which run in any order, and begins when all chunks of
 * the previous phase are done. There is no leading thread: one atomic word holds phase, number of chunks and next
 * chunk. A thread takes a chunk by incrementing the word, and the thread that finishes the last chunk opens the next
 * phase. A thread that the system does not schedule therefore delays the others only if it holds a chunk, and the
 * caller can finish a step without other threads. Waiting threads spin for a bounded time, then sleep. Within a step
 * they do not yield, because on a busy machine that costs a whole time slice for a wait of microseconds.
 *
 * Workers of one machine lend each other the cores that they do not use. A pool has threads of its own, which always
 * run, and spare threads for the other workers' cores. Each worker writes into a seat in shared memory when it computes.
 * A spare thread looks there before each chunk, and sleeps while the cores' owners compute. It thus gives a core back
 * after one chunk, and never holds a chunk while it waits for a core.
 *
 * A worker may also leave its cores to others for a part of the time in which they compute: it rests between two of its
 * steps. It does so for workers that never rest, so that two that rest do not wait for each other.
 */
#ifndef BATON_POOL_H
#define BATON_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* The word: 24 bits of phase number, then 20 bits of chunk count, then 20 bits of next chunk. */
#define CHUNK_BITS 20

/* Threads that wait within a step spin, because waking a sleeping thread takes as long as many phases. */
#define BUSY_SPIN_NANOSECONDS 500000
/* Between consecutive steps they spin and yield for about the time until the next step ... */
#define NEXT_STEP_NANOSECONDS 1000000
/* ... and only briefly if steps are not consecutive. */
#define IDLE_SPIN_NANOSECONDS 50000

/* A worker lends its cores after this pause, which is longer than that between two of its steps ... */
#define LEND_NANOSECONDS 10000000
/* ... and if it died or was stopped within a step, after this time, in which the slowest phase makes progress. */
#define SILENT_NANOSECONDS 10000000000

/* A rest is long enough for threads to wake up in it. */
#define SHORTEST_REST_NANOSECONDS 1000000
/* A worker that rests looks this often whether the others still compute. */
#define LOOK_NANOSECONDS 500000

/* What a worker does, as its seat says. */
enum { BETWEEN_STEPS, WITHIN_STEP, RESTING };

/* What a worker tells the others. All zero: nobody took the seat. */
struct seat {
    _Alignas(64) _Atomic int64_t threads; /* the worker's own */
    _Atomic int64_t doing; /* WITHIN_STEP within a step, BETWEEN_STEPS between two, RESTING: its cores are the others' */
    _Atomic int64_t at; /* when it last began a phase, a rest, or ended a step */
    _Atomic int64_t yields; /* whether it rests for workers that do not */
};

/* The seats of all workers of this machine. */
struct lending {
    struct seat *seats; /* NULL: no other worker */
    int64_t count, own;
    int64_t cores; /* of all workers together */
    double rest; /* time of a rest per time of steps, while others compute */
};

struct job {
    void *self;
    size_t phases;
    size_t (*chunks)(void *self, size_t phase); /* at least 1, far below 2 ** CHUNK_BITS */
    void (*run)(void *self, size_t phase, size_t chunk, size_t thread); /* thread: 0 is the caller, others from 1 */
    int interruptible; /* whether `interrupted` ends it after the phase in progress */
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    size_t number; /* from 1; 0 is the caller */
};

struct pool {
    int threads; /* including the caller and the spare ones */
    size_t own; /* threads whose number is below are the worker's own */
    struct lending lending;
    struct worker *workers;
    const struct job *job;
    size_t phase; /* phase of the job; changed only between phases */
    _Atomic int interrupted;
    int64_t ended; /* time at which the last job ended */
    int64_t owed; /* time for which the worker has to rest */
    _Atomic int64_t idle_spin;
    _Alignas(64) _Atomic uint64_t word;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int spare_sleepers;
    _Atomic int stopping;
    pthread_mutex_t mutex;
    pthread_cond_t changed, spare_changed;
};

static inline uint32_t next_of(uint64_t word) { return (uint32_t)(word & ((1u << CHUNK_BITS) - 1)); }
static inline uint32_t count_of(uint64_t word) { return (uint32_t)(word >> CHUNK_BITS & ((1u << CHUNK_BITS) - 1)); }
static inline uint64_t phase_of(uint64_t word) { return word >> (2 * CHUNK_BITS); }
static inline int exhausted(uint64_t word) { return next_of(word) >= count_of(word); }

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Returns whether a worker with this seat computes at `now`: it is within a step, or will be soon. */
static int computes(const struct seat *seat, int64_t now) {
    const int64_t doing = atomic_load_explicit(&seat->doing, memory_order_relaxed);
    const int64_t most = doing == WITHIN_STEP ? SILENT_NANOSECONDS : doing == BETWEEN_STEPS ? LEND_NANOSECONDS : 0;
    return now - atomic_load_explicit(&seat->at, memory_order_relaxed) < most;
}

static int rests(const struct seat *seat, int64_t now) {
    const int64_t silent = now - atomic_load_explicit(&seat->at, memory_order_relaxed);
    return atomic_load_explicit(&seat->doing, memory_order_relaxed) == RESTING && silent < SILENT_NANOSECONDS;
}

/*
 * Returns how many spare threads may run at `now`. Workers that compute share what those leave that do not. Cores of
 * those that rest are for the workers that never do.
 */
static int64_t lent(const struct lending *lending, int64_t now) {
    if (!lending->seats) return 0;
    const struct seat *own = &lending->seats[lending->own];
    int64_t taken = atomic_load_explicit(&own->threads, memory_order_relaxed), resting = 0, workers = 1, steady = 1;
    for (int64_t i = 0; i < lending->count; i++) {
        const struct seat *seat = &lending->seats[i];
        const int64_t threads = atomic_load_explicit(&seat->threads, memory_order_relaxed);
        if (i == lending->own || threads <= 0) continue;
        if (computes(seat, now)) {
            taken += threads, workers++;
            steady += !atomic_load_explicit(&seat->yields, memory_order_relaxed);
        } else if (rests(seat, now))
            taken += threads, resting += threads;
    }
    const int64_t idle = lending->cores > taken ? (lending->cores - taken) / workers : 0;
    return idle + (atomic_load_explicit(&own->yields, memory_order_relaxed) ? 0 : resting / steady);
}

static int is_barred(const struct pool *pool, size_t thread) {
    return thread >= pool->own && (int64_t)(thread - pool->own) >= lent(&pool->lending, nanoseconds());
}

/* Returns whether a worker for which this one rests computes at `now`. */
static int others_compute(const struct lending *lending, int64_t now) {
    for (int64_t i = 0; lending->seats && i < lending->count; i++) {
        const struct seat *seat = &lending->seats[i];
        const int yields = atomic_load_explicit(&seat->yields, memory_order_relaxed) != 0;
        if (i != lending->own && !yields && computes(seat, now)) return 1;
    }
    return 0;
}

/* Tells the other workers what this one does. */
static void tell(const struct pool *pool, int64_t doing) {
    if (!pool->lending.seats) return;
    struct seat *seat = &pool->lending.seats[pool->lending.own];
    atomic_store_explicit(&seat->at, nanoseconds(), memory_order_relaxed);
    atomic_store_explicit(&seat->doing, doing, memory_order_relaxed);
}

/* Leaves the cores to the workers that compute, for the time that is owed. A pause was a rest, too. */
static void rest(struct pool *pool, const struct job *job) {
    const int64_t began = nanoseconds(), paused = began - pool->ended;
    if (paused >= LEND_NANOSECONDS) pool->owed -= paused < pool->owed ? paused : pool->owed;
    if (pool->owed < SHORTEST_REST_NANOSECONDS) return;
    const int64_t end = began + pool->owed;
    pool->owed = 0;
    for (int64_t now = began; now < end && others_compute(&pool->lending, now); now = nanoseconds()) {
        if (job->interruptible && atomic_load(&pool->interrupted)) return;
        if (now == began) tell(pool, RESTING);
        const int64_t pause = end - now < LOOK_NANOSECONDS ? end - now : LOOK_NANOSECONDS;
        nanosleep(&(struct timespec){.tv_nsec = pause}, NULL);
    }
}

/* Publishes a new word; wakes sleeping threads if it has work for them or ends the job. */
static void announce(struct pool *pool, uint32_t count, int wake) {
    tell(pool, count > 0 ? WITHIN_STEP : BETWEEN_STEPS);
    uint64_t phase = phase_of(atomic_load_explicit(&pool->word, memory_order_relaxed)) + 1;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store(&pool->word, phase << (2 * CHUNK_BITS) | (uint64_t)count << CHUNK_BITS);
    if (wake && atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->changed);
        pthread_mutex_unlock(&pool->mutex);
    }
    if (count && atomic_load(&pool->spare_sleepers) && lent(&pool->lending, nanoseconds())) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->spare_changed);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Opens the next phase; phases with a single chunk are run immediately by this thread. */
static void advance(struct pool *pool, size_t thread) {
    const struct job *job = pool->job;
    for (; pool->phase < job->phases && !(job->interruptible && atomic_load(&pool->interrupted)); pool->phase++) {
        size_t count = job->chunks(job->self, pool->phase);
        if (count > 1) {
            announce(pool, (uint32_t)count, 1);
            return;
        }
        job->run(job->self, pool->phase, 0, thread);
    }
    pool->job = NULL;
    announce(pool, 0, 1);
}

/* Runs one chunk if the open phase has one left. */
static int take(struct pool *pool, size_t thread) {
    if (exhausted(atomic_load_explicit(&pool->word, memory_order_relaxed))) return 0;
    uint64_t ticket = atomic_fetch_add(&pool->word, 1);
    if (exhausted(ticket)) return 0;
    /* The phase stays open until this chunk is done, so job and phase cannot change. */
    pool->job->run(pool->job->self, pool->phase, next_of(ticket), thread);
    if (atomic_fetch_add(&pool->done, 1) + 1 == count_of(ticket)) {
        pool->phase++;
        advance(pool, thread);
    }
    return 1;
}

/* Returns when the phase is no longer that of `word` and the thread may run, or when the pool stops. */
static void await_change(struct pool *pool, uint64_t word, size_t thread) {
    const uint64_t phase = phase_of(word);
    const uint32_t count = count_of(word);
    const int spare = thread >= pool->own;
    _Atomic int *sleepers = spare ? &pool->spare_sleepers : &pool->sleepers;
    const int64_t most = count ? BUSY_SPIN_NANOSECONDS : atomic_load_explicit(&pool->idle_spin, memory_order_relaxed);
    int64_t began = nanoseconds(), waited = 0;
    while (waited < most && !is_barred(pool, thread)) {
        for (int i = 0; i < 32; i++) {
            if (phase_of(atomic_load_explicit(&pool->word, memory_order_acquire)) != phase) return;
            pause_briefly();
        }
        if (atomic_load_explicit(&pool->stopping, memory_order_relaxed)) return;
        waited = nanoseconds() - began;
        if (!count) sched_yield();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(sleepers, 1);
    while ((phase_of(atomic_load(&pool->word)) == phase || is_barred(pool, thread)) && !atomic_load(&pool->stopping))
        pthread_cond_wait(spare ? &pool->spare_changed : &pool->changed, &pool->mutex);
    atomic_fetch_sub(sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *work(void *argument) {
    const struct worker *self = argument;
    struct pool *pool = self->pool;
    while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (is_barred(pool, self->number) || !take(pool, self->number)) await_change(pool, word, self->number);
    }
    return NULL;
}

/* Runs all phases of `job`; returns 0 if it was interrupted. Calls must not overlap. */
static int pool_run(struct pool *pool, const struct job *job) {
    int in_a_run = nanoseconds() - pool->ended < NEXT_STEP_NANOSECONDS;
    rest(pool, job);
    const int64_t began = nanoseconds();
    atomic_store_explicit(&pool->idle_spin, in_a_run ? NEXT_STEP_NANOSECONDS : IDLE_SPIN_NANOSECONDS, memory_order_relaxed);
    pool->phase = 0;
    pool->job = job;
    tell(pool, WITHIN_STEP);
    advance(pool, 0);
    for (;;) {
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (count_of(word) == 0) break;
        if (!take(pool, 0)) await_change(pool, word, 0);
    }
    pool->ended = nanoseconds();
    if (others_compute(&pool->lending, pool->ended))
        pool->owed += (int64_t)(pool->lending.rest * (double)(pool->ended - began));
    return pool->phase == job->phases;
}

/* `threads` of its own and so many `spare` ones, which run on the cores that `lending` leaves. */
static struct pool *pool_create(int threads, int spare, struct lending lending) {
    struct pool *pool = aligned_alloc(64, (sizeof(struct pool) + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pthread_cond_init(&pool->spare_changed, NULL);
    pool->own = (size_t)threads;
    if (spare) pool->lending = lending;
    if (spare) atomic_store(&lending.seats[lending.own].yields, lending.rest > 0);
    if (spare) atomic_store(&lending.seats[lending.own].threads, threads);
    threads += spare;
    pool->workers = calloc((size_t)threads, sizeof(struct worker));
    pool->threads = 1;
    /* If the system creates fewer threads than requested, the pool is slower but works. */
    while (pool->workers && pool->threads < threads) {
        struct worker *worker = &pool->workers[pool->threads - 1];
        worker->pool = pool, worker->number = (size_t)pool->threads;
        if (pthread_create(&worker->thread, NULL, work, worker)) break;
        pool->threads++;
    }
    return pool;
}

static void pool_destroy(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stopping, 1);
    pthread_cond_broadcast(&pool->changed);
    pthread_cond_broadcast(&pool->spare_changed);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->changed);
    pthread_cond_destroy(&pool->spare_changed);
    free(pool->workers);
    free(pool);
}

#endif
