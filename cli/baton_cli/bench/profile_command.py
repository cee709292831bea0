"""`baton bench --find`: measure a model on the machines of a service, and write a profile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from baton_api import profiles
from baton_api.profiles import Profile
from baton_cli import router_workers
from baton_cli.bench.command import BenchPlan, BenchTarget, Say
from baton_cli.bench.connection import Endpoint
from baton_cli.bench.profiler import DecodeCapacity, Profiler
from baton_cli.bench.session import open_session, target


def find(where: BenchTarget, wanted: BenchPlan, path: Path, repeats: int, as_json: bool) -> None:
    """Measure the performance of a model, and write a profile."""
    console = Console()
    with Console(stderr=True).status("") as status:
        profile = asyncio.run(_find(where, wanted, repeats, status.update))
    profiles.write(profile, path)
    if as_json:
        sys.stdout.write(path.read_text())
        return
    console.print(Text.assemble((profile.model, "bold"), f" on {profile.machine}\n"))
    for line in described(profile):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"\nWritten to {path}: baton router --profile {path}", style="dim"), soft_wrap=True)


async def _find(where: BenchTarget, wanted: BenchPlan, repeats: int, say: Say) -> Profile:
    say("starting" if where.started else f"reading the workers of {where.url}")
    async with target(where.started, where.url, where.api_key, disaggregated=True) as (url, key):
        endpoint = Endpoint(url, key, wanted.timeout_s)
        try:
            capacity = await asyncio.to_thread(lambda: DecodeCapacity.of(router_workers.read(url, key)))
            session = await open_session(endpoint, where.model, wanted.seed)
            return await Profiler(session, capacity, repeats, say).find(wanted.objectives)
        finally:
            endpoint.close()


def described(profile: Profile) -> Iterator[str]:
    """Describe a profile by prefill, step and transfer times, and by capacity."""
    objectives, capacity = profile.objectives, profile.capacity
    for length in sorted(
        {point.tokens for point in profile.points if point.what == "transfer"} or {objectives.prompt_tokens}
    ):
        yield f"prefill of {length} tokens: {1e3 * profile.prefill.seconds(length, length):.4g} ms"
    for streams in sorted({point.streams for point in profile.points if point.what == "step"}):
        seconds = profile.step.seconds(streams, streams * objectives.prompt_tokens)
        yield (
            f"decode step of {streams} streams with {objectives.prompt_tokens} tokens: {1e3 * seconds:.4g} "
            f"ms, {streams / seconds if seconds else 0:.0f} tokens/s"
        )
    moved = profile.transfer.seconds(objectives.prompt_tokens)
    yield f"transfer of {objectives.prompt_tokens} tokens: {1e3 * moved:.4g} ms"
    yield (
        f"capacity with a time to first token of {1e3 * objectives.ttft_s:g} ms and "
        f"{1e3 * objectives.itl_s:g} ms per token, {objectives.prompt_tokens} in "
        f"({100 * objectives.cached_share:.0f} % cached), {objectives.output_tokens} out:"
    )
    yield f"  prefill worker: {capacity.prefill_tokens_per_s:.0f} tokens/s"
    yield f"  decode worker: {capacity.decode_tokens_per_s:.0f} tokens/s, {capacity.decode_streams} streams"
    yield (
        f"  {capacity.prefill_per_decode:.2g} prefill workers per decode worker"
        if capacity.prefill_per_decode
        else "  this machine cannot meet these objectives"
    )
