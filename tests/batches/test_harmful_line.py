"""A request that ends its worker, in a batch: real workers, a real router, real runners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_api.errors import WorkerLost
from baton_cli.batch_service import BatchService
from tests.batches import chaos
from tests.batches.chaos import CHAT, Program, Router
from tests.batches.serving import rows
from tests.engine.models import make_model
from tests.ports import steady_ports

LINES = 60
HARMFUL = 23
MARK = "this request ends its worker"


class Supervisor:
    """A real worker and the way to it: SIGKILL when a harmful request arrives, and a new start."""

    def __init__(self, worker: Program, port: int, proxied: int) -> None:
        """`port` is the worker's own, `proxied` the one that the router knows."""
        self._worker = worker
        self._port = port
        self._proxied = proxied
        self._listening: socket.socket | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.kills = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Stand between router and worker; at the end all connections are closed."""
        following = asyncio.create_task(self._follow())
        yield
        following.cancel()
        self._refuse()
        for task in self._open:
            task.cancel()
        await asyncio.gather(following, *self._open, return_exceptions=True)

    async def _follow(self) -> None:
        """Listen whenever the worker does: a dead one refuses connections, and no line is lost to it."""
        while True:
            if self._listening is None:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", self._port), 1).close()
                    self._listening = socket.create_server(("127.0.0.1", self._proxied))
                    asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)
            await asyncio.sleep(0.1)

    def _accept(self, listening: socket.socket) -> None:
        """Accept in one step: a connection that asyncio accepts while its server is closed is lost."""
        accepted, _ = listening.accept()
        task = asyncio.create_task(self._connected(accepted))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        task.add_done_callback(lambda _: accepted.close())  # it may be cancelled before it begins

    def _refuse(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def _connected(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(requests):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._copy(answers, writer, b""))
                    group.create_task(self._copy(reader, requests, MARK.encode()))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, mark: bytes) -> None:
        with contextlib.suppress(OSError):
            seen = b""
            while data := await source.read(65536):
                target.write(data)
                seen = seen[-len(mark) :] + data
                if mark and mark in seen:
                    self.kills += 1
                    self._refuse()
                    self._worker.kill()
                    self._worker.start()
                    break
        target.close()


@pytest.mark.slow
async def test_batch_with_a_harmful_line_completes_all_others(tmp_path: Path) -> None:
    """The harmful line is an error in the error file; every other line is answered in the output file."""
    model = make_model(tmp_path / "tiny")
    ports = steady_ports(5)
    source = tmp_path / "input.jsonl"
    source.write_text("".join(map(_line, range(1, LINES + 1))))
    async with contextlib.AsyncExitStack() as stack:
        supervisors = []
        for worker, proxied in ((ports[0], ports[1]), (ports[2], ports[3])):
            arguments = ["baton_cli.main", "serve", str(model), "--served-model-name=tiny", "--threads=1"]
            arguments += [f"--port={worker}", "--dtype=float32", "--kv-cache-memory=16MiB"]
            program = Program(arguments, tmp_path / f"worker-{worker}.log", {"OMP_NUM_THREADS": "1"})
            stack.callback(program.kill)
            supervisors.append(Supervisor(program, worker, proxied))
            await stack.enter_async_context(supervisors[-1].listening())
        router = Router(tmp_path, ports[4], [ports[1], ports[3]], {}, "router", "--retries=0")
        stack.callback(router.program.end)
        await asyncio.to_thread(router.await_ready)
        service = BatchService(router.url, "", lambda reason: None)
        stack.callback(service.close)
        batch = await asyncio.to_thread(_ended, service, source)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": LINES, "completed": LINES - 1, "failed": 1}
        output = await asyncio.to_thread(_rows, service, batch["output_file_id"], tmp_path)
        errors = await asyncio.to_thread(_rows, service, batch["error_file_id"], tmp_path)
    assert {row["custom_id"] for row in output} == {_name(n) for n in range(1, LINES + 1) if n != HARMFUL}
    assert all(row["response"]["body"]["choices"] for row in output)
    assert [row["custom_id"] for row in errors] == [_name(HARMFUL)]
    assert errors[0]["error"]["code"] == WorkerLost.code
    assert sum(supervisor.kills for supervisor in supervisors) >= 3


def _name(number: int) -> str:
    return f"request-{number}"


def _line(number: int) -> str:
    text = MARK if number == HARMFUL else f"Question {number}"
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 32}
    return json.dumps({"custom_id": _name(number), "method": "POST", "url": CHAT, "body": body}) + "\n"


def _ended(service: BatchService, source: Path) -> dict[str, Any]:
    id = chaos.submit(service, source)
    chaos.await_true(lambda: service.batch(id)["status"] in chaos.TERMINAL, chaos.END_S, f"{id} has ended")
    return service.batch(id)


def _rows(service: BatchService, id: str, folder: Path) -> list[dict[str, Any]]:
    place = folder / id
    service.download(id, service.file(id)["bytes"], place, lambda done, of: None)
    return rows(place.read_bytes())
