"""
Cores that workers of one machine lend each other.

`baton up` divides the cores among its workers. While a worker computes nothing, the others use its cores
too. Each worker has a seat in memory that all of them map, in which its kernels write that they compute
(`ops/native/pool.h`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from baton_api.errors import SetupError

SEAT_BYTES = 64
"""Size of `struct seat` of the kernels: one cache line."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The seat of one worker. It must live as long as the kernels that use it."""

    memory: ctypes.Array[ctypes.c_char]
    """All seats."""
    number: int
    extra_threads: int
    """Threads in addition to the worker's own, for cores that others lend; at least 1."""
    compute_share: float = 1.0
    """Share of the time in which the worker computes while others do: above 0, at most 1."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The threads of the kernels."""

    threads: int
    """The worker's own."""
    seat: Seat | None = None

    def sizes(self) -> dict[str, float]:
        """Return the fields of the kernels' `struct spec` about threads."""
        if self.seat is None:
            return {"threads": self.threads}
        return {
            "threads": self.threads,
            "spare": self.seat.extra_threads,
            "seats": ctypes.addressof(self.seat.memory),
            "seat_count": len(self.seat.memory) // SEAT_BYTES,
            "seat": self.seat.number,
            "rest": 1 / self.seat.compute_share - 1,
        }


@contextlib.contextmanager
def seats(workers: int) -> Iterator[tuple[str, ...]]:
    """Create seats for so many workers, and yield the setting `shared_cores` of each. "": no seats."""
    if sys.platform != "linux" or workers < 2:
        yield ("",) * workers
        return
    memory = os.memfd_create("baton-cores")
    try:
        os.ftruncate(memory, workers * SEAT_BYTES)
        yield tuple(f"/proc/{os.getpid()}/fd/{memory}:{number}" for number in range(workers))
    finally:
        os.close(memory)


def compute_share(share: float, workers: int, all_workers: int) -> float:
    """
    Return the share of the time in which each of so many `workers` may compute to use `share` of the cores.

    All workers of the machine have as many threads and are busy. Some of them that have less than `share`
    compute all the time, and get more only from the others' rests.
    """
    return min(1.0, share * all_workers / workers)


def take_seat(name: str, threads: int, cores: int, share: float = 1.0) -> Seat | None:
    """
    Return the seat `name` (`settings.shared_cores`), or None if `threads` are all `cores` already.

    The worker computes for `share` (`settings.compute_share`) of the time in which others do.

    Raises SetupError if there is no such seat.
    """
    if not name or threads >= cores:
        return None
    path, _, number = name.rpartition(":")
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        count = len(memory) // SEAT_BYTES
        if not number.isdecimal() or int(number) >= count:
            raise SetupError(f"--shared-cores {name} names no seat. {path} has the seats 0 to {count - 1}.")
    except (OSError, ValueError) as error:
        raise SetupError(
            f"--shared-cores {name} cannot be mapped: {error}. Name a file and a seat, as FILE:NUMBER. "
            f"The file has {SEAT_BYTES} zero bytes per worker."
        ) from error
    return Seat((ctypes.c_char * len(memory)).from_buffer(memory), int(number), cores - threads, share)
