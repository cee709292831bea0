"""The wheel holds every package and all that is compiled on first use, and knows how to add its extras."""

from __future__ import annotations

import ast
import os
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

from baton_api.installing import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return file


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    with zipfile.ZipFile(built) as archive:
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


def pip(command: str) -> str:
    """Run a command of pip in the shell, from local files only, and return what it prints."""
    offline = "--no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check"
    done = subprocess.run(
        f"{command} {offline}",
        shell=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout + done.stderr


def hint(packages: Path | None) -> str:
    """The command that installs `chat`, as printed by the copy in a folder, or by this checkout."""
    done = subprocess.run(
        [sys.executable, "-c", "from baton_api import installing; print(installing.command('chat'))"],
        env=os.environ | {"PYTHONPATH": str(packages or "")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_installed_from_an_index_the_hint_names_the_distribution(built: Path, tmp_path: Path) -> None:
    index = f"--find-links {built.parent}"
    pip(f"pip install --target {tmp_path} {index} --pre {DISTRIBUTION}")
    command = hint(tmp_path)
    assert command.endswith(f"install '{DISTRIBUTION}[chat]'")
    assert f"Would install {DISTRIBUTION}" in pip(f"{command} --dry-run --ignore-installed --pre {index}")


def test_installed_from_a_wheel_the_hint_names_the_file(built: Path, tmp_path: Path) -> None:
    pip(f"pip install --target {tmp_path} {built}")
    command = hint(tmp_path)
    assert built.as_uri() in command
    assert f"Would install {DISTRIBUTION}" in pip(f"{command} --dry-run --ignore-installed")


def test_used_from_a_checkout_the_hint_names_its_folder() -> None:
    command = hint(None)
    assert command.endswith(f"install -e '{ROOT}[chat]'")
    printed = pip(f"{command} --dry-run")
    assert f"Would install {DISTRIBUTION}" in printed and "does not provide" not in printed


def test_hints_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [path for name in PACKAGES["packages"] for path in (ROOT / name).rglob("*.py")]
    calls = re.compile(r"""(?:installing\.command)\(["'](\w+)["']""")
    named = {extra for path in files for extra in calls.findall(path.read_text())}
    assert len(named) > 4 and named <= set(extras)


def test_no_text_names_extras_of_the_distribution_baton() -> None:
    """`pip install 'baton[chat]'` installs a package that is not this one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = rf"(^|[^[:alnum:]_.])baton\[({'|'.join(extras)})"
    options = ("--extended-regexp", "--files-with-matches", "--untracked", "-e", wrong, "--", ".")
    found = subprocess.run(
        ["git", "grep", *options, f":!{Path(__file__).relative_to(ROOT)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, ""), found.stderr


INSTALLED_WITH = {
    "baton_api": ("router",),  # `origins` is for the web servers, which have it
    "baton_operator": ("operator",),
    "baton_router": ("router", "jwt", "redis", "gateway"),
    "baton_engine": ("runtime", "nixl", "kernels"),
    "baton_prefill": ("runtime", "nixl", "kernels"),
    "baton_decode": ("runtime", "nixl", "kernels"),
    "baton_observing": ("observing",),
    "baton_cli": ("runtime", "nixl", "chat", "operator", "jwt"),
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
        if (match := re.match(rf"{DISTRIBUTION}\[(.*)\]", each))
        for extra in match[1].split(",")
    ]
    return names | declared({**project, "dependencies": []}, inner) if inner else names


def plain(distribution: str) -> str:
    """The normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
