"""The wheel holds every package and all that is compiled on first use."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

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


def test_the_wheel_holds_every_module_of_every_package(wheel: list[str]) -> None:
    for package in PACKAGES["packages"]:
        parent = (ROOT / package).parent
        modules = {str(file.relative_to(parent)) for file in (ROOT / package).rglob("*.py")}
        assert modules and modules <= set(wheel), modules - set(wheel)
        assert f"{Path(package).name}/py.typed" in wheel


def test_the_wheel_holds_the_sources_of_the_native_kernels(wheel: list[str]) -> None:
    folder = ROOT / "runtime" / "engine"
    sources = {
        str(file.relative_to(folder))
        for file in (folder / "baton_engine" / "ops" / "native").iterdir()
        if file.is_file()
    }
    assert any(name.endswith(".c") for name in sources)
    assert sources <= set(wheel)


def test_the_wheel_holds_the_files_of_the_page(wheel: list[str]) -> None:
    folder = ROOT / "router"
    files = {str(file.relative_to(folder)) for file in (folder / "baton_router/page/web").iterdir()}
    assert any(name.endswith(".html") for name in files)
    assert files <= set(wheel)


def test_every_folder_with_a_package_is_in_the_wheel() -> None:
    found = {
        str(file.parent.relative_to(ROOT))
        for file in ROOT.glob("*/**/baton_*/__init__.py")
        if ".venv" not in file.parts and "build" not in file.parts
    }
    assert found == set(PACKAGES["packages"])


def test_nothing_else_is_in_the_wheel(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        Path(package).name for package in PACKAGES["packages"]
    }
