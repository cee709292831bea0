"""The tables of supported models in the README and in the guide to models, from the engine's families."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from baton_engine.model.families import FAMILIES
from baton_engine.model.family import ModelFamily, SupportedModels

FILES = ("README.md", "docs/guides/models.md")

BEGIN, END = "<!-- supported models: written by make fix -->", "<!-- end of supported models -->"


def documents(root: Path, families: Iterable[ModelFamily] = FAMILIES) -> dict[Path, str]:
    """Return the files of the repository with a table, and their text with the current table."""
    table = "\n".join([BEGIN, "", *rows(families), "", END])
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    paths = [root / name for name in FILES if (root / name).is_file()]
    return {path: between.sub(lambda _: table, path.read_text()) for path in paths}


def rows(families: Iterable[ModelFamily]) -> list[str]:
    """Return the lines of the table. Models with the same name in several families share a row."""
    architectures: dict[SupportedModels, list[str]] = {}
    for family in families:
        for models in family.models:
            architectures.setdefault(models, []).append(family.architecture)
    lines = ["| models | architecture | tool parsers | reasoning parsers |", "|---|---|---|---|"]
    for models, names in architectures.items():
        cells = (names, models.tool_parsers, models.reasoning_parsers)
        lines.append(
            f"| {models.name} | {' | '.join(', '.join(f'`{name}`' for name in cell) for cell in cells)} |"
        )
    return lines
