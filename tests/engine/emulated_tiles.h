/* AMX's tile registers in plain C, by Intel's description, so that the code for them can run anywhere. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __AMX_TILE__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

static _Thread_local struct {
    unsigned char palette, start, reserved[14];
    unsigned short bytes[16];
    unsigned char rows[16];
} emulated_shapes;
static _Thread_local uint32_t emulated_tiles[8][16][16];

static void emulated_load(int tile, const void *from, size_t stride) {
    for (int row = 0; row < emulated_shapes.rows[tile]; row++)
        memcpy(emulated_tiles[tile][row], (const char *)from + (size_t)row * stride, emulated_shapes.bytes[tile]);
}

static void emulated_store(int tile, void *to, size_t stride) {
    for (int row = 0; row < emulated_shapes.rows[tile]; row++)
        memcpy((char *)to + (size_t)row * stride, emulated_tiles[tile][row], emulated_shapes.bytes[tile]);
}

static float emulated_half(uint32_t pair, int high) {
    uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void emulated_product(int to, int a, int b) {
    if (!emulated_shapes.palette) __builtin_trap(); /* as the processor does without a shape */
    for (int row = 0; row < emulated_shapes.rows[a]; row++)
        for (int column = 0; column < emulated_shapes.bytes[b] / 4; column++) {
            float sums[3];
            memcpy(&sums[2], &emulated_tiles[to][row][column], 4);
            for (int half = 0; half < 2; half++) {
                sums[half] = 0.0f;
                for (int unit = 0; unit < emulated_shapes.bytes[a] / 4; unit++)
                    sums[half] += emulated_half(emulated_tiles[a][row][unit], half) *
                                  emulated_half(emulated_tiles[b][unit][column], half);
            }
            sums[2] += sums[0] + sums[1];
            memcpy(&emulated_tiles[to][row][column], &sums[2], 4);
        }
}

static void emulated_product_of_octets(int to, int a, int b) {
    if (!emulated_shapes.palette) __builtin_trap();
    for (int row = 0; row < emulated_shapes.rows[a]; row++)
        for (int column = 0; column < emulated_shapes.bytes[b] / 4; column++) {
            uint32_t sum = emulated_tiles[to][row][column];
            for (int unit = 0; unit < emulated_shapes.bytes[a] / 4; unit++)
                for (int byte = 0; byte < 4; byte++)
                    sum += (uint32_t)((int8_t)(emulated_tiles[a][row][unit] >> 8 * byte) *
                                      (int8_t)(emulated_tiles[b][unit][column] >> 8 * byte));
            emulated_tiles[to][row][column] = sum;
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_dpbf16ps emulated_product
#define _tile_dpbssd emulated_product_of_octets
#define _tile_loadconfig(from) memcpy(&emulated_shapes, from, 64)
#define _tile_storeconfig(to) memcpy(to, &emulated_shapes, 64)
#define _tile_release() memset(&emulated_shapes, 0, sizeof emulated_shapes)
#define syscall(...) 0L
