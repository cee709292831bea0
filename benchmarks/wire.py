"""
A long fuzz of the wire: `tests/wire/fuzz.py` against a router of one process, of two, and a worker.

    python -m benchmarks.wire [--count 100000] [--seed 1] [--only router]

The servers are processes of their own; a fake worker answers behind the routers, and the worker has a tiny
model. Prints a line of counts for each server and kind, and each fault with its seed. Ends with 1 if there
is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx

from tests.engine.models import make_model
from tests.ports import steady_port
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker, saying
from tests.wire.fuzz import run, send_body, send_framed, send_mutated

START_S = 300.0
MODEL = "tiny"
SERVERS = {"router": 1, "router of two processes": 2, "worker": 0}
"""Servers with the number of the router's processes."""


@contextlib.asynccontextmanager
async def serving(processes: int, folder: Path) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """The port and the process of a router, or of a worker if `processes` is 0."""
    port = steady_port()
    async with FakeWorker(saying(200, fake_worker.whole_answer())) as behind:
        if processes:
            flags = [
                "router",
                f"--decode={behind.url}",
                f"--processes={processes}",
                f"--state={folder / 'state'}",
            ]
        else:
            model = make_model(folder / MODEL)
            flags = ["serve", str(model), "--threads=1", "--kv-cache-memory=16MiB", "--dtype=float32"]
        command = (sys.executable, "-m", "baton_cli.main", *flags, "--host=127.0.0.1", f"--port={port}")
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            await ready(port)
            yield port, process
        finally:
            process.terminate()
            await process.wait()


async def ready(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/ready")).is_success:
                    return
            await asyncio.sleep(0.2)


async def fuzz(name: str, seed: int, count: int) -> int:
    """Print the counts of one server; returns the number of faults."""
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        async with serving(SERVERS[name], Path(folder)) as (port, process):
            kinds = {
                "raw bytes": partial(send_mutated, port),
                "framings": partial(send_framed, port),
                "bodies": partial(send_body, port, model=MODEL),
            }
            for kind, send in kinds.items():
                start = time.monotonic()
                counts = await run(seed, count, send)
                print(f"{name}, {kind}: {counts.line()} in {time.monotonic() - start:.0f} s", flush=True)
                for fault in counts.faults[:20]:
                    print(f"    {fault}", flush=True)
                faults += len(counts.faults) + (process.returncode is not None)
            await ready(port)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(SERVERS))
    given = parser.parse_args()
    print(json.dumps(vars(given)), flush=True)
    names = [given.only] if given.only else list(SERVERS)
    faults = sum(asyncio.run(fuzz(name, given.seed, given.count)) for name in names)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
