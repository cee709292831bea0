"""The clock on the wall may jump: nothing waits by it, and nothing is decided by it but what others sign."""

from __future__ import annotations

import ast
from pathlib import Path

import baton_router

ROOT = Path(baton_router.__file__).parent

ON_THE_WALL = {
    "access.py": "when an issuer's token expires",
    "app.py": "since when models are there, for a client to read",
    "errands.py": "when a ticket expires",
    "kv_subscriber.py": "a figure: how late events come",
    "page/page.py": "a figure: when requests were asked, for a person to read",
    "proxy.py": "when a ticket expires",
    "tracing.py": "a figure: where spans lie, among those of other services",
}
"""Who reads it, and what for."""

CALENDAR = ROOT / "batches"
"""Batches have windows of a day, kept across restarts."""

READINGS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
}


def reads_the_wall(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in READINGS
        for node in ast.walk(tree)
    )


def test_only_those_who_must_read_the_clock_on_the_wall() -> None:
    modules = [path for path in ROOT.rglob("*.py") if CALENDAR not in path.parents]
    assert len(modules) > 50
    assert {str(path.relative_to(ROOT)) for path in modules if reads_the_wall(path)} == set(ON_THE_WALL)
