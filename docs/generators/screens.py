"""
Render the screenshots of the documentation from recorded `--output json` of real runs.

    python -m docs.generators.screens           writes docs/screens/*.svg
    python -m docs.generators.screens --check   fails if one differs from what would be written
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton_cli.bench.command import table
from baton_cli.bench.report import Level
from baton_cli.doctor.command import show as show_findings
from baton_cli.doctor.machine import Finding

FOLDER = Path(__file__).parents[2] / "docs" / "screens"

WIDTH = 132

ELSEWHERE = re.compile(r"\s*@font-face \{.*?\}\n|<!--.*?-->\s*", re.DOTALL)
"""Rich's SVG loads a web font and contains a comment. Both are removed."""


def _bench(console: Console, data: Any) -> None:
    console.print(table(msgspec.convert(data["levels"], list[Level])))


def _doctor(console: Console, data: Any) -> None:
    show_findings(console, data["machine"], msgspec.convert(data["findings"], list[Finding]))


SCREENS: Mapping[str, tuple[str, Callable[[Console, Any], None]]] = {
    "bench": ("baton bench", _bench),
    "doctor": ("baton doctor", _doctor),
}
"""By file name: the command, and the function that renders it."""


def drawn(name: str) -> str:
    """Return a self-contained SVG."""
    title, draw = SCREENS[name]
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    draw(console, json.loads((FOLDER / f"{name}.json").read_text()))
    return ELSEWHERE.sub("\n", console.export_svg(title=title, unique_id=f"baton-{name}"))


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name in SCREENS:
        path, text = FOLDER / f"{name}.svg", drawn(name)
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            path.write_text(text)
    if stale:
        raise SystemExit(f"{', '.join(stale)}: out of date. Run python -m docs.generators.screens.")


if __name__ == "__main__":
    main()
