"""`make` installs what the machine can use, and leaves nothing that breaks the next try."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PYTHON = """#!/bin/sh
case "$*" in
  --version) echo "Python {version}" ;;
  *version_info*) exit {old} ;;
  "-m venv"*) mkdir -p {venv}/bin && ln -sf "$0" {venv}/bin/python ;;
  *) echo "cannot reach the index" >&2; exit 1 ;;
esac
"""
"""A python3 that creates environments and can install nothing into them."""


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("goal", "gpus", "spared"),
    [
        pytest.param("demo", "", True, id="no GPU"),
        pytest.param("demo", "/dev/nvidiactl", False, id="a GPU"),
        pytest.param("dev", "", False, id="for tests"),
    ],
)
def test_cuda_is_installed_where_it_is_used(tmp_path: Path, goal: str, gpus: str, spared: bool) -> None:
    done = make("--dry-run", f"VENV={tmp_path}", f"GPUS={gpus}", f"{tmp_path}/{goal}")
    assert done.returncode == 0, done.stderr
    assert ("--overrides" in done.stdout) is spared
    assert "uv pip install" in done.stdout and "--quiet" not in done.stdout


@pytest.mark.parametrize(
    ("version", "old", "says"),
    [
        pytest.param("3.10.12", 1, "needs Python 3.11 or newer", id="too old"),
        pytest.param("3.13.1", 0, "Cannot install uv", id="no index"),
    ],
)
def test_environment_that_cannot_be_made_is_not_left_behind(
    tmp_path: Path, version: str, old: int, says: str
) -> None:
    venv, python = tmp_path / "venv", tmp_path / "python3.x"
    python.write_text(PYTHON.format(version=version, old=old, venv=venv))
    python.chmod(0o755)
    done = make(f"VENV={venv}", f"PYTHON3={python}", f"{venv}/demo")
    assert done.returncode != 0
    assert says in done.stderr
    assert not venv.exists()
