"""The figures of several loads as one picture, SVG or PNG by the name of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton_api.errors import SetupError
from baton_cli.bench.report import Level, Spread

FORMATS = (".svg", ".png", ".pdf")
COLOURS = ("#1b6ca8", "#e08e0b", "#b3312c")
WIDTH, HEIGHT = 10.0, 6.0


def check(path: Path) -> None:
    """Before anything is measured. Raises SetupError."""
    if path.suffix not in FORMATS:
        raise SetupError(f"--picture {path}: the name of a picture ends in {', '.join(FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise SetupError("--picture needs one package more: pip install 'baton[pictures]'.") from error


def draw(levels: Sequence[Level], title: str, axis: str, path: Path) -> None:
    """Throughput and the times to the first token, per token and in all, over the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    figure.suptitle(title)
    throughput, ttft, tpot, total = figure.subplots(2, 2).flat
    loads = [one.value for one in levels]
    throughput.plot(loads, [one.output_tokens_per_s for one in levels], "o-", color=COLOURS[0])
    throughput.set_title("tokens generated per second")
    good = throughput.twinx()
    good.plot(loads, [100 * one.good_share for one in levels], "s--", color=COLOURS[1])
    good.set_ylabel("% of requests within objectives", color=COLOURS[1])
    good.set_ylim(0, 105)
    for axes, name, spreads in (
        (ttft, "time to first token, ms", [one.ttft for one in levels]),
        (tpot, "time per token, ms", [one.tpot for one in levels]),
        (total, "whole answer, ms", [one.total for one in levels]),
    ):
        axes.set_title(name)
        for share, colour in zip(("p50", "p95", "p99"), COLOURS, strict=True):
            axes.plot(loads, [_milliseconds(one, share) for one in spreads], "o-", color=colour, label=share)
        axes.legend()
    for axes in (throughput, ttft, tpot, total):
        axes.set_xlabel(axis)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _milliseconds(spread: Spread | None, share: str) -> float:
    return float("nan") if spread is None else 1e3 * float(getattr(spread, share))
