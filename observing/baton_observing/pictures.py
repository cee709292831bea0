"""
A picture of each dashboard: its panels, drawn from what a Prometheus says of the last minutes.

    python -m baton_observing.pictures --prometheus http://127.0.0.1:9090 --minutes 10

For pages about dashboards, and to see them where there is no Grafana.
"""

from __future__ import annotations

import argparse
import io
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from baton_observing.boards import BOARDS
from baton_observing.panels import Board, Panel, Row
from baton_observing.prometheus import Line, Prometheus, Span

COLUMNS = 24
WIDTH_IN = 15.0
ROW_IN = 2.5
NUMBER_IN = 1.1
TITLE_IN = 0.35
DPI = 72
COLOURS = 64
"""Of a picture: so many are told apart, and the file stays small."""

POINTS = 240
NAMELESS = "(none)"
MOST_LINES = 8
"""In a legend; all are drawn."""

STATE_COLORS = {
    "green": "#37872d", "red": "#c4162a", "orange": "#ff780a", "blue": "#1f60c4", "gray": "#888888",
    "transparent": "none",
}  # fmt: skip

SCALES = (
    (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (1, 1, ""), (1e-3, 1e-3, "m"), (1e-6, 1e-6, "µ"),
)  # fmt: skip
SUFFIXES = {"s": "s", "Bps": "B/s", "bytes": "B", "reqps": "/s", "cps": "/s", "ops": "/s"}


def written(value: float, unit: str) -> str:
    """
    >>> written(0.0125, "s"), written(0.25, "percentunit"), written(12_300_000, "Bps"), written(3, "none")
    ('12.5 ms', '25 %', '12.3 MB/s', '3')
    """
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    least, scale, prefix = next((one for one in SCALES if abs(value) >= one[0]), (1, 1, ""))
    if least < 1 and unit != "s":
        scale, prefix = 1, ""
    return f"{value / scale:.3g} {prefix}{SUFFIXES.get(unit, '')}".strip()


def draw(board: Board, prometheus: Prometheus, span: Span) -> bytes:
    """A PNG."""
    rows = [row for whole in board.rows for row in _lines_of_panels(whole)]
    heights = [TITLE_IN * bool(title) + _height(panels) for title, panels in rows]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + TITLE_IN), dpi=DPI, facecolor="#f4f5f5")
    figure.text(0.01, 1 - 0.2 / figure.get_figheight(), board.title, fontsize=15, weight="bold", va="center")
    top = figure.get_figheight() - TITLE_IN
    for (title, panels), height in zip(rows, heights, strict=True):
        if title:
            figure.text(0.01, (top - TITLE_IN / 2) / figure.get_figheight(), title, fontsize=11, va="center")
        column = 0
        for panel in panels:
            bottom = top - height
            axes = figure.add_axes(_place(figure, panel, column, bottom, _height(panels)))
            _panel(axes, panel, [prometheus.shown(query, span) for query in panel.queries])
            column += panel.width
        top -= height
    return _small(figure)


def _lines_of_panels(row: Row) -> list[tuple[str, list[Panel]]]:
    """Panels that stand beside one another; the first ones with the row's title."""
    lines: list[tuple[str, list[Panel]]] = [(row.title, [])]
    for panel in row.panels:
        if sum(one.width for one in lines[-1][1]) >= COLUMNS:
            lines.append(("", []))
        lines[-1][1].append(panel)
    return lines


def _height(panels: Sequence[Panel]) -> float:
    return NUMBER_IN if all(panel.kind == "number" for panel in panels) else ROW_IN


def _place(
    figure: Figure, panel: Panel, column: int, bottom: float, height: float
) -> tuple[float, float, float, float]:
    """Left, bottom, width and height within the figure, with room for ticks and title."""
    whole = figure.get_figheight()
    left_in, below_in, above_in = (0.1, 0.1, 0.3) if panel.kind == "number" else (0.65, 0.75, 0.3)
    left = column / COLUMNS + left_in / WIDTH_IN
    width = panel.width / COLUMNS - (left_in + 0.15) / WIDTH_IN
    return left, (bottom + below_in) / whole, width, (height - below_in - above_in) / whole


def _panel(axes: Axes, panel: Panel, answers: Sequence[Sequence[Line]]) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left", pad=4)
    named = [
        (line.called(query.legend) or NAMELESS, line)
        for query, lines in zip(panel.queries, answers, strict=True)
        for line in lines
    ]
    if panel.kind == "number":
        _number(axes, panel, [line for _, line in named])
    elif panel.kind == "states":
        _states(axes, panel, named)
    else:
        _lines(axes, panel, named)


def _number(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    axes.set_axis_off()
    value = lines[0].values[-1] if lines else None
    bad = value is not None and panel.limit is not None and value >= panel.limit
    text = "no data" if value is None else written(value, panel.unit)
    axes.text(0.0, 0.5, text, fontsize=20, va="center", color="#c4162a" if bad else "#37872d")


def _states(axes: Axes, panel: Panel, named: Sequence[tuple[str, Line]]) -> None:
    """A row for each series, in the colors of its states."""
    colors = {one.value: STATE_COLORS[one.color] for one in panel.states}
    for row, (_, line) in enumerate(named[:MOST_LINES]):
        shown = [colors.get(round(value), "#888888") for value in line.values]
        axes.scatter(line.times, [row] * len(line.times), c=shown, marker="s", s=24, linewidths=0)
    axes.set_yticks(range(len(named[:MOST_LINES])), [name for name, _ in named[:MOST_LINES]])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
    axes.tick_params(labelsize=6)


def _lines(axes: Axes, panel: Panel, named: Sequence[tuple[str, Line]]) -> None:
    if panel.kind == "stacked" and named:
        times = sorted({time for _, line in named for time in line.times})
        values = [dict(zip(line.times, line.values, strict=True)) for _, line in named]
        stacks = [[one.get(time, 0.0) for time in times] for one in values]
        axes.stackplot(times, stacks, labels=[name for name, _ in named], alpha=0.7)
    else:
        for name, line in named:
            axes.plot(line.times, line.values, label=name, linewidth=1.2)
    if panel.limit is not None and axes.get_ylim()[1] > panel.limit / 4:
        axes.axhline(panel.limit, color="#c4162a", linestyle="--", linewidth=0.8)
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # so that a line at 0 is seen
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, panel.unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
    axes.tick_params(labelsize=7)
    axes.grid(color="#dddddd", linewidth=0.5)
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles[:MOST_LINES],
            [textwrap.shorten(name, 34, placeholder="…") for name in names[:MOST_LINES]],
            fontsize=7, ncols=4, loc="upper left", bbox_to_anchor=(-0.05, -0.13), frameon=False,
            columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"


def _small(figure: Figure) -> bytes:
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLOURS).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main(arguments: list[str] | None = None) -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description="Draw each dashboard as a picture.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=10, help="how far to look back")
    parser.add_argument("--window", default="1m", help="of rates")
    parser.add_argument("--folder", type=Path, default=Path("docs/dashboards"))
    given = parser.parse_args(arguments)
    end = time.time()
    seconds = given.minutes * 60
    span = Span(end - seconds, end, max(1.0, seconds / POINTS), given.window)
    given.folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (given.folder / f"{board.name}.png").write_bytes(draw(board, Prometheus(given.prometheus), span))


if __name__ == "__main__":
    main()
