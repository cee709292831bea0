"""The commands of tutorials print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import steady_port

ROOT = Path(__file__).parents[2]
FIRST_STEPS = ROOT / "docs" / "tutorials" / "first-steps.md"
MARK = "<!-- tested: with a service -->"
"""The commands behind this line need the service that `baton up` starts."""

ADDRESS = "http://127.0.0.1:8000"
READY_S = 240.0
LAST_LINE = "Why is the sky blue?\"}]}'\n"


@dataclass(frozen=True)
class Step:
    """A command of a page, and what the page shows below it."""

    command: str
    expected: str

    @property
    def pattern(self) -> str:
        """A regular expression: `...` is any text, numbers and spaces are any numbers and spaces."""
        text = re.escape(self.expected.strip()).replace(re.escape("..."), "\0")
        text = re.sub(r"\d[\d,]*(\\\.\d+)?", lambda _: r"[\d.,]+", text)
        return re.sub(r"(\\\s|\s)+", lambda _: r"\s+", text).replace("\0", ".*?") + r"\s*"


def steps(page: str) -> list[Step]:
    """Commands of the console blocks of a page. A command goes on in a line that is indented."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            ends = (n for n, line in enumerate(lines) if n and not line.startswith("    "))
            count = next(ends, len(lines))
            found.append(Step("\n".join(lines[:count]), "\n".join(lines[count:])))
    return found


@dataclass(frozen=True)
class Running:
    """A `baton up`."""

    url: str
    printed: str


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`baton up` with its defaults, as in a terminal, except for the port."""
    port, folder = steady_port(), tmp_path_factory.mktemp("up")
    words = [sys.executable, "-m", "baton_cli.main", "up", f"--port={port}", "--no-verbose"]
    environment = os.environ | {"XDG_STATE_HOME": str(folder)}
    with (
        (folder / "printed").open("wb") as printed,
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=printed, env=environment) as process,
    ):
        try:
            yield Running(f"http://127.0.0.1:{port}", wait_until_ready(folder / "printed", process))
        finally:
            process.terminate()


def wait_until_ready(printed: Path, process: subprocess.Popen[bytes]) -> str:
    """Return what a `baton up` has printed when it is up."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        text = printed.read_text()
        if LAST_LINE in text:
            return text
        time.sleep(0.2)
    raise AssertionError(f"`baton up` has the status {process.poll()}: {printed.read_text()}")


def test_tutorial_patterns() -> None:
    first, second = steps("```console\n$ a \\\n    b\nworker 12.5 ms, ... end\n$ c\n```\n")
    assert (first.command, second) == ("a \\\n    b", Step("c", ""))
    assert re.fullmatch(first.pattern, "worker   1,733 ms, anything\nat all end\n", re.DOTALL)
    assert not re.fullmatch(first.pattern, "worker twelve ms, end", re.DOTALL)


@pytest.mark.slow
def test_first_steps_print_what_the_page_shows(service: Running, tmp_path: Path) -> None:
    before, _, after = FIRST_STEPS.read_text().partition(MARK)
    start, commands = steps(before)[-1], steps(after)
    assert start.command == "baton up"
    assert re.fullmatch(start.pattern, service.printed, re.DOTALL), service.printed
    assert len(commands) > 5
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for step in commands:
        command = step.command.replace(ADDRESS, service.url)
        if command.startswith("baton "):
            command += f" --url {service.url}"
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "COLUMNS": "140"},
            capture_output=True,
            text=True,
            check=False,
        )
        shown = f"{command}\n{done.stdout}{done.stderr}\n--- expected\n{step.expected}"
        assert done.returncode == 0, shown
        assert re.fullmatch(step.pattern, done.stdout, re.DOTALL), shown
