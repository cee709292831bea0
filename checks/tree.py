"""The files of the repository that the checks read."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

GENERATED = (
    "charts/baton/dashboards/",
    "charts/baton/files/",
    "charts/baton/rules/",
    "crds/",
    "docs/reference/",
)
"""Written from code, where their text is checked."""

SUFFIXES = (".c", ".go", ".h", ".js", ".md", ".mjs", ".py", ".sh", ".toml", ".ts", ".yaml")
NAMES = ("Makefile", "Dockerfile", "run")
_SKIPPED = ("build", "node_modules", "site", "__pycache__")


def files(root: Path = ROOT) -> Iterator[str]:
    """Yield the paths of files with prose, relative to the root, in order."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and name[0] != ".")
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(root).as_posix()
            if (name.endswith(SUFFIXES) or name in NAMES) and not path.startswith(GENERATED):
                yield path


def packages(root: Path = ROOT) -> tuple[str, ...]:
    """Return the folders of the product's packages, which the wheel contains."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    return tuple(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
