"""`baton top`: read snapshots periodically, and print or draw the rates."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton_api.setting_types import show_size
from baton_cli.top.snapshot import ServiceRates, ServiceReader, Snapshot, WorkerRates, rates

WINDOW_S = 30.0
"""Window of rates and percentiles."""

WIDE = 200
"""Columns of output to a file or a pipe."""

BUSY, FULL = 0.8, 0.95
"""KV cache usage that is shown in yellow and in red."""


def top(url: str, api_key: str, interval_s: float, once: bool, as_json: bool) -> None:
    """
    Refresh until Ctrl-C. With `once`, or without a terminal, print once.

    JSON output has one object per line.
    """
    console = Console()
    reader = ServiceReader(url, api_key)
    try:
        if once or not (as_json or console.is_terminal):
            before = reader.read()
            time.sleep(interval_s)
            _print(console, rates(before, reader.read(), since_start=True), reader.url, as_json)
        else:
            _follow(console, reader, interval_s, as_json)
    except KeyboardInterrupt:
        pass
    finally:
        reader.close()


def _follow(console: Console, reader: ServiceReader, interval_s: float, as_json: bool) -> None:
    snapshots: deque[Snapshot] = deque([reader.read()])
    with Live(console=console, screen=not as_json and console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            snapshots.append(reader.read())
            while len(snapshots) > 2 and snapshots[-1].at_s - snapshots[1].at_s >= WINDOW_S:
                snapshots.popleft()
            now = rates(snapshots[0], snapshots[-1])
            if as_json:
                _print(console, now, reader.url, as_json)
            else:
                live.update(screen(now, reader.url), refresh=True)


def _print(console: Console, now: ServiceRates, url: str, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(now)) + "\n")
        sys.stdout.flush()
        return
    if not console.is_terminal:
        console.width = WIDE
    console.print(screen(now, url))


def screen(now: ServiceRates, url: str) -> RenderableType:
    """Return the whole screen."""
    ready = sum(one.state == "ready" for one in now.workers)
    head = Text.assemble(
        (", ".join(now.models) or "no model", "bold"),
        f" at {url}; {ready} of {len(now.workers)} workers ready\n",
        ("requests ", "dim"),
        f"{_number(now.requests_per_s)}/s, {_count(now.in_flight)} running, {_count(now.waiting)} queued",
        (f", {_number(now.failed_per_s)}/s failed", "bold red") if now.failed_per_s else "",
        ("   tokens ", "dim"),
        f"{_number(now.generated_tokens_per_s)}/s",
        ("   cached ", "dim"),
        _percent(now.cache_hit),
        ("\ntime to first token ", "dim"),
        _times(now.ttft_s),
        ("   per token ", "dim"),
        _times(now.itl_s),
        ("   (p50 p95 p99)\n", "dim"),
    )
    return Group(head, _table(now))


def _table(now: ServiceRates) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "prompt tok/s", "tok/s", "KV", "hit", "transfer", "TTFT p50 p95 p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in now.workers:
        table.add_row(*_row(one))
    return table


def _row(one: WorkerRates) -> list[Text]:
    state = ": ".join(filter(None, (one.state, one.reason, *one.warnings)))
    colour = {"ready": "green", "starting": "yellow", "draining": "yellow"}.get(one.state, "red")
    if colour == "green" and one.warnings:
        colour = "yellow"
    speed = "-" if one.transfer_bytes_per_s is None else f"{show_size(one.transfer_bytes_per_s)}/s"
    return [
        Text(one.worker if not one.revision else f"{one.worker} ({one.revision})"),
        Text(one.role),
        Text(state, style=colour),
        Text(_count(one.running)),
        Text(_count(one.waiting), style="yellow" if one.waiting else ""),
        Text(_number(one.prompt_tokens_per_s)),
        Text(_number(one.generated_tokens_per_s)),
        _bar(one.kv_usage),
        Text(_percent(one.cache_hit)),
        Text(speed),
        Text(_times(one.ttft_s)),
    ]


def _bar(share: float | None) -> Text:
    """
    Return a bar of ten characters with the percentage.

    >>> _bar(0.25).plain
    '██▌        25 %'
    """
    if share is None:
        return Text("-")
    halves = round(20 * min(1.0, max(0.0, share)))
    filled = "█" * (halves // 2) + "▌" * (halves % 2)
    colour = "red" if share >= FULL else "yellow" if share >= BUSY else "green"
    return Text.assemble((f"{filled:<10}", colour), f"{_percent(share):>5}")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    """
    >>> _number(0.25), _number(3.04), _number(1234.5), _number(None)
    ('0.25', '3.0', '1234', '-')
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if 0 < value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _times(seconds: tuple[float, ...] | None) -> str:
    return "-" if seconds is None else " ".join(map(_time, seconds))


def _time(seconds: float) -> str:
    """
    >>> _time(0.0123), _time(0.5), _time(12.3)
    ('12.3 ms', '500 ms', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
