"""A real router with a worker that behaves, and what tests ask of its files and batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from baton_batches.ledger import Ledger
from baton_batches.values import LineResult
from tests.router.fake_worker import FakeWorker
from tests.router.running import RunningRouter, running_router

CHAT = "/v1/chat/completions"
TERMINAL = ("completed", "failed", "expired", "cancelled")


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[RunningRouter]:
    """Looks at its ledger often, so that no test waits for it."""
    async with FakeWorker() as worker, running_router([worker], batch_poll_s=0.05, **settings) as router:
        yield router


def line(name: str, **more: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | more.pop("body", {})
    whole = {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | more
    return json.dumps(whole).encode() + b"\n"


async def upload(
    router: RunningRouter, content: bytes, name: str = "in.jsonl", key: str = "", **fields: str
) -> httpx.Response:
    files, data = {"file": (name, content)}, {"purpose": "batch"} | fields
    return await router.client.post("/v1/files", files=files, data=data, headers=bearer(key))


async def uploaded(router: RunningRouter, content: bytes, key: str = "") -> str:
    """The id of a new file."""
    answer = await upload(router, content, key=key)
    assert answer.status_code == 200, answer.text
    id: str = answer.json()["id"]
    return id


async def create(router: RunningRouter, file: str, key: str = "", **more: Any) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"} | more
    return await router.client.post("/v1/batches", json=body, headers=bearer(key))


async def created(router: RunningRouter, content: bytes, **more: Any) -> str:
    """The id of a new batch."""
    answer = await create(router, await uploaded(router, content), **more)
    assert answer.status_code == 200, answer.text
    id: str = answer.json()["id"]
    return id


async def get(router: RunningRouter, id: str) -> dict[str, Any]:
    answer = await router.client.get(f"/v1/batches/{id}")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def reaching(router: RunningRouter, id: str, *statuses: str, seconds: float = 300) -> dict[str, Any]:
    """The batch once it has one of these statuses."""
    async with asyncio.timeout(seconds):
        while True:
            shown = await get(router, id)
            if shown["status"] in statuses:
                return shown
            await asyncio.sleep(0.01)


async def content(router: RunningRouter, id: str) -> bytes:
    answer = await router.client.get(f"/v1/files/{id}/content")
    assert answer.status_code == 200, answer.text
    return answer.content


def rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(row) for row in content.splitlines()]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def run_lines(ledger: Ledger, id: str, results: Sequence[LineResult], now: float) -> None:
    """Record results like a runner: under a lease, which is released at the end."""
    epoch = ledger.lease(id, "a test", now, 30)
    assert epoch is not None
    ledger.record(id, epoch, results, int(now))
    ledger.release(id, epoch)


def answered(number: int, text: str = "yes") -> LineResult:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    body = {"choices": [{"message": {"content": f"{text} {number}"}}], "usage": usage}
    return LineResult(number, 200, json.dumps(body).encode(), f"req_{number}")


def check_error(answer: httpx.Response, status: int, param: str | None, code: str | None = "") -> None:
    """E of the specification; an empty code is not looked at."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["param"] == param, error
    assert code == "" or error["code"] == code, error
