"""Command line of this package; its docstring describes the options."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks import virtual_time
from benchmarks.scaling import __doc__ as about
from benchmarks.scaling.case import CASES
from benchmarks.scaling.imagined import ImaginedWorld
from benchmarks.scaling.play import play
from benchmarks.scaling.policies import POLICIES, first
from benchmarks.scaling.processes import ProcessWorld
from benchmarks.scaling.score import Score
from tests.router.fake_kubernetes import FakeKubernetes

PORTS = 200
"""For each policy."""


async def imagined(kind: str, seed: int, name: str = "day") -> Score:
    case = CASES[name]
    async with ImaginedWorld(case) as world:
        return await play(kind, POLICIES[kind](case), first(kind, case), world, case, 1.0, seed)


async def real(kind: str, seed: int, scale: float, port: int) -> Score:
    case = CASES["day"]
    with tempfile.TemporaryDirectory(prefix="baton-scaling-") as name:
        folder = Path(name)
        async with FakeKubernetes(folder) as api, ProcessWorld(folder, api, port, scale) as world:
            return await play(kind, POLICIES[kind](case), first(kind, case), world, case, scale, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["baton"])
    parser.add_argument("--imagined", action="store_true", help="in virtual time, without processes")
    parser.add_argument("--case", choices=CASES, default="day", help="others than day: with --imagined")
    parser.add_argument("--scale", type=float, default=18.0, help="times faster than meant")
    parser.add_argument("--port", type=int, default=9500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.case != "day" and not options.imagined:
        parser.error(f"The case {options.case} has no processes. Add --imagined.")
    for number, kind in enumerate(options.policy):
        if options.imagined:
            score = virtual_time.run(imagined(kind, options.seed, options.case))
        else:
            score = asyncio.run(real(kind, options.seed, options.scale, options.port + PORTS * number))
        print(json.dumps(score.summary, indent=1), flush=True)


if __name__ == "__main__":
    main()
