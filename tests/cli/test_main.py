"""The command line itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from baton_api import __version__
from baton_cli import help
from baton_cli.main import create_app, main
from baton_cli.options import options_of
from baton_engine.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic_settings", "openai", "httpx")


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from baton_cli.main import main\n"
        "try: main(['--help'])\n"
        f"finally: print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for command in ("serve", "up", "chat", "demo", "router", "prefill", "decode", "fetch", "version"):
        assert f" {command} " in done.stdout
    assert done.stdout.strip().endswith("LOADED []")


def test_main_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "router", "up", "demo"])
def test_main_processes_have_their_settings_as_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--port N" in capsys.readouterr().out or command == "demo"
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    assert "--drain-s" in capsys.readouterr().out


WIDTH = 80
FLAG = re.compile(r"^  --(?:\[no-\])?([a-z][a-z-]*)", re.MULTILINE)


@pytest.mark.parametrize("flag", help.NAMES)
def test_help_of_every_command_fits_80_columns(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", *_commands(typer.main.get_command(create_app([])))):
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), flag])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and text.startswith(f"Usage: baton {name}".rstrip())
        assert [line for line in text.splitlines() if len(line) > WIDTH] == []


def _commands(group: Any) -> Iterator[str]:
    """Yield the words of each command below a group, such as `batch list`."""
    for name, command in getattr(group, "commands", {}).items():
        yield name
        yield from (f"{name} {inner}" for inner in _commands(command))


@pytest.mark.parametrize(("words", "whole"), [([], True), (["batch"], False)])
def test_help_of_a_group_names_help_all_where_a_command_has_more_flags(
    words: list[str], whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert ("--help-all" in capsys.readouterr().out) is whole


def test_help_is_short_and_help_all_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for flag in help.NAMES:
        with pytest.raises(SystemExit):
            main(["up", flag])
        texts[flag] = capsys.readouterr().out
    short, whole = (set(FLAG.findall(texts[flag])) for flag in help.NAMES)
    assert short < whole
    assert {"dashboard", "verbose"} <= short
    options = {option.flag.removeprefix("--") for option in options_of(WorkerSettings)}
    given_by_up = {"role", "name", "control-host", "control-port", "ticket-secret", "compute-share"}
    assert options - whole == {"model"} | given_by_up
    assert "more flags: baton up --help-all" in texts["--help"] and texts["--help"].count("\n") < 80
    assert not re.search(r"<(str|int|bool|float)", texts["--help-all"])


@pytest.mark.parametrize("command", sorted(help.FREQUENT))
def test_frequent_flags_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert set(FLAG.findall(capsys.readouterr().out)) == help.FREQUENT[command]


def test_main_invalid_setting_exits_2_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--kv-cache-memory", "lots"])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert (
        complaint.count("\n") == 1
        and "--kv-cache-memory (--kv-cache-memory-bytes): 'lots' is not a size" in complaint
    )


def test_workers_of_several_processes_cannot_use_the_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--transfer", "loopback"])
    assert ended.value.code == 2
    assert "--transfer loopback works within one process only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package", "extras"),
    [
        (["serve", "no-such-model.gguf"], "torch", "runtime,nixl"),
        (["router", "--decode=http://127.0.0.1:9"], "httptools", "router"),
        (["chat"], "openai", "chat"),
        (["batch", "list"], "httpx", "chat"),
        (["doctor"], "httpx", "chat"),
        (["status", "--cluster"], "kubernetes", "operator"),
        (["fetch", "hf://a/b", "/nowhere"], "huggingface_hub", "fetch"),
    ],
)
def test_main_missing_package_is_named_with_the_command_that_installs_it(
    words: list[str], package: str, extras: str
) -> None:
    """In a process in which the package cannot be imported, as after `pip install batonserve`."""
    script = f"import sys; sys.modules[{package!r}] = None; from baton_cli.main import main; main({words!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"The package {package}" in done.stderr and f"[{extras}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_fetch_needs_no_package_of_workers() -> None:
    """The router's image fetches models for workers of other engines."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    heavy = [re.split(r"[\[>=]", one)[0] for one in extras["runtime"] if not one.startswith("batonserve")]
    assert "torch" in heavy and "huggingface-hub" not in heavy
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy!r}))\n"
        "from baton_cli.main import main\n"
        "main(['fetch', 'hf://a/b', '/nowhere'])"
    )
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | hub)
    assert done.returncode == 2 and "The hub did not provide 'a/b'" in done.stderr, done.stderr
