"""
The ledger by itself: lines validated, recorded and rendered per second, and what that costs beside it.

    python -m benchmarks.ledger --lines 100000
    python -m benchmarks.ledger --lines 100000 --database postgres

Everything runs in one process, as in a router. `delay` is how late the event loop woke meanwhile: what a
request would have waited for. `--database` may also be the URL of an empty database.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

import psutil

from baton_batches.controller import BatchController
from baton_batches.files import NewFile
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord, BatchStatus, LineResult
from tests.batches.postgres import Postgres

CHAT = "/v1/chat/completions"
QUESTION = "Tell me about this number and why it is what it is, at some length."
ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 100}}],
    "usage": {"prompt_tokens": 30, "completion_tokens": 128, "total_tokens": 158},
}
BEAT_S = 0.001
AT_ONCE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=100, help="results that are recorded at once")
    parser.add_argument("--database", default="sqlite", help="sqlite, postgres, or a URL")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, database(given.database) as url:
        settings = {"state": folder, "database": url, "batch_lines": 10**9, "batch_file_limit": 10**12}
        storage = Storage(BatchSettings.model_validate({**settings, "batch_poll_s": 0.02}), 0)
        asyncio.run(measure(storage, given.lines, given.group))
        storage.close()


@contextlib.contextmanager
def database(name: str) -> Iterator[str]:
    """Its URL; empty for SQLite in the state folder."""
    if name != "postgres":
        yield "" if name == "sqlite" else name
        return
    server = Postgres()
    yield server.new_database()
    server.close()


async def measure(storage: Storage, lines: int, group: int) -> None:
    batch = stored(storage, lines)
    controller = BatchController(storage)
    keeping = asyncio.create_task(controller.run())
    async with timed("validated", lines):
        await reaching(storage, batch, BatchStatus.IN_PROGRESS)
    epoch = storage.ledger.lease(batch.id, "benchmark", time.time(), 1e6)
    assert epoch is not None
    body = json.dumps(ANSWER).encode()

    def record() -> None:
        for start in range(1, lines + 1, group):
            numbers = range(start, min(start + group, lines + 1))
            results = [LineResult(number, 200, body, f"req_{number:032}") for number in numbers]
            storage.ledger.record(batch.id, epoch, results, int(time.time()))

    async with timed("recorded", lines):
        await asyncio.to_thread(record)
    async with timed("rendered", lines):
        controller.wake()
        await reaching(storage, batch, BatchStatus.COMPLETED)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def stored(storage: Storage, lines: int) -> BatchRecord:
    """A batch that waits to be validated."""
    size, writer = 0, storage.objects.writer("benchmark/input")
    body = {"model": "tiny", "max_tokens": 128, "messages": [{"role": "user", "content": QUESTION}]}
    line = json.dumps({"custom_id": "request-@", "method": "POST", "url": CHAT, "body": body}) + "\n"
    for start in range(0, lines, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, lines))
        text = "".join(line.replace("@", str(number), 1) for number in numbers).encode()
        size += len(text)
        writer.write(text)
    writer.commit()
    now = int(time.time())
    file = storage.files.add(NewFile("", "batch", "input", size, "", "benchmark/input", None), now)
    return storage.ledger.create("", CHAT, file, now)


async def reaching(storage: Storage, batch: BatchRecord, status: BatchStatus) -> None:
    while True:
        if (await storage.run(lambda: storage.ledger.find(batch.id))).status is status:
            return
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def timed(what: str, lines: int) -> AsyncIterator[None]:
    """Print how long it took, and what it cost."""
    delays: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            delays.append(time.perf_counter() - before - BEAT_S)

    beating = asyncio.create_task(beat())
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    beating.cancel()
    delays.sort()
    middle, late = delays[len(delays) // 2], delays[int(0.99 * len(delays))]
    memory = psutil.Process().memory_info().rss / 1e6
    print(
        f"{what} {lines} lines in {seconds:.1f} s: {lines / seconds:,.0f} per second; {memory:.0f} MB; "
        f"delay p50 {1e3 * middle:.2f} ms, p99 {1e3 * late:.2f} ms, most {1e3 * delays[-1]:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
