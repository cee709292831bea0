/*
 * Products with AMX, if the processor supports it: 32 rows by 32 outputs in four tile registers. Those of bfloat16 are
 * here, those of 8 bits in quantized.h.
 *
 * The layout of a panel is that of the tiles. A tile of bfloat16 has 16 rows and 16 units. Rows beyond the last
 * one are read and computed, but their results are ignored; units beyond the last one are zeros.
 */
#ifndef BATON_TILES_H
#define BATON_TILES_H

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && !defined(BATON_NO_TILES)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_SIDE 16

#if defined(__AMX_INT8__) && defined(__AVX512F__)
#define OCTET_TILES 1
#else
#define OCTET_TILES 0
#endif

struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Not all compilers' intrinsics declare the memory that they read, so earlier stores must be completed first. */
#define STORED() __asm__ volatile("" ::: "memory")

/* Returns whether the kernel lets this process use the tile registers. The first answer is cached. */
static int tiles_allowed(void) {
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    static int answer; /* 0: unknown; all threads get the same answer */
    if (!answer) answer = syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0 ? 1 : -1;
    return answer > 0;
}

/*
 * Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights of `units` units of 4 bytes. Other libraries configure the tiles
 * too; `tiles_end` restores the previous configuration.
 */
INLINE void tiles_begin(struct tile_shapes *before, const int units) {
    if (!tiles_allowed()) return;
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = (uint16_t)(4 * (tile == 4 || tile == 5 ? units : TILE_SIDE));
        shapes.rows[tile] = (uint8_t)(tile >= 6 ? units : TILE_SIDE);
    }
    _tile_storeconfig(before);
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

INLINE void tiles_end(const struct tile_shapes *before) {
    if (!tiles_allowed()) return;
    STORED();
    if (before->palette) _tile_loadconfig(before);
    else _tile_release();
}

/* result[row][32] (+)= rows . panel for 16 rows, or for 32. */
static void multiply_tiles(int both, const uint32_t *rows, size_t row_stride, const uint32_t *panel, size_t units,
                           float *result, size_t result_stride, int add) {
    const size_t row_bytes = row_stride * 4, result_bytes = result_stride * 4, panel_bytes = 2 * LANES * 4;
    const uint32_t *lower = rows + TILE_SIDE * row_stride;
    float *lower_result = result + TILE_SIDE * result_stride;
    STORED();
    if (add) {
        _tile_loadd(0, result, result_bytes);
        _tile_loadd(1, result + LANES, result_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if (!both) {
        for (size_t unit = 0; unit < units; unit += TILE_SIDE) {
            _tile_loadd(4, rows + unit, row_bytes);
            _tile_loadd(6, panel + unit * 2 * LANES, panel_bytes);
            _tile_loadd(7, panel + unit * 2 * LANES + LANES, panel_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, result, result_bytes);
        _tile_stored(1, result + LANES, result_bytes);
        return;
    }
    if (add) {
        _tile_loadd(2, lower_result, result_bytes);
        _tile_loadd(3, lower_result + LANES, result_bytes);
    } else {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t unit = 0; unit < units; unit += TILE_SIDE) {
        _tile_loadd(4, rows + unit, row_bytes);
        _tile_loadd(6, panel + unit * 2 * LANES, panel_bytes);
        _tile_loadd(7, panel + unit * 2 * LANES + LANES, panel_bytes);
        _tile_loadd(5, lower + unit, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, result_bytes);
    _tile_stored(1, result + LANES, result_bytes);
    _tile_stored(2, lower_result, result_bytes);
    _tile_stored(3, lower_result + LANES, result_bytes);
}

#else
#define TILES 0
#define OCTET_TILES 0

struct tile_shapes {
    uint8_t palette;
};
#define TILE_SIDE 16
INLINE void tiles_begin(struct tile_shapes *before, const int units) { (void)before, (void)units; }
INLINE void tiles_end(const struct tile_shapes *before) { (void)before; }
#endif

#endif
