"""
Faults of a disk tier: processes that are killed while they write, flipped bits, and a disk that is full.

    python -m benchmarks.disk_faults --kills 1000 --flips 10000

Blocks have their name as content, so that a block under another name is seen. Each kill is `SIGKILL` to a
process that writes to the real store, at a random moment; then the folder is opened, and all that is found is
read. Bits of the files are flipped, ten at a time; then all blocks are read, and those with flips are lost.
Exit status 1: a wrong block was delivered, or fewer than 95 % of the finished blocks were found.
"""

from __future__ import annotations

import argparse
import collections
import errno
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.index import Place, TierIndex
from baton_engine.tiers.slab import BLOCKS, HEADERS, PAGE, Bytes, stride_of, sum_of
from baton_engine.tiers.store import Copy

MODEL = b"of all processes"
NAME = 16
BATCH = 8
AT_ONCE = 10
"""Bits that are flipped before all blocks are read."""

MOST = 10**6
"""More blocks than a process writes."""

LONGEST_S = 0.06
"""Seconds after which a process is killed at the latest."""


def content(name: bytes, size: int) -> Bytes:
    return np.frombuffer(name * (size // NAME), dtype=np.uint8)


def opened(folder: Path, slots: int, block: int) -> DiskStore:
    return DiskStore(folder, PAGE + slots * (stride_of(block) + 128), block, MODEL)


def write_on(folder: Path, slots: int, block: int, first: int, finished: int) -> None:
    """Write blocks until the end of this process. Their numbers go to `finished` after each batch."""
    store = opened(folder, slots, block)
    index = TierIndex(store.free, store.medium, None, store.found)
    chance = random.Random(first)
    names: dict[int, bytes] = {}

    def read(number: int, out: Bytes) -> int:
        other = chance.random() < 0.05  # the memory has used the slot for another block meanwhile
        out[:] = content((b"another block..." if other else names[number]), block)
        return sum_of(out)

    while True:
        copies: list[Copy] = []
        for number in range(first, first + chance.randint(1, BATCH)):
            slot = index.reserve()
            assert slot is not None
            names[number] = number.to_bytes(NAME)
            copies.append(Copy(names[number], b"", number, slot, sum_of(content(names[number], block))))
        sums = store.write(copies, read)
        for copy, value in zip(copies, sums, strict=True):
            if value is None:
                index.give_back(copy.slot)
            else:
                index.add(copy.name, Place(copy.slot, value, b""))
        done = [copy.name for copy, value in zip(copies, sums, strict=True) if value is not None]
        os.write(finished, b"".join(done))
        first += len(copies)
        names.clear()


def read_all(store: DiskStore, block: int) -> Iterator[tuple[bytes, str]]:
    """Yield what became of each block that was found: right, corrupt (and seen), or wrong."""
    for name, place in store.found:
        data = store.read(place.slot)
        if sum_of(data) != place.sum:
            yield name, "corrupt"
        else:
            yield name, "right" if bytes(data) == bytes(content(name, block)) else "WRONG"


def kill(folder: Path, kills: int, slots: int, block: int) -> bool:
    total: collections.Counter[str] = collections.Counter()
    expected: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    began = time.monotonic()
    for number in range(kills):
        out, into = os.pipe()
        child = os.fork()
        if not child:
            os.close(out)
            try:
                write_on(folder, slots, block, number * MOST + 1, into)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(into)
        done = b"" if number % 4 == 0 else os.read(out, MOST)  # one in four dies before its first batch, too
        time.sleep(random.Random(number).random() * LONGEST_S)  # the moment of the kill
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        total["ended otherwise"] += not os.WIFSIGNALED(status)
        with os.fdopen(out, "rb") as pipe:
            done += pipe.read()
        for at in range(0, len(done), NAME):
            expected[done[at : at + NAME]] = None
        total["written"] += len(done) // NAME
        store = opened(folder, slots, block)
        found = dict(read_all(store, block))
        store.close()
        total.update(found.values())
        kept = list(expected)[
            -(slots - 2 * BATCH) :
        ]  # those before may have been replaced by unfinished ones
        total["finished"] += len(kept)
        total["found again"] += sum(found.get(name) == "right" for name in kept)
        expected = collections.OrderedDict.fromkeys(kept)
    share = total["found again"] / max(1, total["finished"])
    seconds = time.monotonic() - began
    print(f"{kills} kills in {seconds:.0f} s: {dict(total)}, {share:.4f} of the finished ones found again")
    return not total["WRONG"] and not total["ended otherwise"] and share >= 0.95


def flip(folder: Path, flips: int, slots: int, block: int) -> bool:
    chance, total = random.Random(1), collections.Counter[str]()
    names = [number.to_bytes(NAME) for number in range(1, slots + 1)]

    def read(number: int, out: Bytes) -> int:
        out[:] = content(names[number], block)
        return sum_of(out)

    def fill() -> None:
        store = opened(folder, slots, block)
        store.clear()
        store.write(
            [Copy(name, b"", at, at, sum_of(content(name, block))) for at, name in enumerate(names)], read
        )
        store.close()

    fill()
    began = time.monotonic()
    for _ in range(flips // AT_ONCE):
        places = set[tuple[str, int]]()
        while len(places) < AT_ONCE:
            file = chance.choice((BLOCKS, HEADERS))
            first = (
                PAGE if file == HEADERS and chance.random() < 0.99 else 0
            )  # a flip before loses all blocks
            places.add((file, chance.randrange(first, (folder / file).stat().st_size)))
        flipped, lost = [(folder / file, at, 1 << chance.randrange(8)) for file, at in places], set[int]()
        for path, at, bit in flipped:
            _flip(path, at, bit)
            if path.name == BLOCKS:
                lost.add(at // stride_of(block))
            else:
                lost.update(range(slots) if at < PAGE else ((at - PAGE) // 128,))
        store = opened(folder, slots, block)
        found = dict(read_all(store, block))
        store.close()
        for slot, name in enumerate(names):
            state = found.get(name, "not found")
            total[state if state != "right" or slot not in lost else "UNNOTICED"] += 1
            total["lost without a flip"] += state != "right" and slot not in lost
        if len(lost) == slots:
            fill()
        else:
            for path, at, bit in flipped:
                _flip(path, at, bit)
    print(f"{flips} flipped bits in {time.monotonic() - began:.0f} s: {dict(total)}")
    return not (total["WRONG"] or total["UNNOTICED"] or total["lost without a flip"])


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ bit]))


def fill_up(folder: Path, slots: int, block: int) -> bool:
    """Limit the size of files while a store is open, and when it is opened."""
    store = opened(folder, slots, block)
    store.clear()
    name = b"a block of a few"
    sums = sum_of(content(name, block))
    copies = [Copy(name, b"", 0, slot, sums) for slot in range(slots)]

    def read(number: int, out: Bytes) -> int:
        out[:] = content(name, block)
        return sum_of(out)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (slots * block // 2, before[1]))
        try:
            store.write(copies, read)
            failed = False
        except OSError as error:
            failed = error.errno == errno.EFBIG
        store.close()
        again = opened(folder, 4 * slots, block)
        unusable = not again.slots
        again.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print(f"a file that may not grow: the write failed: {failed}, the store is not used: {unusable}")
    return failed and unusable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--block", type=int, default=65_536, help="bytes of a block")
    options = parser.parse_args()
    sizes = options.slots, options.block
    with tempfile.TemporaryDirectory() as folder:
        good = [
            kill(Path(folder) / "kills", options.kills, *sizes),
            flip(Path(folder) / "flips", options.flips, options.slots, 4096),
            fill_up(Path(folder) / "full", *sizes),
        ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
