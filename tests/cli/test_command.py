"""Completions that a shell gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton_api.errors import SetupError
from baton_cli.command import SHELLS, script

BATON = [sys.executable, "-m", "baton_cli.main"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("baton do", {"doctor"}),
        ("baton router --prof", {"--profile"}),
        ("baton bench --sav", {"--save"}),
        ("baton batch wa", {"watch"}),
    ],
)
def test_commands_and_flags_are_completed(typed: str, expected: set[str]) -> None:
    place = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_BATON_COMPLETE": "complete_bash",
    }
    done = subprocess.run(BATON, env={**os.environ, **place}, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


def test_bash_takes_the_script(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "baton.bash").write_text(script("bash"))
    commands = f"source {tmp_path}/baton.bash; complete -p baton"
    done = subprocess.run([bash, "-c", commands], capture_output=True, text=True, check=True)
    assert "_baton_completion" in done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_each_shell_has_a_script(shell: str) -> None:
    assert "_BATON_COMPLETE" in script(shell)


def test_another_shell_is_refused() -> None:
    with pytest.raises(SetupError, match=r"Unsupported shell 'tcsh'\. Expected one of bash, zsh, fish"):
        script("tcsh")
