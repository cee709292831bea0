"""
How many lines one batch has under way in a cluster of many workers, and how many it gets back.

    python -m benchmarks.batch_fill --workers 16
    python -m benchmarks.batch_fill --workers 16 --window 512

The workers are processes that compute nothing: each has 64 places and takes 8 seconds for a line. Prints,
every ten seconds, the lines under way at the router and the lines per second that were answered.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

import httpx

from baton_cli.batch_service import BatchService
from tests.batches import chaos
from tests.batches.chaos import Program, Router
from tests.ports import steady_ports

EVERY_S = 10.0
LINES = 50_000
IN_FLIGHT = re.compile(r"^baton_router_requests_in_flight (\S+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--window", type=int, default=0, help="--batch-window of the router")
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batch-fill-") as folder:
        run(Path(folder), given.workers, given.window, given.seconds)
    return 0


def run(folder: Path, workers: int, window: int, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        port, *ports = steady_ports(workers + 1)
        for one in ports:
            arguments = ["tests.batches.mock_worker", f"--port={one}", "--seconds=8", "--slots=64"]
            stack.callback(Program(arguments, folder / "worker.log", {}).kill)
        more = (f"--batch-window={window}", "--batch-lease-s=15")
        router = Router(folder, port, ports, {}, "router", *more)
        stack.callback(router.program.end)
        router.await_ready()
        service = BatchService(router.url, "", lambda reason: None)
        stack.callback(service.close)
        source = folder / "input.jsonl"
        chaos.write_lines(source, LINES)
        id = chaos.submit(service, source)
        began, before, then = time.monotonic(), 0, time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(EVERY_S)
            page = httpx.get(f"{router.url}/metrics", trust_env=False, timeout=60)
            under_way = IN_FLIGHT.search(page.text)
            done, now = service.batch(id)["request_counts"]["completed"], time.monotonic()
            rate = (done - before) / (now - then)
            print(
                f"{now - began:5.0f} s: {under_way and under_way[1]} under way, {rate:.0f} lines/s",
                flush=True,
            )
            before, then = done, now
        service.cancel(id)


if __name__ == "__main__":
    sys.exit(main())
