"""The plan that `baton up` makes of its flags, before a process starts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton_cli import up
from baton_cli.display import Display
from baton_cli.supervisor import Command, Member, Supervisor, Watcher
from baton_cli.up import Plan, Service, make_plan
from baton_engine.api.http import HttpServer, RequestDrain
from baton_router.settings import RouterSettings
from tests.engine.models import make_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def plan(tiny: Path, router_fields: dict[str, Any] | None = None, decode: int = 1, **given: Any) -> Plan:
    display = Display(Console(file=io.StringIO()))
    return make_plan(display, 1, decode, router_fields or {}, {"model": str(tiny), **given})


def test_workers_share_a_share_of_the_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(tiny, decode=3, memory_share="0.8")
    assert all("--memory-share=0.2" in command.arguments for command in planned.worker_commands(8))
    assert not any("share" in part for part in plan(tiny).worker_commands(8)[0].arguments)
    monkeypatch.setenv("BATON_MEMORY_SHARE", "0.6")
    assert all("--memory-share=0.3" in command.arguments for command in plan(tiny).worker_commands(8))


def test_plan_workers_have_disk_tiers_of_their_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(**given: Any) -> list[str]:
        commands = plan(tiny, decode=2, **given).worker_commands(8)
        flags = [part for command in commands for part in command.arguments]
        return [flag.removeprefix("--kv-disk-tier=") for flag in flags if flag.startswith("--kv-disk-tier=")]

    assert folders() == []
    expected = ["/kv/prefill-0", "/kv/decode-0", "/kv/decode-1"]
    assert folders(kv_memory_tier="1GiB", kv_disk_tier="/kv", kv_disk_tier_size="1GiB") == expected
    monkeypatch.setenv("BATON_KV_DISK_TIER", "/kv")
    assert folders(kv_memory_tier="1GiB", kv_disk_tier_size="1GiB") == expected


def test_plan_workers_get_one_seat_each(tiny: Path) -> None:
    commands = plan(tiny).worker_commands(2, ["seats:0", "seats:1"])
    for number, command in enumerate(commands):
        assert {f"--shared-cores=seats:{number}", "--threads=1"} <= set(command.arguments)


def test_plan_divides_the_time_of_the_cores_by_the_share_of_prefill(tiny: Path) -> None:
    def shares(prefill_share: float | None, decode: int = 1) -> list[str]:
        display = Display(Console(file=io.StringIO()))
        planned = make_plan(display, 1, decode, {}, {"model": str(tiny)}, prefill_share)
        commands = planned.worker_commands(4, [f"seats:{number}" for number in range(1 + decode)])
        flags = [part for command in commands for part in command.arguments]
        return [flag for flag in flags if flag.startswith("--compute-share")]

    assert shares(None, decode=2) == shares(0.5) == []
    assert shares(0.6) == ["--compute-share=0.8"]  # of the decode worker
    assert shares(0.4) == ["--compute-share=0.8"]  # of the prefill worker
    assert shares(0.6, decode=2) == ["--compute-share=0.6", "--compute-share=0.6"]


def test_switches_and_names_reach_every_worker(tiny: Path) -> None:
    planned = plan(tiny, served_model_name=("a,b", "c"), cache_report=False, log_requests=True)
    assert planned.names == ("a", "b", "c")
    for command in planned.worker_commands(2):
        assert {"--no-cache-report", "--log-requests"} <= set(command.arguments)
        names = [part for part in command.arguments if part.startswith("--served-model-name")]
        assert names == [f"--served-model-name={name}" for name in "abc"]


def test_workers_serve_a_path_by_its_last_part_and_as_given(tiny: Path) -> None:
    assert plan(tiny).names == ("tiny", str(tiny))
    odd = make_model(tiny.parent / "a,b")
    assert plan(odd).names == ("a,b",)


def test_plan_workers_publish_kv_events_without_tokens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_flags = {"--kv-events=tcp://127.0.0.1:0", "--no-kv-tokens"}
    assert all(event_flags <= set(command.arguments) for command in plan(tiny).worker_commands(2))
    for planned in (plan(tiny, kv_events="ipc:///run/kv"), plan(tiny, kv_events="")):
        assert not any(event_flags & set(command.arguments) for command in planned.worker_commands(2))
    monkeypatch.setenv("BATON_KV_EVENTS", "tcp://127.0.0.1:5557")
    assert not any(event_flags & set(command.arguments) for command in plan(tiny).worker_commands(2))


def test_plan_open_service_has_no_internal_key(tiny: Path) -> None:
    planned = plan(tiny)
    assert planned.key == ""
    for command in [*planned.worker_commands(2), planned.router_command([], [], "")]:
        assert all(
            value == ""
            for name, value in command.environment.items()
            if name.endswith(("API_KEY", "KEY_FILE"))
        )


@pytest.mark.parametrize(
    "router_fields",
    [
        {"api_key": ("k-1",)},
        {"api_key_file": "/keys"},
        {"tenants_file": "/tenants"},
        {"jwt_jwks": "/jwks", "jwt_issuer": "i", "jwt_audience": "a"},
    ],
)
def test_plan_closed_service_has_its_own_internal_key(tiny: Path, router_fields: dict[str, Any]) -> None:
    planned = plan(tiny, router_fields)
    router = planned.router_command(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], "")
    workers = planned.worker_commands(2)
    assert {command.environment["BATON_API_KEY"] for command in workers} == {planned.key}
    assert {command.environment["BATON_API_KEY_FILE"] for command in workers} == {""}
    assert router.environment["BATON_ROUTER_WORKER_API_KEY"] == planned.key
    assert router.environment["BATON_ROUTER_API_KEY_FILE"] == router_fields.get("api_key_file", "")
    read = RouterSettings.model_validate({"api_key": router.environment["BATON_ROUTER_API_KEY"]})
    assert len(read.api_key) == len(router_fields.get("api_key", ())) + 1
    assert "k-1" not in router.environment["BATON_ROUTER_API_KEY"]
    for command in [*workers, router]:
        assert not any("k-1" in part or planned.key in part for part in command.arguments)
    assert planned.key != plan(tiny, router_fields).key


def test_plan_router_gets_storage_and_secrets_by_environment(tiny: Path) -> None:
    planned = plan(
        tiny, {"database": "postgresql://u:hidden@h/d", "batch_secret": "signed", "batch_parallel": 3}
    )
    router = planned.router_command([], [], "/state")
    assert router.environment["BATON_ROUTER_DATABASE"] == "postgresql://u:hidden@h/d"
    assert router.environment["BATON_ROUTER_BATCH_SECRET"] == "signed"
    assert router.environment["BATON_ROUTER_STATE"] == "/state"
    assert "--batch-parallel=3" in router.arguments
    assert not [
        part for part in router.arguments if part.startswith(("--database", "--batch-secret", "--state"))
    ]


def test_plan_no_secret_of_the_router_is_an_argument(tiny: Path) -> None:
    fields = RouterSettings.model_fields.items()
    secret = {name for name, field in fields if "SecretStr" in str(field.annotation)}
    assert {"database", "worker_api_key", "response_store"} <= secret <= up.BY_ENVIRONMENT
    given = {name: f"redis://u:{name}@h/0" for name in secret}
    planned = plan(tiny, given)
    router = planned.router_command([], [], "")
    given["worker_api_key"] = planned.key  # workers of `up` accept its own key only
    for name, value in given.items():
        assert router.environment[f"BATON_ROUTER_{name.upper()}"] == value
    assert not [part for part in router.arguments if "redis:" in part or "*" in part]


async def test_up_is_ready_once_the_router_has_found_all_workers_ready(tiny: Path) -> None:
    """A request could succeed before: the decode worker would compute its prompt."""
    states, looks_at_answers = iter(("starting", "not_ready", "ready")), []
    looks = 0

    async def workers(request: Request) -> Response:
        nonlocal looks
        looks += 1
        rows = [{"worker": "a:1", "state": "ready"}, {"worker": "b:2", "state": next(states)}]
        return JSONResponse({"data": rows})

    async def completions(request: Request) -> Response:
        looks_at_answers.append(looks)
        return JSONResponse({})

    routes = [Route("/workers", workers), Route("/v1/completions", completions, methods=["POST"])]
    async with HttpServer(Starlette(routes=routes), "127.0.0.1", 0, RequestDrain()) as server:
        router = Member(Command("router", "router", ()), Watcher())
        router.url = f"http://{server.address}"
        await up.answered(Service(Supervisor(Watcher(), 0.0), router, (), ""), plan(tiny))
    assert looks_at_answers == [3]
