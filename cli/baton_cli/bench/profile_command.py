"""`baton bench --find`: a profile of a model on the machines of a service, as a file and in words."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from baton_api import profiles
from baton_api.profiles import Profile
from baton_cli.bench.command import BenchPlan, BenchTarget, Say
from baton_cli.bench.connection import Endpoint
from baton_cli.bench.profiler import DecodeCapacity, Profiler
from baton_cli.bench.session import open_session, target
from baton_cli.top.snapshot import ServiceReader


def find(where: BenchTarget, wanted: BenchPlan, path: Path, repeats: int, as_json: bool) -> None:
    """Measure what a model takes, and write it down as a profile."""
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
    say("starting" if where.started else f"asking {where.url} for its workers")
    async with target(where.started, where.url, where.api_key, apart=True) as (url, key):
        reader, endpoint = ServiceReader(url, key), Endpoint(url, key, wanted.timeout_s)
        try:
            room = DecodeCapacity.of(await asyncio.to_thread(reader.look))
            session = await open_session(endpoint, where.model, wanted.seed)
            return await Profiler(session, room, repeats, say).find(wanted.objectives)
        finally:
            endpoint.close()
            reader.close()


def described(profile: Profile) -> Iterator[str]:
    """What the lines say in figures that people know."""
    asked, found = profile.objectives, profile.capacity
    for length in sorted(
        {one.tokens for one in profile.points if one.what == "transfer"} or {asked.prompt_tokens}
    ):
        yield f"a prompt of {length} tokens: {1e3 * profile.prefill.seconds(length, length):.4g} ms"
    for streams in sorted({one.streams for one in profile.points if one.what == "step"}):
        seconds = profile.step.seconds(streams, streams * asked.prompt_tokens)
        yield (
            f"a step of {streams} streams of {asked.prompt_tokens} tokens: {1e3 * seconds:.4g} ms, "
            f"{streams / seconds if seconds else 0:.0f} tokens/s"
        )
    moved = profile.transfer.seconds(asked.prompt_tokens)
    yield f"moving {asked.prompt_tokens} tokens: {1e3 * moved:.4g} ms"
    yield (
        f"within {1e3 * asked.ttft_s:g} ms to the first token and {1e3 * asked.itl_s:g} ms for each, "
        f"{asked.prompt_tokens} in ({100 * asked.cached_share:.0f} % cached), {asked.output_tokens} out:"
    )
    yield f"  a prefill worker computes {found.prefill_tokens_per_s:.0f} tokens/s"
    yield f"  a decode worker makes {found.decode_tokens_per_s:.0f} tokens/s, {found.decode_streams} streams"
    yield (
        f"  {found.prefill_per_decode:.2g} prefill workers for each decode worker"
        if found.prefill_per_decode
        else "  these objectives cannot be kept on this machine"
    )
