"""`baton up` with real processes."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from baton_api.errors import SetupError
from baton_cli.options import read_settings
from baton_cli.supervisor import Command, Watcher, supervise
from baton_cli.up import LocalRouterSettings
from tests.cli.service import END_S, START_S, TIMEOUT_S, await_gone, await_true, running_up, start_baton
from tests.engine.models import make_model

pytestmark = pytest.mark.slow

LONG = "List 3 countries and their capitals. The relay has four runners. "


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def relays(worker: str) -> list[dict[str, object]]:
    records = httpx.get(f"{worker}/debug/requests", timeout=TIMEOUT_S, trust_env=False).json()["data"]
    return [relay for record in records for relay in record["relays"]]


def test_up_service_survives_worker_crashes_and_leaves_nothing(tiny: Path) -> None:
    with running_up(tiny) as up:
        # Prompts are computed in one process and continued in another.
        first = up.ask(LONG)
        assert first.status_code == 200, first.text
        workers = up.workers()
        moved = relays(workers["decode"])[0]
        assert moved["prefill_worker"] == "prefill-0"
        assert str(moved["transport"]).startswith("nixl")

        # Started under nohup, it outlives its terminal.
        up.process.send_signal(signal.SIGHUP)

        # A killed worker comes back at the same address, and meanwhile the other one answers.
        before = up.children()
        before["prefill"].kill()
        assert up.ask("Another prompt, as long as the first one was, so that it is asked for.").is_success
        up.await_line("prefill-0 ended (killed by signal 9); restarting in 0.5 s", END_S)
        await_true(lambda: _is_ready(workers["prefill"]), START_S, "the prefill worker is back")
        assert up.children()["prefill"].pid != before["prefill"].pid
        before["decode"].kill()
        up.await_line("decode-0 ended (killed by signal 9)", END_S)
        await_true(lambda: up.ask(LONG).is_success, START_S, "the decode worker is back")
        assert up.workers() == workers
        again = up.ask(LONG)
        assert again.status_code == 200, again.text
        assert again.json()["choices"] == first.json()["choices"]
        assert relays(workers["decode"])[0]["prefill_worker"] == "prefill-0"

        # SIGINT is a clean end, although it was ignored where the service was started.
        left = psutil.Process(up.process.pid).children(recursive=True)
        assert len([process for process in left if process.status() != psutil.STATUS_ZOMBIE]) == 3
        assert up.end(signal.SIGINT) == 0
        await_gone(left)
        assert "Traceback" not in up.log


def test_up_service_of_tenants_is_ready_for_them(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    digest = hashlib.sha256(b"alice-key").hexdigest()
    file.write_text(f"tenants:\n  - name: alice\n    keys: ['sha256:{digest}']\n")
    with running_up(tiny, f"--tenants-file={file}", "--no-verbose") as up:
        models = f"{up.url}/v1/models"
        assert httpx.get(models, trust_env=False).status_code == 401
        answer = httpx.get(models, headers={"authorization": "Bearer alice-key"}, trust_env=False)
        assert answer.json()["data"], up.log

        # All that a terminal shows are the address, the logs' folder and what to try.
        assert up.await_line("Why is the sky blue?") == up.lines[-1] and len(up.lines) <= 10, up.log
        assert max(map(len, up.lines)) <= 80, up.log
        logs = Path(up.await_line("  logs ").split()[1])
        assert {path.name for path in logs.iterdir()} == {"router.log", "prefill-0.log", "decode-0.log"}
        assert "fired up and ready to roll" in (logs / "decode-0.log").read_text()
        shutil.rmtree(logs)


def test_up_killed_supervisor_ends_its_processes(tiny: Path) -> None:
    with running_up(tiny) as up:
        left = psutil.Process(up.process.pid).children(recursive=True)
        assert len(left) == 3
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
        await_gone(left)


def test_serve_port_in_use_is_one_line_with_the_flag(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, complaint, status = _run("serve", str(tiny), f"--port={port}")
    assert status == 2
    assert f"127.0.0.1:{port} is in use by another process" in complaint and "--port" in complaint
    assert "Traceback" not in complaint


def test_up_unknown_model_is_one_line_with_alternatives() -> None:
    _, complaint, status = _run("up", "nobody/such-a-model")
    assert status == 2
    assert "nobody/such-a-model" in complaint and "smollm2" in complaint
    assert "Traceback" not in complaint


def test_up_worker_that_cannot_start_ends_with_its_reason(tiny: Path) -> None:
    _, complaint, status = _run("up", str(tiny), "--port=0", "--kv-cache-memory=1KiB")
    assert status == 2
    assert "--kv-cache-memory" in complaint.splitlines()[-1]
    assert "Traceback" not in complaint


async def test_worker_listens_before_its_model_is_there() -> None:
    """`baton up` starts the router then. The hub accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        silent = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        async with supervise(Watcher(), drain_s=0) as supervisor:
            worker = supervisor.add(Command("d", "decode", ("decode", "nobody/a-model"), environment=silent))
            await supervisor.unless_failed(worker.listening())
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(f"{worker.url}/ready")
            assert answer.status_code == 503 and "is starting" in answer.text
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(supervisor.unless_failed(worker.ready()), 0.1)
            supervisor.kill()


async def test_worker_that_never_listens_ends_the_wait_with_its_reason(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"d: .*{port} is in use by another process"):
            async with supervise(Watcher(), drain_s=0) as supervisor:
                worker = supervisor.add(Command("d", "decode", ("decode", str(tiny)), port=port))
                await supervisor.unless_failed(worker.listening())


def _is_ready(worker: str) -> bool:
    try:
        return httpx.get(f"{worker}/ready", timeout=TIMEOUT_S, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _run(*arguments: str) -> tuple[str, str, int]:
    process = start_baton(*arguments)
    try:
        out, complaint = process.communicate(timeout=START_S)
    finally:
        process.kill()
    return out, complaint, process.returncode


def test_up_serves_a_dashboard_by_default() -> None:
    assert read_settings(LocalRouterSettings, {}).dashboard
    assert not read_settings(LocalRouterSettings, {"dashboard": False}).dashboard
