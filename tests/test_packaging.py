"""The wheel holds every package and all that is compiled on first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return archive.namelist()


def test_wheel_has_every_module_of_every_package(wheel: list[str]) -> None:
    for package in PACKAGES["packages"]:
        parent = (ROOT / package).parent
        modules = {str(file.relative_to(parent)) for file in (ROOT / package).rglob("*.py")}
        assert modules and modules <= set(wheel), modules - set(wheel)
        assert f"{Path(package).name}/py.typed" in wheel


def test_wheel_has_the_sources_of_the_native_kernels(wheel: list[str]) -> None:
    folder = ROOT / "runtime" / "engine"
    sources = {
        str(file.relative_to(folder))
        for file in (folder / "baton_engine" / "ops" / "native").iterdir()
        if file.is_file()
    }
    assert any(name.endswith(".c") for name in sources)
    assert sources <= set(wheel)


def test_wheel_has_the_files_of_the_dashboard(wheel: list[str]) -> None:
    folder = ROOT / "router"
    files = {str(file.relative_to(folder)) for file in (folder / "baton_router/dashboard/web").iterdir()}
    assert any(name.endswith(".html") for name in files)
    assert files <= set(wheel)


def test_wheel_has_every_folder_with_a_package() -> None:
    match = {
        str(file.parent.relative_to(ROOT))
        for file in ROOT.glob("*/**/baton_*/__init__.py")
        if ".venv" not in file.parts and "build" not in file.parts
    }
    assert match == set(PACKAGES["packages"])


def test_wheel_has_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        Path(package).name for package in PACKAGES["packages"]
    }


INSTALLED_WITH = {
    "baton_api": ("router",),  # `origins` is for the web servers, which have it
    "baton_operator": ("operator",),
    "baton_router": ("router", "jwt", "gateway"),
    "baton_engine": ("runtime", "nixl", "kernels"),
    "baton_prefill": ("runtime", "nixl", "kernels"),
    "baton_decode": ("runtime", "nixl", "kernels"),
    "baton_observing": ("observing", "pictures"),
    "baton_cli": ("runtime", "nixl", "chat", "pictures", "operator", "jwt"),
}
"""Extras that the image of a package installs, or, for the command line, what its commands ask for."""

PART_OF_TORCH = {"triton"}
"""Modules that torch's builds for GPUs bring along. `ops.choice` does without them where they are missing."""


@pytest.mark.parametrize("package", INSTALLED_WITH)
def test_package_imports_only_what_its_extras_declare(package: str) -> None:
    """Everything is installed here; an image has its extras alone: an undeclared import fails only there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = next(ROOT / path for path in PACKAGES["packages"] if Path(path).name == package)
    distributions = packages_distributions()
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in folder.rglob("*.py")
        for name in imported(ast.parse(file.read_text()))
        if name not in sys.stdlib_module_names
        and not name.startswith("baton_")
        and name not in PART_OF_TORCH
        and not declared(project, INSTALLED_WITH[package]) & {plain(each) for each in distributions[name]}
    }
    assert not undeclared


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of all modules that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def declared(project: dict[str, Any], extras: Iterable[str]) -> set[str]:
    """Plain names of the distributions that the project requires with these extras, Baton's own included."""
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    names = {plain(re.split(r"[\[>=<!~; ]", each)[0]) for each in requirements}
    inner = [
        extra
        for each in requirements
        if (match := re.match(r"baton\[(.*)\]", each))
        for extra in match[1].split(",")
    ]
    return names | declared({**project, "dependencies": []}, inner) if inner else names


def plain(distribution: str) -> str:
    """The normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
