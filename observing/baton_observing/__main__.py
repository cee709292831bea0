"""
Dashboards and rules, written into the chart.

    python -m baton_observing           writes charts/baton/dashboards and charts/baton/rules
    python -m baton_observing --check   fails if a file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton_observing import grafana, rules
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
    given = parser.parse_args(arguments)
    texts = {given.folder / name: text for name, text in generated().items()}
    there = {path for folder in FOLDERS for path in (given.folder / folder).glob("*") if path.is_file()}
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    stale += sorted(there - set(texts))
    if given.check:
        for path in stale:
            print(f"{path} is not what would be written: run `make fix`")
        sys.exit(bool(stale))
    for path in there - set(texts):
        path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
