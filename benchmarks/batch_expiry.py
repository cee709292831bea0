"""
An expired batch that two routers find at once: it must end once, as expired, with every line in one file.

    python -m benchmarks.batch_expiry --lines 200000
    python -m benchmarks.batch_expiry --lines 200000 --database postgres

Two router processes share a database and a folder of files and run no lines. A batch is submitted and
validated; every second line gets a result in the ledger; then its window passes. Prints the duration of each
step and the epochs. The status is 1 if the batch does not end as expired, if its epoch rose more
than once after that, or if a line is missing or duplicated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import text

from baton_batches.database import Database
from baton_batches.ledger import Ledger
from baton_batches.storage import LEDGER
from baton_batches.values import BatchRecord, BatchStatus, LineResult
from baton_cli.batch_service import BatchService
from benchmarks.batch_chaos import database
from tests.batches import chaos
from tests.batches.chaos import Router
from tests.ports import steady_ports

GROUP = 1000
WAIT_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--database", default="sqlite", help="sqlite, postgres, or a URL")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batch-expiry-") as folder, database(given.database) as url:
        return run(Path(folder), url, given.lines)


def run(folder: Path, url: str, lines: int) -> int:
    with contextlib.ExitStack() as stack:
        routers = []
        for number, port in enumerate(steady_ports(2)):
            more = ("--batch-execution=off", f"--batch-file-limit={lines * 300}")
            environment = {"BATON_ROUTER_DATABASE": url}
            routers.append(Router(folder, port, [1], environment, f"router-{number}", *more))
            stack.callback(routers[-1].program.end)
        service = BatchService(routers[0].url, "", lambda reason: None)
        stack.callback(service.close)
        opened = Database(url or f"sqlite:///{folder / 'state' / LEDGER}", busy_s=60)
        stack.callback(opened.close)
        ledger = Ledger(opened)
        source = folder / "input.jsonl"
        chaos.write_lines(source, lines)
        id = _submitted(service, source)
        began = time.monotonic()
        _reach(ledger, id, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
        print(f"validated in {time.monotonic() - began:.1f} s", flush=True)
        _record(ledger, id, lines)
        before = ledger.find(id).epoch
        with opened.writing() as connection:
            connection.execute(text("UPDATE batches SET expires_at = :now"), {"now": int(time.time())})
        began = time.monotonic()
        epochs = _reach(ledger, id, lambda batch: batch.status.ended)
        batch = service.batch(id)
        print(
            f"{batch['status']} after {time.monotonic() - began:.1f} s; epochs {before} -> {sorted(epochs)}"
        )
        output, errors = (_names(service, batch[f"{kind}_file_id"], folder) for kind in ("output", "error"))
        whole = sorted(output + errors) == sorted(f"request-{number}" for number in range(1, lines + 1))
        print(f"{len(output)} lines in the output file, {len(errors)} in the error file; whole: {whole}")
        good = batch["status"] == "expired" and epochs <= {before, before + 1} and whole
        return 0 if good and len(output) == lines // 2 else 1


def _submitted(service: BatchService, source: Path) -> str:
    deadline = time.monotonic() + chaos.START_S
    while True:
        with contextlib.suppress(Exception):  # the router is starting
            return chaos.submit(service, source)
        assert time.monotonic() < deadline
        time.sleep(0.5)


def _reach(ledger: Ledger, id: str, reached: Callable[[BatchRecord], bool]) -> set[int]:
    """Every epoch that was seen until then."""
    epochs: set[int] = set()
    deadline = time.monotonic() + WAIT_S
    while True:
        batch = ledger.find(id)
        epochs.add(batch.epoch)
        if reached(batch):
            return epochs
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)


def _record(ledger: Ledger, id: str, lines: int) -> None:
    """Results of every second line, as a runner leaves them."""
    epoch = ledger.lease(id, "benchmark", time.time(), WAIT_S)
    assert epoch is not None
    body = json.dumps({"choices": [{"message": {"content": "yes"}}], "usage": {"total_tokens": 5}}).encode()
    numbers = range(2, lines + 1, 2)
    for start in range(0, len(numbers), GROUP):
        results = [
            LineResult(number, 200, body, f"req_{number}") for number in numbers[start : start + GROUP]
        ]
        ledger.record(id, epoch, results, int(time.time()))
    ledger.release(id, epoch)


def _names(service: BatchService, file: str, folder: Path) -> list[str]:
    place = folder / file
    service.download(file, service.file(file)["bytes"], place, lambda done, of: None)
    with place.open() as rows:
        return [json.loads(row)["custom_id"] for row in rows]


if __name__ == "__main__":
    sys.exit(main())
