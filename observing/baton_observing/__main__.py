"""
Dashboards and rules, written into the chart.

    python -m baton_observing           writes charts/baton/dashboards and charts/baton/rules
    python -m baton_observing --check   fails if a file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton_api import generated_files
from baton_observing import grafana, rules
from baton_observing.alerts.alert import RUNBOOKS, linked
from baton_observing.boards import BOARDS

FOLDERS = ("dashboards", "rules")


def generated() -> dict[str, str]:
    """Paths within the chart, and their text."""
    boards = {f"dashboards/{board.name}.json": grafana.text(board) for board in BOARDS}
    return boards | {f"rules/{name}": text for name, text in rules.files().items()}


def main(arguments: list[str] | None = None) -> None:
    """Write or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a file is not what would be written")
    parser.add_argument("--folder", type=Path, default=Path("charts/baton"))
    parser.add_argument("--runbooks", default=RUNBOOKS, help="absolute URL of the folder of runbooks")
    given = parser.parse_args(arguments)
    files = {name: linked(text, given.runbooks) for name, text in generated().items()}
    texts = {given.folder / name: text for name, text in files.items()}
    there = {path for folder in FOLDERS for path in (given.folder / folder).glob("*") if path.is_file()}
    if status := generated_files.settle(texts, there, check=given.check):
        sys.exit(status)


if __name__ == "__main__":
    main()
