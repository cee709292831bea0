"""A request that ends its worker, in a batch: real workers, a real router, real runners."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
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
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.Task[None]] = set()
        self.kills = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Stand between router and worker; at the end all connections are closed."""
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()
        self._refuse()
        while self._open:
            for end in self._ends:
                end.close()
            await asyncio.wait(self._open)

    async def _follow(self) -> None:
        """Listen whenever the worker does: a dead one refuses connections, and no line is lost to it."""
        while True:
            if self._server is None:
                with contextlib.suppress(OSError):
                    _, probe = await asyncio.open_connection("127.0.0.1", self._port)
                    probe.close()
                    self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._proxied)
            await asyncio.sleep(0.1)

    def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        with self._working(), contextlib.suppress(OSError):
            answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
            self._ends.add(requests)
            back = asyncio.create_task(self._copy(answers, writer, b""))
            await self._copy(reader, requests, MARK.encode())
            await back
        writer.close()
        self._ends.discard(writer)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        yield
        self._open.discard(task)

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
        self._ends.discard(target)


@pytest.mark.slow
# A connection of the proxy above may be collected before both of its ends are closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
