/*
 * Packed weights that a file stores: their checksums, and an arena that maps the file or holds a copy of it.
 *
 * The layout of an arena depends on the model's sizes and formats only, so its bytes can be used at any address.
 */
#ifndef BATON_STORED_H
#define BATON_STORED_H

#include <errno.h>
#include <unistd.h>

#include "model.h"

#define PIECE_BYTES ((size_t)8 << 20) /* as in stored_weights.py */

typedef uint64_t lanes64 __attribute__((vector_size(64)));

INLINE lanes64 mixed(lanes64 sum, const char *from) {
    lanes64 bits;
    memcpy(&bits, from, sizeof bits);
    sum = (sum ^ bits) * 0x9e3779b185ebca87u;
    return sum << 31 | sum >> 33;
}

/*
 * Returns a checksum of `bytes` bytes, a multiple of 64. Each step is invertible, so one changed number always changes
 * the result.
 */
static uint64_t checksum(const char *from, size_t bytes) {
    lanes64 sums[4] = {{1}, {2}, {3}, {4}};
    const char *end = from + bytes;
    for (; end - from >= (ptrdiff_t)sizeof sums; from += sizeof sums)
        for (size_t i = 0; i < 4; i++) sums[i] = mixed(sums[i], from + i * sizeof(lanes64));
    for (; from < end; from += sizeof(lanes64)) sums[0] = mixed(sums[0], from);
    uint64_t total = bytes;
    for (size_t i = 0; i < 4; i++)
        for (size_t lane = 0; lane < 8; lane++) {
            total = (total ^ sums[i][lane]) * 0xc2b2ae3d27d4eb4fu;
            total ^= total >> 29;
        }
    return total;
}

/* Pieces of the arena, and what is done with each of them by the pool. */
struct pieces {
    const struct model *model;
    size_t bytes;
    int file; /* read from this one first; -1: the arena has the bytes */
    int64_t offset;
    uint64_t *sums;
    _Atomic int failed;
};

static size_t count_pieces(void *self, size_t phase) {
    (void)phase;
    return (((const struct pieces *)self)->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
}

static void check_piece(void *self, size_t phase, size_t piece, size_t thread) {
    (void)phase, (void)thread;
    struct pieces *job = self;
    const size_t first = piece * PIECE_BYTES, rest = job->bytes - first, bytes = rest < PIECE_BYTES ? rest : PIECE_BYTES;
    char *at = job->model->arena + first;
    for (size_t done = 0; job->file >= 0 && done < bytes;) {
        const ssize_t count = pread(job->file, at + done, bytes - done, (off_t)(job->offset + (int64_t)(first + done)));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            atomic_store(&job->failed, 1);
            return;
        }
        done += (size_t)count;
    }
    job->sums[piece] = checksum(at, bytes);
}

/*
 * Makes `bytes` bytes of `file` from `offset` on the content of the arena, and writes the checksum of each piece.
 *
 * With `mapped`, memory is shared with all processes that map the file, and cannot be written to. Otherwise the bytes
 * are copied. Both are multiples of 64, and `offset` is one of huge pages. Returns 0 if that is impossible.
 */
int baton_use_file(struct model *model, int file, int64_t offset, int64_t bytes, int64_t mapped, uint64_t *sums) {
    struct pieces pieces = {model, (size_t)bytes, file, offset, sums, 0};
    if ((size_t)bytes > model->arena_bytes || !reserve_arena(model)) return 0;
    if (mapped) {
        void *at = mmap(model->arena, (size_t)bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, (off_t)offset);
        if (at == MAP_FAILED) return 0;
#if defined(MADV_HUGEPAGE)
        madvise(model->arena, (size_t)bytes, MADV_HUGEPAGE);
#endif
        madvise(model->arena, (size_t)bytes, MADV_WILLNEED);
        pieces.file = -1;
    }
    const struct job job = {&pieces, 1, count_pieces, check_piece, 0};
    pool_run(model->pool, &job);
    return !atomic_load(&pieces.failed);
}

/* Returns the address of the packed weights, and the checksum of `bytes` bytes of them, a multiple of 64. */
const void *baton_arena(const struct model *model) { return model->arena; }
uint64_t baton_checksum(const void *from, int64_t bytes) { return checksum(from, (size_t)bytes); }

#endif
