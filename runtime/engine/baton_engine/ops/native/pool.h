/*
 * A thread pool for the phases of a step; threads sleep between steps.
 *
 * A step is a sequence of phases. A phase has a number of chunks, which run in any order, and begins when all chunks of
 * the previous phase are done. There is no leading thread: one atomic word holds phase, number of chunks and next
 * chunk. A thread takes a chunk by incrementing the word, and the thread that finishes the last chunk opens the next
 * phase. A thread that the system does not schedule therefore delays the others only if it holds a chunk, and the
 * caller can finish a step without other threads. Waiting threads spin for a bounded time, then sleep. Within a step
 * they do not yield, because on a busy machine that costs a whole time slice for a wait of microseconds.
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

struct job {
    void *self;
    size_t phases;
    size_t (*chunks)(void *self, size_t phase); /* at least 1, far below 2 ** CHUNK_BITS */
    void (*run)(void *self, size_t phase, size_t chunk, size_t thread); /* thread: 0 is the caller, others from 1 */
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    size_t number; /* from 1; 0 is the caller */
};

struct pool {
    int threads; /* including the caller */
    struct worker *workers;
    const struct job *job;
    size_t phase; /* phase of the job; changed only between phases */
    int64_t ended; /* time at which the last job ended */
    _Atomic int64_t idle_spin;
    _Alignas(64) _Atomic uint64_t word;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int stopping;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
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

/* Publishes a new word; wakes sleeping threads if it has work for them or ends the job. */
static void announce(struct pool *pool, uint32_t count, int wake) {
    uint64_t phase = phase_of(atomic_load_explicit(&pool->word, memory_order_relaxed)) + 1;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store(&pool->word, phase << (2 * CHUNK_BITS) | (uint64_t)count << CHUNK_BITS);
    if (wake && atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->changed);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Opens the next phase; phases with a single chunk are run immediately by this thread. */
static void advance(struct pool *pool, size_t thread) {
    const struct job *job = pool->job;
    for (; pool->phase < job->phases; pool->phase++) {
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

/* Returns when the phase is no longer that of `word`, or when the pool stops. */
static void await_change(struct pool *pool, uint64_t word) {
    const uint64_t phase = phase_of(word);
    const uint32_t count = count_of(word);
    const int64_t most = count ? BUSY_SPIN_NANOSECONDS : atomic_load_explicit(&pool->idle_spin, memory_order_relaxed);
    int64_t began = nanoseconds(), waited = 0;
    while (waited < most) {
        for (int i = 0; i < 32; i++) {
            if (phase_of(atomic_load_explicit(&pool->word, memory_order_acquire)) != phase) return;
            pause_briefly();
        }
        if (atomic_load_explicit(&pool->stopping, memory_order_relaxed)) return;
        waited = nanoseconds() - began;
        if (!count) sched_yield();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (phase_of(atomic_load(&pool->word)) == phase && !atomic_load(&pool->stopping))
        pthread_cond_wait(&pool->changed, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *work(void *argument) {
    const struct worker *self = argument;
    struct pool *pool = self->pool;
    while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (!take(pool, self->number)) await_change(pool, word);
    }
    return NULL;
}

/* Runs all phases of `job`. Calls must not overlap. */
static void pool_run(struct pool *pool, const struct job *job) {
    int in_a_run = nanoseconds() - pool->ended < NEXT_STEP_NANOSECONDS;
    atomic_store_explicit(&pool->idle_spin, in_a_run ? NEXT_STEP_NANOSECONDS : IDLE_SPIN_NANOSECONDS, memory_order_relaxed);
    pool->phase = 0;
    pool->job = job;
    advance(pool, 0);
    for (;;) {
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (count_of(word) == 0) break;
        if (!take(pool, 0)) await_change(pool, word);
    }
    pool->ended = nanoseconds();
}

static struct pool *pool_create(int threads) {
    struct pool *pool = aligned_alloc(64, (sizeof(struct pool) + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
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
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->changed);
    free(pool->workers);
    free(pool);
}

#endif
