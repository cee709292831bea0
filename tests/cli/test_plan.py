"""What `baton up` makes of its flags, before anything is started."""

from __future__ import annotations

import doctest
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton_cli import up
from baton_cli.display import Display
from baton_cli.up import Plan, make_plan
from baton_router.settings import RouterSettings
from tests.engine.models import make_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def plan(tiny: Path, front: dict[str, Any] | None = None, decode: int = 1, **given: Any) -> Plan:
    display = Display(Console(file=io.StringIO()))
    return make_plan(display, 1, decode, front or {}, {"model": str(tiny), **given})


def test_the_examples_are_true() -> None:
    assert doctest.testmod(up).failed == 0


def test_workers_share_a_share_of_the_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(tiny, decode=3, memory_share="0.8")
    assert all("--memory-share=0.2" in command.arguments for command in made.worker_commands(8))
    assert not any("share" in part for part in plan(tiny).worker_commands(8)[0].arguments)
    monkeypatch.setenv("BATON_MEMORY_SHARE", "0.6")
    assert all("--memory-share=0.3" in command.arguments for command in plan(tiny).worker_commands(8))


def test_switches_and_names_reach_every_worker(tiny: Path) -> None:
    made = plan(tiny, served_model_name=("a,b", "c"), cache_report=False, log_requests=True)
    assert made.names == ("a", "b", "c")
    for command in made.worker_commands(2):
        assert {"--no-cache-report", "--log-requests"} <= set(command.arguments)
        names = [part for part in command.arguments if part.startswith("--served-model-name")]
        assert names == [f"--served-model-name={name}" for name in "abc"]


def test_workers_serve_a_path_by_its_last_part_and_as_given(tiny: Path) -> None:
    assert plan(tiny).names == ("tiny", str(tiny))
    odd = make_model(tiny.parent / "a,b")
    assert plan(odd).names == ("a,b",)


def test_workers_tell_the_router_what_they_hold_and_nobody_what_was_asked(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"--kv-events=tcp://127.0.0.1:0", "--no-kv-tokens"}
    assert all(told <= set(command.arguments) for command in plan(tiny).worker_commands(2))
    for made in (plan(tiny, kv_events="ipc:///run/kv"), plan(tiny, kv_events="")):
        assert not any(told & set(command.arguments) for command in made.worker_commands(2))
    monkeypatch.setenv("BATON_KV_EVENTS", "tcp://127.0.0.1:5557")
    assert not any(told & set(command.arguments) for command in plan(tiny).worker_commands(2))


def test_an_open_service_has_no_keys_within(tiny: Path) -> None:
    made = plan(tiny)
    assert made.key == ""
    for command in [*made.worker_commands(2), made.router_command([], [], "")]:
        assert all(
            value == ""
            for name, value in command.environment.items()
            if name.endswith(("API_KEY", "KEY_FILE"))
        )


@pytest.mark.parametrize("front", [{"api_key": ("k-1",)}, {"api_key_file": "/keys"}])
def test_a_closed_service_has_a_key_of_its_own_within(tiny: Path, front: dict[str, Any]) -> None:
    made = plan(tiny, front)
    router = made.router_command(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], "")
    workers = made.worker_commands(2)
    assert {command.environment["BATON_API_KEY"] for command in workers} == {made.key}
    assert {command.environment["BATON_API_KEY_FILE"] for command in workers} == {""}
    assert router.environment["BATON_ROUTER_WORKER_API_KEY"] == made.key
    assert router.environment["BATON_ROUTER_API_KEY_FILE"] == front.get("api_key_file", "")
    read = RouterSettings.model_validate({"api_key": router.environment["BATON_ROUTER_API_KEY"]})
    assert len(read.api_key) == len(front.get("api_key", ())) + 1
    assert "k-1" not in router.environment["BATON_ROUTER_API_KEY"]
    for command in [*workers, router]:
        assert not any("k-1" in part or made.key in part for part in command.arguments)
    assert made.key != plan(tiny, front).key


def test_the_router_is_told_where_to_keep_what_it_keeps_and_secrets_by_environment(tiny: Path) -> None:
    made = plan(
        tiny, {"database": "postgresql://u:hidden@h/d", "batch_secret": "signed", "batch_parallel": 3}
    )
    router = made.router_command([], [], "/state")
    assert router.environment["BATON_ROUTER_DATABASE"] == "postgresql://u:hidden@h/d"
    assert router.environment["BATON_ROUTER_BATCH_SECRET"] == "signed"
    assert router.environment["BATON_ROUTER_STATE"] == "/state"
    assert "--batch-parallel=3" in router.arguments
    assert not [
        part for part in router.arguments if part.startswith(("--database", "--batch-secret", "--state"))
    ]
