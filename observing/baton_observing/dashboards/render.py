"""
Render each dashboard as a PNG, from the last minutes of a Prometheus.

    python -m baton_observing.dashboards.render --prometheus http://127.0.0.1:9090 --minutes 10

The documentation shows these images; they need no Grafana.
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

from baton_observing.dashboards import DASHBOARDS
from baton_observing.dashboards.panels import Dashboard, Panel, Row, Unit
from baton_observing.dashboards.prometheus import Prometheus, Series, TimeRange

COLUMNS = 24
WIDTH_IN = 15.0
ROW_IN = 2.5
STAT_IN = 1.1
TITLE_IN = 0.35
DPI = 72
PALETTE = 64
"""Colors of an image. Fewer colors make a smaller file."""

POINTS = 240
UNNAMED = "(none)"
LEGEND_ENTRIES = 8
"""More series are drawn, but not named."""

STATE_COLORS = {
    "green": "#37872d", "red": "#c4162a", "orange": "#ff780a", "blue": "#1f60c4", "gray": "#888888",
    "transparent": "none",
}  # fmt: skip

SCALES = (
    (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (1, 1, ""), (1e-3, 1e-3, "m"), (1e-6, 1e-6, "µ"),
)  # fmt: skip
SUFFIXES = {"s": "s", "Bps": "B/s", "bytes": "B", "reqps": "/s", "cps": "/s"}


def formatted(value: float, unit: Unit) -> str:
    """
    Format a value with its unit and an SI prefix.

    >>> from baton_observing.dashboards.panels import BYTES_PER_SECOND, PERCENT, SECONDS, count
    >>> formatted(0.0125, SECONDS), formatted(0.25, PERCENT)
    ('12.5 ms', '25 %')
    >>> formatted(12_300_000, BYTES_PER_SECOND), formatted(3, count("workers"))
    ('12.3 MB/s', '3')
    """
    if unit.grafana == "percentunit":
        return f"{value * 100:.3g} %"
    least, scale, prefix = next((one for one in SCALES if abs(value) >= one[0]), (1, 1, ""))
    if least < 1 and unit.grafana != "s":
        scale, prefix = 1, ""
    return f"{value / scale:.3g} {prefix}{SUFFIXES.get(unit.grafana, '')}".strip()


def render(dashboard: Dashboard, prometheus: Prometheus, time_range: TimeRange) -> bytes:
    """Return a PNG of a dashboard."""
    rows = [row for titled in dashboard.rows for row in _wrapped(titled)]
    heights = [TITLE_IN * bool(title) + _height(panels) for title, panels in rows]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + TITLE_IN), dpi=DPI, facecolor="#f4f5f5")
    figure.text(
        0.01, 1 - 0.2 / figure.get_figheight(), dashboard.title, fontsize=15, weight="bold", va="center"
    )
    top = figure.get_figheight() - TITLE_IN
    for (title, panels), height in zip(rows, heights, strict=True):
        if title:
            figure.text(0.01, (top - TITLE_IN / 2) / figure.get_figheight(), title, fontsize=11, va="center")
        column = 0
        for panel in panels:
            bottom = top - height
            axes = figure.add_axes(_place(figure, panel, column, bottom, _height(panels)))
            _panel(axes, panel, [prometheus.query_range(query, time_range) for query in panel.queries])
            column += panel.width
        top -= height
    return _compressed(figure)


def _wrapped(row: Row) -> list[tuple[str, list[Panel]]]:
    """Wrap a row at the full width. Only the first line has the row's title."""
    lines: list[tuple[str, list[Panel]]] = [(row.title, [])]
    for panel in row.panels:
        if sum(one.width for one in lines[-1][1]) >= COLUMNS:
            lines.append(("", []))
        lines[-1][1].append(panel)
    return lines


def _height(panels: Sequence[Panel]) -> float:
    return STAT_IN if all(panel.kind == "stat" for panel in panels) else ROW_IN


