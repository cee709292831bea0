"""
Limits of this machine: reading memory, and multiplying matrices.

Every percentage that a benchmark reports refers to these, measured in the same run, because on shared
machines they change from minute to minute.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_engine.ops.native import library

PROBE_BYTES = 512 << 20
"""Several times any cache."""

PROBE_SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t words __attribute__((vector_size(64)));
struct part { const words *from; size_t count; words total; };

void *probe_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memset(memory, 1, bytes);
}

static void *read_part(void *argument) {
    struct part *part = argument;
    words a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= part->count; i += 4) {
        a += part->from[i], b += part->from[i + 1], c += part->from[i + 2], d += part->from[i + 3];
    }
    part->total = a + b + c + d;
    return NULL;
}

uint64_t probe_read(const void *memory, size_t bytes, int threads) {
    pthread_t ids[256];
    struct part parts[256];
    size_t share = bytes / 64 / threads;
    for (int i = 0; i < threads; i++) {
        parts[i] = (struct part){(const words *)memory + i * share, share, {0}};
        if (i) pthread_create(&ids[i], NULL, read_part, &parts[i]);
    }
    read_part(&parts[0]);
    uint64_t total = parts[0].total[0];
    for (int i = 1; i < threads; i++) pthread_join(ids[i], NULL), total += parts[i].total[0];
    return total;
}
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second read, floating-point operations per second of a large product."""

    threads: int
    memory: float
    bfloat16: float
    float32: float

    def product(self, dtype: torch.dtype) -> float:
        return self.bfloat16 if dtype == torch.bfloat16 else self.float32

    def __str__(self) -> str:
        return (
            f"{self.threads} threads: memory {self.memory / 1e9:.1f} GB/s, products "
            f"bf16 {self.bfloat16 / 1e12:.3f} and fp32 {self.float32 / 1e12:.3f} TFLOP/s"
        )


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of `run`, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class MemoryProbe:
    """Reads memory in huge pages, by as many threads as asked for."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder) / "probe.c", Path(folder) / "probe.so"
            source.write_text(PROBE_SOURCE)
            subprocess.run(
                [*library.find_compiler(os.environ), *library.FLAGS, str(source), "-o", str(built)],
                check=True,
            )
            self._library = ctypes.CDLL(str(built))
        self._library.probe_memory.restype = ctypes.c_void_p
        self._memory = ctypes.c_void_p(self._library.probe_memory(ctypes.c_size_t(PROBE_BYTES)))

    def read(self, threads: int, repeats: int = 7) -> float:
        """Bytes per second."""
        size = ctypes.c_size_t(PROBE_BYTES)
        return PROBE_BYTES / seconds(lambda: self._library.probe_read(self._memory, size, threads), repeats)


def product_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """Operations per second of torch's best product with its current number of threads."""
    rows, weight = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    if dtype == torch.bfloat16:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return (
            2
            * size**3
            / seconds(lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""), repeats)
        )
    return 2 * size**3 / seconds(lambda: torch.nn.functional.linear(rows, weight), repeats)


def measure(threads: int, probe: MemoryProbe) -> Limits:
    torch.set_num_threads(threads)
    return Limits(
        threads=threads,
        memory=probe.read(threads),
        bfloat16=product_peak(torch.bfloat16),
        float32=product_peak(torch.float32, size=1024),
    )


if __name__ == "__main__":
    shared = MemoryProbe()
    for count in sorted({1, len(os.sched_getaffinity(0))}):
        print(measure(count, shared))
