"""One policy over the whole load, in whatever world and however fast its time passes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import psutil

from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.autoscaler import SLEEP_INTERVAL_S
from benchmarks.scaling.case import INTERVAL_S, Case
from benchmarks.scaling.day import MINUTE, Request, requests
from benchmarks.scaling.score import Answer, Count, Score
from benchmarks.scaling.world import Scaler, World

TIMEOUT_S = 3600.0
"""That clients have at the end, as meant."""


async def play(
    name: str,
    scaler: Scaler,
    first: Mapping[RoleName, int],
    world: World,
    case: Case,
    scale: float,
    seed: int,
) -> Score:
    """Run a case. `first`: initial workers. `scale`: times faster than modeled."""
    score = Score(name, case)
    for role, count in first.items():
        await world.scale(role, count)
    await world.ready()
    clock = asyncio.get_running_loop().time
    began = next_look = clock()
    world.begin()
    asking = asyncio.create_task(_clients(world, case, began, scale, seed))
    dark = False
    while (minute := (clock() - began) * scale / MINUTE) < case.end:
        if (case.dark[0] <= minute < case.dark[1]) != dark:
            dark = not dark
            await (world.darken() if dark else world.lighten())
        sample = await world.see()
        wanted = scaler.wanted(sample)
        for role, count in wanted.items():
            if count != len(sample.pods[role]):
                await world.scale(role, count)
        score.counts.append(Count(minute, wanted["prefill"], wanted["decode"]))
        score.loads.append(psutil.getloadavg()[0])
        # A service that sleeps is looked at as often as the operator does it.
        next_look += (INTERVAL_S if any(sample.pods.values()) else SLEEP_INTERVAL_S) / scale
        await asyncio.sleep(max(0.0, next_look - clock()))
    score.replica_hours = world.replica_hours
    score.answers = await asking
    score.ends = world.ends
    return score


async def _clients(world: World, case: Case, began: float, scale: float, seed: int) -> list[Answer]:
    clock = asyncio.get_running_loop().time
    asking: dict[asyncio.Task[Answer], Request] = {}
    for request in requests(case.phases, seed):
        await asyncio.sleep(max(0.0, began + request.at_s / scale - clock()))
        asking[asyncio.create_task(world.ask(request))] = request
    done, waiting = await asyncio.wait(asking, timeout=TIMEOUT_S / scale)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    unanswered = (Answer(asking[task].phase.name, why="not answered") for task in waiting)
    return [*(task.result() for task in done), *unanswered]
