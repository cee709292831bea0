"""One client's request by HTTP, and what became of it."""

from __future__ import annotations

import math
import time

import aiohttp

from benchmarks.model_cluster import MODEL
from benchmarks.scaling.day import Request
from benchmarks.scaling.score import Answer
from benchmarks.workloads import words


async def ask(session: aiohttp.ClientSession, url: str, request: Request, scale: float) -> Answer:
    """Streamed to its end, with a prompt that is like no other. Raises nothing that a server could cause."""
    phase, result = request.phase, Answer(request.phase.name)
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": phase.answer,
        "messages": [{"role": "user", "content": words(request.seed, phase.prompt)}],
    }
    start = time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                result.why = f"{answer.status} {(await answer.text())[:200]}"
                return result
            last = b""
            async for piece in answer.content.iter_any():
                if math.isinf(result.first):
                    result.first = (time.monotonic() - start) * scale
                last = (last + piece)[-64:]
        whole = (time.monotonic() - start) * scale
        result.token = (whole - result.first) / max(1, phase.answer - 1)
        result.ok = last.rstrip().endswith(b"[DONE]")
        result.why = "" if result.ok else "cut"
    except (aiohttp.ClientError, OSError) as error:
        result.why = f"{type(error).__name__}: {error}"
    return result
