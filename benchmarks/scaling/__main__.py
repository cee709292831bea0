"""What the package's docstring says, from a command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks import virtual_time
from benchmarks.scaling import __doc__ as about
from benchmarks.scaling.imagined import ImaginedWorld
from benchmarks.scaling.play import play
from benchmarks.scaling.policies import POLICIES, first
from benchmarks.scaling.processes import ProcessWorld
from benchmarks.scaling.score import Score
from tests.router.fake_kubernetes import FakeKubernetes

PORTS = 200
"""For each policy."""


async def imagined(kind: str, seed: int) -> Score:
    async with ImaginedWorld() as world:
        return await play(kind, POLICIES[kind](), first(kind), world, 1.0, seed)


async def real(kind: str, seed: int, scale: float, port: int) -> Score:
    with tempfile.TemporaryDirectory(prefix="baton-scaling-") as name:
        folder = Path(name)
        async with FakeKubernetes(folder) as api, ProcessWorld(folder, api, port, scale) as world:
            return await play(kind, POLICIES[kind](), first(kind), world, scale, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["baton"])
    parser.add_argument("--imagined", action="store_true", help="in virtual time, without processes")
    parser.add_argument("--scale", type=float, default=18.0, help="times faster than meant")
    parser.add_argument("--port", type=int, default=9500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for number, kind in enumerate(options.policy):
        if options.imagined:
            score = virtual_time.run(imagined(kind, options.seed))
        else:
            score = asyncio.run(real(kind, options.seed, options.scale, options.port + PORTS * number))
        print(json.dumps(score.summary, indent=1), flush=True)


if __name__ == "__main__":
    main()
