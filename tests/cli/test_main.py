"""The command line itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton_api import __version__
from baton_cli.main import main

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
    assert "--drain-s" in capsys.readouterr().out


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
