"""Several routers on one Postgres, or several processes of one: each continues the work of another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton_cli.batch_service import BatchService
from tests.batches import chaos
from tests.batches.chaos import Program, Router
from tests.batches.postgres import Postgres
from tests.ports import steady_ports

LINES = 300


@dataclass
class Pair:
    """Both routers, and a client of each."""

    routers: list[Router]
    services: list[BatchService]
    worker: int
    """Its port."""
    folder: Path

    def submit(self, to: int, lines: int = LINES) -> str:
        """Return a batch that cannot end before the worker is released."""
        chaos.hold(self.worker, lines // 2)
        source = self.folder / "input.jsonl"
        chaos.write_lines(source, lines)
        return chaos.submit(self.services[to], source)

    def running(self, id: str) -> None:
        """Wait until some of its lines are done."""

        def some_done() -> bool:
            return bool(self.services[0].batch(id)["request_counts"]["completed"])

        chaos.await_true(some_done, chaos.START_S, f"{id} has begun")

    def who_runs(self) -> tuple[int, psutil.Process]:
        """Return the only router with a runner, once the other has noticed that it was late, and the
        runner.
        """
        having: list[tuple[int, psutil.Process]] = []

        def one_has() -> bool:
            having[:] = [
                (number, one) for number, router in enumerate(self.routers) for one in router.runners()
            ]
            return len(having) == 1

        chaos.await_true(one_has, chaos.END_S, "one router has a runner")
        return having[0]


@pytest.fixture
def pair(postgres: Postgres, tmp_path: Path) -> Iterator[Pair]:
    ports = steady_ports(3)
    environment = {"BATON_ROUTER_DATABASE": postgres.new_database()}
    arguments = ["tests.batches.mock_worker", f"--port={ports[0]}", "--seconds=0.1", "--slots=8"]
    with contextlib.ExitStack() as stack:
        worker = Program(arguments, tmp_path / "worker.log", {})
        stack.callback(worker.kill)
        routers, services = [], []
        for number, port in enumerate(ports[1:]):
            name = f"router-{number}"
            router = Router(tmp_path, port, ports[:1], environment, name, "--batch-lease-s=5")
            stack.callback(router.program.kill)
            service = BatchService(router.url, "", lambda reason: None)
            stack.callback(service.close)
            routers.append(router)
            services.append(service)
        for router in routers:
            router.await_ready()
        yield Pair(routers, services, ports[0], tmp_path)


@pytest.mark.slow
def test_batch_run_by_one_router_is_cancelled_by_another(pair: Pair) -> None:
    id = pair.submit(to=0, lines=3000)
    pair.running(id)
    first, runner = pair.who_runs()
    other = 1 - first
    assert pair.services[other].cancel(id)["status"] == "cancelling"
    batch = chaos.ended(pair.services[other], id)
    assert batch["status"] == "cancelled"
    counts = batch["request_counts"]
    assert 0 < counts["completed"] < counts["total"] == 3000
    output = chaos.output_of(pair.services[other], batch, pair.folder)
    assert output.count(b"\n") == counts["completed"]
    chaos.await_true(lambda: not runner.is_running(), chaos.END_S, "its runner has ended")


@pytest.mark.slow
def test_dead_router_is_replaced_by_the_other(pair: Pair) -> None:
    id = pair.submit(to=0)
    pair.running(id)
    first, runner = pair.who_runs()
    pair.routers[first].program.kill()
    chaos.await_true(lambda: not runner.is_running(), chaos.END_S, "the runner has ended with its router")
    chaos.release(pair.worker)
    batch = chaos.ended(pair.services[1 - first], id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    output = chaos.output_of(pair.services[1 - first], batch, pair.folder)
    report = chaos.Report()
    report.add(id, output, chaos.anonymous(id, output))
    assert (report.lines, report.lost, report.doubled) == (LINES, 0, 0)


@pytest.mark.slow
def test_router_with_several_processes_runs_batches(tmp_path: Path) -> None:
    ports = steady_ports(2)
    arguments = ["tests.batches.mock_worker", f"--port={ports[0]}"]
    source = tmp_path / "input.jsonl"
    chaos.write_lines(source, LINES)
    with contextlib.ExitStack() as stack:
        stack.callback(Program(arguments, tmp_path / "worker.log", {}).kill)
        router = Router(tmp_path, ports[1], ports[:1], {}, "router", "--processes=2", "--drain-s=1")
        stack.callback(router.program.end)
        router.await_ready()
        service = BatchService(router.url, "", lambda reason: None)
        stack.callback(service.close)
        batch = chaos.ended(service, chaos.submit(service, source))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        assert len(chaos.output_of(service, batch, tmp_path).splitlines()) == LINES
