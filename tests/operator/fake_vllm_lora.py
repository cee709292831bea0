"""
A vLLM worker with adapters, as its HTTP API behaves, kindly or not.

Answers have the bytes of vLLM 0.32's. `files` are the folders that exist, with the error of each; a path
that is missing does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

RANK_ERROR = (
    "Call to add_lora method failed: Worker failed with error 'LoRA rank 64 is greater than max_lora_rank "
    "16.', please check the stack trace above for the root cause"
)


class FakeVllmLora:
    """One worker."""

    def __init__(self, files: Mapping[str, str] | None = None, *, key: str = "") -> None:
        self.files = files
        """Errors by path, empty if the files are good. None: all files are good."""
        self.key = key
        self.loaded: dict[str, str] = {}
        self.requests: list[str] = []
        """Loads and unloads that were answered."""
        self.hangs = asyncio.Event()
        """Cleared: loads do not end."""
        self.hangs.set()
        self.status = 0
        """A status with which everything fails."""
        self.body: bytes | None = None
        """Its answer to `/v1/models`; None: a list."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Refuse connections, and forget what is loaded, as a container that ends."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None
        self.loaded.clear()

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.status:
            return web.Response(status=self.status, text="upstream connect error")
        return None

    async def _models(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        if self.body is not None:
            return web.Response(body=self.body)
        base = {"id": "tiny", "object": "model", "root": "/models/tiny", "parent": None}
        adapters = [
            {"id": name, "object": "model", "root": path, "parent": "tiny"}
            for name, path in self.loaded.items()
        ]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _load(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        assert set(body) == {"lora_name", "lora_path"}
        self.requests.append(f"load {name} {path}")
        await self.hangs.wait()
        if name in self.loaded:
            return error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if self.files is not None and path not in self.files:
            return error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        if self.files is not None and self.files[path]:
            return error(500, self.files[path], "InternalServerError")
        self.loaded[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        name = (await request.json())["lora_name"]
        self.requests.append(f"unload {name}")
        await self.hangs.wait()
        if self.loaded.pop(name, None) is None:
            return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def error(status: int, message: str, type: str) -> web.Response:
    body: dict[str, Any] = {"message": message, "type": type, "param": None, "code": status}
    return web.json_response({"error": body}, status=status)


@asynccontextmanager
async def running(*workers: FakeVllmLora) -> AsyncIterator[None]:
    for one in workers:
        await one.start()
    try:
        yield
    finally:
        for one in workers:
            one.hangs.set()
            await one.stop()
