"""
Cost of a batch besides the model: memory with a million lines, and rows per second of the ledger.

    python -m benchmarks.batch_memory lines --lines 1000000
    python -m benchmarks.batch_memory ledger --rows 200000 --database postgres

`lines` runs one batch on workers that answer at once. It prints the memory of every process at each tenth of
the lines, which shows growth with the lines, and then the processor time of every process per line. `ledger`
records results in groups as runners do.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton_batches.database import Database
from baton_batches.files import FileLedger, NewFile
from baton_batches.ledger import Ledger
from baton_batches.result_outbox import GROUP_RESULTS
from baton_batches.values import LineResult
from benchmarks.batch_chaos import database
from tests.batches import chaos
from tests.batches.mock_worker import answer_to

MIB = 1024 * 1024
LOOK_S = 1.0


def lines(count: int, url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="batch-memory-") as name:
        folder = Path(name)
        source = folder / "input.jsonl"
        chaos.write_lines(source, count)
        environment = {"BATON_ROUTER_DATABASE": url, "BATON_ROUTER_BATCH_FILE_LIMIT": "2GiB"}
        environment["BATON_ROUTER_FILE_LIMIT"] = "2GiB"
        timing = {"seconds": 0.0, "slots": 1000}
        with chaos.cluster(folder, environment, **timing) as (running, service):
            began = time.monotonic()
            first: Sample | None = None
            last: Sample | None = None
            print(f"{source.stat().st_size / MIB:.0f} MiB of input")
            show("idle", running)
            id = chaos.submit(service, source)
            next_tenth, peak, status = 1, 0.0, "validating"
            while status not in chaos.TERMINAL:
                time.sleep(LOOK_S)
                batch = service.batch(id)
                done = batch["request_counts"]["completed"]
                peak = max(peak, sum(sizes(running).values()))
                if batch["status"] == "in_progress" and done:
                    last = Sample(time.monotonic(), done, processor_s(running))
                    first = first or last
                if batch["status"] != status:
                    status = batch["status"]
                    show(f"{status}, {time.monotonic() - began:.0f} s", running)
                while done >= next_tenth * count / 10:
                    show(f"{next_tenth * 10} %, {time.monotonic() - began:.0f} s", running)
                    next_tenth += 1
            seconds = batch["finalizing_at"] - batch["in_progress_at"]
            rendered = batch["completed_at"] - batch["finalizing_at"]
            print(
                f"{batch['request_counts']}: {count / max(1, seconds):.0f} lines/s, rendered in {rendered} s"
            )
            print(f"peak of all processes together: {peak:.0f} MiB")
            if first is not None and last is not None and last.done > first.done:
                show_cost(first, last)


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress of a running batch."""

    at: float
    done: int
    processor_s: dict[str, float]
    """By process."""


def show_cost(first: Sample, last: Sample) -> None:
    lines = last.done - first.done
    spent = {
        name: 1e6 * (seconds - first.processor_s.get(name, 0.0)) / lines
        for name, seconds in last.processor_s.items()
    }
    costs = ", ".join(f"{name} {cost:.0f}" for name, cost in spent.items())
    print(f"while it ran: {lines / (last.at - first.at):.0f} lines/s; processor us per line: {costs}")


def processor_s(running: chaos.Cluster) -> dict[str, float]:
    """Seconds of processor time of each process, threads included."""
    spent = {}
    for name, pid in pids(running).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            spent[name] = times.user + times.system
    return spent


def pids(running: chaos.Cluster) -> dict[str, int]:
    programs = {name: program.pid for name, program in running.programs.items()}
    runners = {f"runner {number}": one.pid for number, one in enumerate(running.router.runners(), 1)}
    return programs | runners


def sizes(running: chaos.Cluster) -> dict[str, float]:
    """MiB of memory that each process has for itself."""
    page = {}
    for name, pid in pids(running).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            page[name] = psutil.Process(pid).memory_full_info().uss / MIB
    return page


def show(when: str, running: chaos.Cluster) -> None:
    print(
        f"{when:>24}: " + ", ".join(f"{name} {size:.0f} MiB" for name, size in sizes(running).items()),
        flush=True,
    )


def ledger(rows: int, url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="batch-ledger-") as folder:
        opened = Database(url or f"sqlite:///{folder}/ledger.sqlite3")
        kept = Ledger(opened)
        file = NewFile("owner", "batch", "in.jsonl", 1, "", "object", None)
        id = kept.create("owner", chaos.CHAT, FileLedger(opened).add(file, 0), 0).id
        epoch = kept.lease(id, "benchmark", 0.0, 3600.0)
        assert epoch is not None
        kept.validated(id, epoch, 0, total=rows, model=None)
        epoch = kept.lease(id, "benchmark", 0.0, 3600.0)
        assert epoch is not None
        body = answer_to(b"a request")

        def record() -> None:
            for first in range(1, rows + 1, GROUP_RESULTS):
                numbers = range(first, min(first + GROUP_RESULTS, rows + 1))
                kept.record(
                    id, epoch, [LineResult(number, 200, body, f"req_{number}") for number in numbers], 0
                )

        def read() -> None:
            last = 0
            while page := kept.results(kept.find(id), last, 200):
                last = page[-1].line

        print(f"{opened.dialect}: {rows / timed(record):.0f} rows/s recorded, {len(body)} bytes each")
        print(f"{opened.dialect}: {rows / timed(read):.0f} rows/s read for rendering")
        opened.close()


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("lines", "ledger"))
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--database", default="sqlite", help="sqlite, postgres, or a URL")
    given = parser.parse_args()
    with database(given.database) as url:
        if given.what == "lines":
            lines(given.lines, url)
        else:
            ledger(given.rows, url)


if __name__ == "__main__":
    main()
