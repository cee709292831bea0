"""An upload whose request ends while a thread is at work for it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from baton_batches.object_store import FolderObjectStore, ObjectWriter
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.upload import receive
from tests.router.running import until


class SlowWriter:
    """A real writer whose `slow` call blocks until the test releases it. Calls must not overlap."""

    def __init__(self, writer: ObjectWriter, slow: str) -> None:
        self._writer, self._slow = writer, slow
        self._lock = threading.Lock()
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.met = False

    def write(self, data: bytes) -> None:
        self._call("write", data)

    def commit(self) -> None:
        self._call("commit")

    def abort(self) -> None:
        self._call("abort")

    def _call(self, name: str, *given: bytes) -> None:
        if not self._lock.acquire(blocking=False):
            self.met = True
            return
        try:
            if name == self._slow:
                self.waiting.set()
                assert self.go_on.wait(60)
            getattr(self._writer, name)(*given)
        finally:
            self._lock.release()


def nothing_in(folder: Path) -> bool:
    return not any(path.is_file() for path in folder.rglob("*"))


@pytest.mark.parametrize("slow", ["write", "commit"])
async def test_upload_cancelled_while_it_writes_leaves_nothing(tmp_path: Path, slow: str) -> None:
    """The router stops while a thread is still writing: the file is removed after it, not under its hands."""
    kept = Storage(BatchSettings(state=str(tmp_path)), 0)
    writers: list[SlowWriter] = []

    class SlowFolder(FolderObjectStore):
        def writer(self, key: str) -> ObjectWriter:
            writers.append(SlowWriter(super().writer(key), slow))
            return writers[0]

    kept.objects = SlowFolder(tmp_path / "files")
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    body = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="f"', b"x" * 2_000_000)
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]

    async def received() -> dict[str, Any]:
        return {"type": "http.request", "body": body + b"--b--\r\n", "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": headers}, received)
    uploading = asyncio.create_task(receive(kept, request, "o", int(time.time())))
    await until(lambda: writers and writers[0].waiting.is_set())
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)
    writers[0].go_on.set()
    await until(lambda: nothing_in(tmp_path / "files"))
    assert not writers[0].met
    await asyncio.to_thread(kept.close)
