"""
Faults of a disk tier: processes that are killed while they write, flipped bits, and a disk that is full.

    python -m benchmarks.disk_faults --kills 1000 --flips 10000

Blocks have their name as content, so that a block under another name is seen. Each kill is `SIGKILL` to a
process that writes to the real store, at a random moment; then the folder is opened, and all that is found is
read. Bits of the files are flipped, ten at a time; then all blocks are read, and those with flips are lost.
Exit status 1: a wrong block was delivered, or fewer than 95 % of the finished blocks were found.

    python -m benchmarks.disk_faults --worker FOLDER

A real worker has its disk tier on an ext4 in memory, which root can mount. While 8 streams decode beside
prompts of others, all writes of the file system wait for 5 s (`fsfreeze`), then all reads (`blkio.throttle`
of cgroup v1). Prompts return from the disk, so that it is read. Exit status 1: a token differs from that of
the first round, or a stream has not ended.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil

from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.index import Place, TierIndex
from baton_engine.tiers.slab import BLOCKS, HEADERS, PAGE, Bytes, stride_of, sum_of
from baton_engine.tiers.store import Copy
from benchmarks.serving import running, served_name
from benchmarks.tiers import Client, Streamed, chill, random_tokens

MODEL = b"of all processes"
NAME = 16
BATCH = 8
AT_ONCE = 10
"""Bits that are flipped before all blocks are read."""

MOST = 10**6
"""More blocks than a process writes."""

STALL_S = 5.0

BLOCK_GROUPS = Path("/sys/fs/cgroup/blkio")

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


def command(*arguments: object) -> str:
    done = subprocess.run([str(one) for one in arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    """An ext4 in memory: its stalls are those of this program, not of a busy disk."""
    memory, folder = place / "memory", place / "disk"
    for each in memory, folder:
        each.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", memory)
    try:
        with (memory / "image").open("wb") as image:
            image.truncate(size - size // 16)
        command("mkfs.ext4", "-q", "-F", memory / "image")
        command("mount", "-o", "loop", memory / "image", folder)
        try:
            yield folder
        finally:
            command("umount", "-l", folder)
    finally:
        command("umount", "-l", memory)


@contextlib.contextmanager
def throttled(device: str, processes: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Yields what sets the bytes per second at which these processes read a device; 0: without a limit."""
    group = BLOCK_GROUPS / f"baton-disk-faults-{os.getpid()}"
    group.mkdir()
    try:
        for process in processes:
            (group / "cgroup.procs").write_text(str(process))

        def limit(rate: int) -> None:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {rate}")

        yield limit
    finally:
        for each in (group / "cgroup.procs").read_text().split():
            (BLOCK_GROUPS / "cgroup.procs").write_text(each)
        group.rmdir()


def stall(place: Path, model: str, port: int) -> bool:
    streams, tokens, beside = 8, 400, 512
    room = streams * (64 + tokens) + 6 * beside
    prompts = [random_tokens(64) for _ in range(streams)]
    with mounted(place, 2**30) as disk:
        flags = f"--port {port} --max-total-tokens {room} --kv-memory-tier 48MiB --kv-disk-tier {disk / 'kv'}"
        baton = f"{Path(sys.executable).with_name('baton')} serve {model} {flags} --kv-disk-tier-size 700MiB"
        with running(baton, port, place / "worker.log") as server:
            processes = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(True))]
            device = command("mountpoint", "-d", disk)
            with throttled(device, processes) as limit:
                return _stall(Client(port, served_name(port)), disk, limit, prompts, tokens, beside)


def _stall(
    client: Client,
    disk: Path,
    limit: Callable[[int], None],
    prompts: list[list[int]],
    length: int,
    beside: int,
) -> bool:
    returning = [random_tokens(beside) for _ in range(16)]
    for prompt in returning * 2:  # the second use brings them to the disk
        client.ask(prompt, 1)
    expected: list[list[int]] | None = None
    wrong = 0

    def freeze(on: bool) -> None:
        command("fsfreeze", "-f" if on else "-u", disk)

    def stop_reads(on: bool) -> None:
        chill(disk.rglob("blocks"))
        limit(1000 if on else 0)

    def nothing(on: bool) -> None:
        pass

    rounds = {"warm-up": nothing, "usual": nothing, "writes stall": freeze, "usual, 2": nothing}
    rounds |= {"reads stall": stop_reads, "usual, 3": nothing}
    print("| 8 streams | prompts beside | tokens/s | longest pause ms | wrong | restored, errors, paused |")
    print("|---|---|---|---|---|---|")
    for name, change in rounds.items():
        again = itertools.cycle(returning)
        others = (next(again) if number % 2 else random_tokens(beside) for number in itertools.count())
        over = threading.Timer(STALL_S, change, (False,))
        change(True)
        try:
            over.start()
            streamed = Streamed.of(client, prompts, length, others)
        finally:
            over.join()
        expected = expected or streamed.tokens
        differ = sum(one != other for one, other in zip(expected, streamed.tokens, strict=True))
        wrong += differ
        state = tier_metrics(client.port)
        row = f"{streamed.beside} | {streamed.rate:.0f} | {streamed.pause_ms:.0f} | {differ} | {state}"
        print(f"| {name} | {row} |", flush=True)
    return not wrong


def tier_metrics(port: int) -> str:
    """The disk's hits, failed writes, and whether it is left alone."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = dict(re.findall(r'^(baton_worker_tier_\w+)\{tier="disk"\} (\S+)$', text, re.MULTILINE))
    names = ("block_hits_total", "write_errors_total", "paused")
    return ", ".join(f"{float(values[f'baton_worker_tier_{name}']):.0f}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--block", type=int, default=65_536, help="bytes of a block")
    parser.add_argument("--worker", help="a model, whose worker has a disk that stalls")
    parser.add_argument("--port", type=int, default=8350)
    options = parser.parse_args()
    if options.worker:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(not stall(Path(folder), options.worker, options.port))
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
