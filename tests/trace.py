"""The modules that one request enters, in order: a router, a prefill and a decode worker in one process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from baton_api.announcements import Announcement, Announcer, Listening, Ready
from baton_api.workers import Role
from baton_decode import main as decode
from baton_engine.model.progress import SILENT
from baton_engine.settings import WorkerSettings
from baton_prefill import main as prefill
from tests.engine.models import make_model
from tests.router.running import running_router

START_S = 120.0

PROCESSES = {Role.PREFILL: prefill.run, Role.DECODE: decode.run}


BESIDE = ("baton_api.background", "baton_batches.")
"""Background loops, and batches, which sweep their storage at times."""


class ModuleTrace:
    """Collects the modules of Baton whose functions are called while it records, except background work."""

    def __init__(self) -> None:
        self.recording = False
        self.modules: dict[str, str] = {}
        """Module and the function by which it was first entered."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Trace this thread and all threads that start from now on."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("baton_") and module not in self.modules and not _beside(frame):
            self.modules[module] = frame.f_code.co_name


def _beside(frame: FrameType | None) -> bool:
    """Whether a background loop calls this function."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(BESIDE):
            return True
        frame = frame.f_back
    return False


class LocalWorker:
    """A worker in this event loop, which moves blocks by loopback."""

    def __init__(self) -> None:
        self.url = ""
        self.ready = asyncio.Event()

    def announce(self, announcement: Announcement) -> None:
        match announcement:
            case Listening(port=port):
                self.url = f"http://127.0.0.1:{port}"
            case Ready():
                self.ready.set()


@contextlib.asynccontextmanager
async def local_worker(role: Role, folder: Path) -> AsyncIterator[LocalWorker]:
    """A worker that is ready."""
    worker = LocalWorker()
    settings = WorkerSettings.model_validate(
        {"model": str(folder), "role": role, "port": 0, "transfer": "loopback", "threads": 1, "drain_s": 1}
    )
    announcer: Announcer = worker.announce  # type: ignore[assignment]
    process = asyncio.create_task(PROCESSES[role](settings, announcer, SILENT))
    try:
        async with asyncio.timeout(START_S):
            ready = asyncio.create_task(worker.ready.wait())
            await asyncio.wait((ready, process), return_when=asyncio.FIRST_COMPLETED)
            if process.done():
                await process
        yield worker
    finally:
        process.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await process


async def trace_request(folder: Path) -> dict[str, str]:
    """The modules that a streamed chat request enters; its prompt is computed by the prefill worker."""
    trace = ModuleTrace()
    content = "A relay has four runners. " * 100
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "stream": True}
    with trace.installed():
        async with (
            local_worker(Role.PREFILL, folder) as prefills,
            local_worker(Role.DECODE, folder) as decodes,
            running_router([decodes], [prefills], health_interval_s=600) as router,
        ):
            trace.recording = True
            reply = await router.client.post("/v1/chat/completions", json={"model": folder.name, **body})
            trace.recording = False
    assert reply.text.endswith("data: [DONE]\n\n"), reply.text
    assert "baton_prefill.prompts" in trace.modules, reply.headers
    return trace.modules


def main() -> None:
    """Print the modules and the functions by which they are entered."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), max_position_embeddings=4096)
        for module, function in asyncio.run(trace_request(model)).items():
            print(module, function)


if __name__ == "__main__":
    main()
