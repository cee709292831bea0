"""Failed tests of a whole run: which ones run again, and what the exit status says then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checks.repeat import LIMIT, to_repeat

ROOT = Path(__file__).parents[1]
MANY = [f"tests/test_a.py::test_{number}" for number in range(LIMIT + 1)]
CASES = {
    "few tests failed": (1, MANY[1:], MANY[1:]),
    "more than the limit": (1, MANY, []),
    "none is known": (1, [], []),
    "a file could not be imported": (1, ["tests/test_a.py"], []),
    "interrupted": (2, MANY[1:], []),
    "an error of pytest": (3, MANY[1:], []),
    "no tests": (5, MANY[1:], []),
}
TESTS = """
import pathlib

def test_first_run_fails():
    mark = pathlib.Path("ran")
    before = mark.exists()
    mark.touch()
    assert before

def test_passes():
    pathlib.Path("passed").open("a").write("x")
"""
BROKEN = """
def test_always_fails():
    assert False
"""


@pytest.mark.parametrize(("status", "failed", "expected"), CASES.values(), ids=CASES)
def test_to_repeat_chooses_all_or_none(status: int, failed: list[str], expected: list[str]) -> None:
    assert to_repeat(status, failed) == expected


@pytest.mark.parametrize(
    ("source", "status", "flaky"), [(TESTS, 0, 1), (TESTS + BROKEN, 1, 0)], ids=["flaky", "broken"]
)
def test_failed_tests_run_again_alone(tmp_path: Path, source: str, status: int, flaky: int) -> None:
    (tmp_path / "test_a.py").write_text(source)
    first = run(tmp_path, "pytest", "-q", "test_a.py")
    assert first.returncode == 1
    again = run(tmp_path, "checks.repeat", str(first.returncode))
    assert again.returncode == status
    assert again.stdout.count("FLAKY test_a.py::test_first_run_fails") == flaky
    assert (tmp_path / "passed").read_text() == "x"


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
