"""
Write the dashboards and rules into the chart.

    python -m baton_observing           writes charts/baton/dashboards and charts/baton/rules
    python -m baton_observing --check   fails if a file differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton_api import generated_files
from baton_observing import rules
from baton_observing.alerts.alert import RUNBOOKS, with_runbook_url
from baton_observing.dashboards import DASHBOARDS, grafana

FOLDERS = ("dashboards", "rules")


def generated() -> dict[str, str]:
    """Return the generated files: path within the chart, and text."""
    dashboards = {f"dashboards/{board.name}.json": grafana.to_json(board) for board in DASHBOARDS}
    return dashboards | {f"rules/{name}": text for name, text in rules.files().items()}


def main(arguments: list[str] | None = None) -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a file differs; write nothing")
    parser.add_argument("--folder", type=Path, default=Path("charts/baton"), help="folder to write to")
    parser.add_argument("--runbooks", default=RUNBOOKS, help="absolute URL of the runbooks")
    options = parser.parse_args(arguments)
    files = {name: with_runbook_url(text, options.runbooks) for name, text in generated().items()}
    texts = {options.folder / name: text for name, text in files.items()}
    existing = {path for folder in FOLDERS for path in (options.folder / folder).glob("*") if path.is_file()}
    if status := generated_files.settle(texts, existing, check=options.check):
        sys.exit(status)


if __name__ == "__main__":
    main()
