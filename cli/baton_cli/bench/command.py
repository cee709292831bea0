"""`baton bench`: run load levels, and report the results as a table or JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton_api import __version__
from baton_api.errors import SetupError
from baton_api.profiles import Objectives
from baton_cli.bench.connection import Endpoint
from baton_cli.bench.load import ClientCost, Session, Shape, open_session, target
from baton_cli.bench.report import Level, Objective, Spread, level, significant

SOME_FAILED = 3
"""Exit status if requests failed, the same as for lines of `baton batch`."""

WIDE = 200

Say = Callable[[str], object]
"""Receives progress messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """The service to measure."""

    url: str
    api_key: str
    model: str
    """Model name. Empty: the first one that the service lists."""
    started: str = ""
    """Model to start on this machine, instead of `url`."""

    @property
    def shown(self) -> str:
        return f"a local prefill and decode worker of {self.started}" if self.started else self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The load levels: clients, rates, or a trace."""

    shape: Shape
    objective: Objective
    clients: Sequence[int]
    rates: Sequence[float]
    trace: Path | None
    minutes: float
    speed: float
    requests: int
    warm_up: int
    seed: int
    timeout_s: float

    @property
    def objectives(self) -> Objectives:
        """The objectives of a profile. Unset values keep their defaults."""
        default, shape, objective = Objectives(), self.shape, self.objective
        return Objectives(
            ttft_s=default.ttft_s if objective.ttft_s is None else objective.ttft_s,
            itl_s=default.itl_s if objective.tpot_s is None else objective.tpot_s,
            prompt_tokens=shape.prompt,
            output_tokens=shape.output,
            cached_share=min(1.0, shape.shared / shape.prompt),
        )


def bench(where: BenchTarget, wanted: BenchPlan, save: Path | None, as_json: bool) -> None:
    """Run all levels and report them. Exits with `SOME_FAILED` if a request failed."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    with Console(stderr=True).status("") as status:
        model, levels = asyncio.run(_measure(where, wanted, status.update))
    data = as_data(where.shown, model, wanted, levels)
    if save is not None:
        _save(save, data)
    if as_json:
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        show(console, where.shown, model, wanted, levels)
    if any(measured.failed for measured in levels):
        raise typer.Exit(SOME_FAILED)


async def _measure(where: BenchTarget, wanted: BenchPlan, say: Say) -> tuple[str, list[Level]]:
    say("starting" if where.started else f"reading the model of {where.url}")
    async with target(where.started, where.url, where.api_key, disaggregated=False) as (url, key):
        endpoint = Endpoint(url, key, wanted.timeout_s)
        try:
            session = await open_session(endpoint, where.model, wanted.seed)
            if wanted.warm_up:
                say("warming up")
                await session.closed(wanted.shape, max(1, min(4, wanted.warm_up)), wanted.warm_up)
            return session.model, [measured async for measured in _levels(session, wanted, say)]
        finally:
            endpoint.close()


async def _levels(session: Session, wanted: BenchPlan, say: Say) -> AsyncIterator[Level]:
    if wanted.trace is not None:
        say(f"playing {wanted.trace.name}")
        played = await session.trace(wanted.trace, wanted.minutes, wanted.speed)
        yield level(f"{wanted.trace.name} x {wanted.speed:g}", wanted.speed, played, wanted.objective)
    elif wanted.rates:
        for rate in wanted.rates:
            say(f"{rate:g} requests/s")
            played = await session.open(wanted.shape, rate, wanted.requests)
            yield level(f"{rate:g} requests/s", rate, played, wanted.objective)
    else:
        for clients in wanted.clients:
            name = f"{clients} client{'s' * (clients != 1)}"
            say(name)
            played = await session.closed(wanted.shape, clients, max(wanted.requests, clients))
            yield level(name, clients, played, wanted.objective)


def as_data(url: str, model: str, wanted: BenchPlan, levels: Sequence[Level]) -> dict[str, Any]:
    """Return the results as JSON data."""
    return {
        "format": 1,
        "measured_at": time.time(),
        "baton": __version__,
        "client": platform.node(),
        "url": url,
        "model": model,
        "shape": dataclasses.asdict(wanted.shape) if wanted.trace is None else None,
        "trace": str(wanted.trace) if wanted.trace else None,
        "objective": dataclasses.asdict(wanted.objective),
        "seed": wanted.seed,
        "levels": [dataclasses.asdict(measured) for measured in levels],
    }


def show(console: Console, url: str, model: str, wanted: BenchPlan, levels: Sequence[Level]) -> None:
    """Print one line per level, with errors and warnings about the client."""
    console.print(Text.assemble((model, "bold"), f" at {url}: {_shaped(wanted)}\n"))
    console.print(table(levels))
    for measured in levels:
        if measured.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in measured.errors.items())
            console.print(Text(f"\n{measured.load}: {kinds}. First error: {measured.example}", style="red"))
        if measured.client_is_bottleneck:
            console.print(Text(f"\n{measured.load}: {blamed(measured.client)}", style="yellow"))


def table(levels: Sequence[Level]) -> Table:
    """Return a table with one line per level. Times are in milliseconds."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("load", no_wrap=True)
    for name in (
        "requests/s",
        "tokens/s",
        "TTFT p50",
        "p95",
        "p99 ms",
        "per token p50",
        "p95",
        "p99 ms",
        "total p50",
        "p99 ms",
        "cached",
        "failed",
        "good",
        "good/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for measured in levels:
        table.add_row(
            measured.load,
            f"{measured.requests_per_s:.2f}",
            f"{measured.output_tokens_per_s:.1f}",
            *_shares(measured.ttft, ("p50", "p95", "p99")),
            *_shares(measured.tpot, ("p50", "p95", "p99")),
            *_shares(measured.total, ("p50", "p99")),
            f"{100 * measured.cached_share:.0f} %",
            Text(str(measured.failed), style="bold red" if measured.failed else ""),
            f"{100 * measured.good_share:.0f} %",
            f"{measured.goodput_per_s:.2f}",
        )
    return table


def blamed(client: ClientCost) -> str:
    """Explain why the client limited a level."""
    return (
        f"the client was the bottleneck ({100 * client.cpu_share:.0f} % of a core, event loop lag "
        f"{1e3 * client.lag_p99_s:.0f} ms, requests {1e3 * client.late_p99_s:.0f} ms late), so these times "
        "are too long. Run the client on another machine, or use fewer clients."
    )


def _shares(spread: Spread | None, names: Sequence[str]) -> list[str]:
    if spread is None:
        return ["-"] * len(names)
    return [significant(1e3 * getattr(spread, name)) for name in names]


def _shaped(wanted: BenchPlan) -> str:
    if wanted.trace is not None:
        return f"{wanted.trace.name}, {wanted.minutes:g} minutes"
    shape = wanted.shape
    shared = f", {shape.shared} of them shared by {shape.groups} groups" if shape.shared else ""
    return f"{shape.prompt} prompt tokens{shared}, {shape.output} output tokens"


def _save(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise SetupError(f"Cannot write the results to {path}: {error.strerror}.") from error
