/* AVX-VNNI's product of bytes in plain C, by Intel's description, so that the code for it can run on AVX2. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVXVNNI__
#define __AVXVNNI__ 1
#endif

static inline __m256i emulated_dpbusd(__m256i total, __m256i unsigned_bytes, __m256i signed_bytes) {
    int32_t sums[8];
    uint8_t left[32];
    int8_t right[32];
    memcpy(sums, &total, 32), memcpy(left, &unsigned_bytes, 32), memcpy(right, &signed_bytes, 32);
    for (int i = 0; i < 32; i++) sums[i / 4] += left[i] * right[i];
    memcpy(&total, sums, 32);
    return total;
}

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