def _place(
    figure: Figure, panel: Panel, column: int, bottom: float, height: float
) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of the axes, leaving space for ticks and title."""
    whole = figure.get_figheight()
    left_in, below_in, above_in = (0.1, 0.1, 0.3) if panel.kind == "stat" else (0.65, 0.75, 0.3)
    left = column / COLUMNS + left_in / WIDTH_IN
    width = panel.width / COLUMNS - (left_in + 0.15) / WIDTH_IN
    return left, (bottom + below_in) / whole, width, (height - below_in - above_in) / whole


def _panel(axes: Axes, panel: Panel, results: Sequence[Sequence[Series]]) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left", pad=4)
    named = [
        (line.legend(query.legend) or UNNAMED, line)
        for query, lines in zip(panel.queries, results, strict=True)
        for line in lines
    ]
    if panel.kind == "stat":
        _stat(axes, panel, [line for _, line in named])
    elif panel.kind == "timeline":
        _timeline(axes, panel, named)
    else:
        _timeseries(axes, panel, named)


def _stat(axes: Axes, panel: Panel, lines: Sequence[Series]) -> None:
    axes.set_axis_off()
    value = lines[0].values[-1] if lines else None
    bad = value is not None and panel.threshold is not None and value >= panel.threshold
    text = "no data" if value is None else formatted(value, panel.unit)
    axes.text(0.0, 0.5, text, fontsize=20, va="center", color="#c4162a" if bad else "#37872d")


def _timeline(axes: Axes, panel: Panel, named: Sequence[tuple[str, Series]]) -> None:
    """Draw one row per series, in the colors of its states."""
    colors = {one.value: STATE_COLORS[one.color] for one in panel.states}
    for row, (_, line) in enumerate(named[:LEGEND_ENTRIES]):
        shown = [colors.get(round(value), "#888888") for value in line.values]
        axes.scatter(line.times, [row] * len(line.times), c=shown, marker="s", s=24, linewidths=0)
    axes.set_yticks(range(len(named[:LEGEND_ENTRIES])), [name for name, _ in named[:LEGEND_ENTRIES]])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
    axes.tick_params(labelsize=6)


def _timeseries(axes: Axes, panel: Panel, named: Sequence[tuple[str, Series]]) -> None:
    if panel.kind == "stacked" and named:
        times = sorted({time for _, line in named for time in line.times})
        values = [dict(zip(line.times, line.values, strict=True)) for _, line in named]
        stacks = [[one.get(time, 0.0) for time in times] for one in values]
        axes.stackplot(times, stacks, labels=[name for name, _ in named], alpha=0.7)
    else:
        for name, line in named:
            axes.plot(line.times, line.values, label=name, linewidth=1.2)
    if panel.threshold is not None and axes.get_ylim()[1] > panel.threshold / 4:
        axes.axhline(panel.threshold, color="#c4162a", linestyle="--", linewidth=0.8)
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # shows a line at 0
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, panel.unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
    axes.tick_params(labelsize=7)
    axes.grid(color="#dddddd", linewidth=0.5)
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles[:LEGEND_ENTRIES],
            [textwrap.shorten(name, 34, placeholder="…") for name in names[:LEGEND_ENTRIES]],
            fontsize=7, ncols=4, loc="upper left", bbox_to_anchor=(-0.05, -0.13), frameon=False,
            columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"


def _compressed(figure: Figure) -> bytes:
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(PALETTE).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main(arguments: list[str] | None = None) -> None:
    """Render all dashboards."""
    parser = argparse.ArgumentParser(description="Render each dashboard as a PNG.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of the Prometheus")
    parser.add_argument("--minutes", type=float, default=10, help="length of the time range in minutes")
    parser.add_argument("--window", default="1m", help="window of rates, in PromQL's notation")
    parser.add_argument("--folder", type=Path, default=Path("docs/dashboards"), help="folder to write to")
    options = parser.parse_args(arguments)
    end = time.time()
    seconds = options.minutes * 60
    time_range = TimeRange(end - seconds, end, max(1.0, seconds / POINTS), options.window)
    options.folder.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(options.prometheus)
    for dashboard in DASHBOARDS:
        (options.folder / f"{dashboard.name}.png").write_bytes(render(dashboard, prometheus, time_range))


if __name__ == "__main__":
    main()
