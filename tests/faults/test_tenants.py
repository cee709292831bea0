"""Two tenants of one cluster: a real router, a prefill and a decode worker, and no block in common."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_api import headers
from tests.engine.models import VOCAB, make_model
from tests.faults.cluster import CONTEXT, TIMEOUT_S, Node, until

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

TOKENS = 200
BLOCK = 16
WHOLE = (TOKENS - 1) // BLOCK * BLOCK
"""Of a prompt, all that can be cached."""


async def test_tenants_share_no_blocks_in_any_worker(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    model = make_model(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    shared = (
        str(model),
        "--served-model-name=tiny",
        "--dtype=float32",
        "--threads=1",
        "--kv-cache-memory=64MiB",
    )
    tenants = [{"name": name, "keys": [_hashed(key) for key in keys]} for name, *keys in
               (("a", "a-1", "a-2"), ("b", "b-1"), ("ops", "ops"))]  # fmt: skip
    tenants[-1]["admin"] = True  # type: ignore[assignment]
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    prompt = [random.Random(3).randrange(3, VOCAB) for _ in range(TOKENS)]
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, contextlib.AsyncExitStack() as stack:
        decode, prefill = (
            Node("decode", ("decode", *shared), http),
            Node("prefill", ("prefill", *shared), http),
        )
        for node in (decode, prefill):
            stack.push_async_callback(node.stop)
        await asyncio.gather(decode.start(), prefill.start())
        flags = (f"--decode={decode.url}", f"--prefill={prefill.url}", "--local-prefill-max-tokens=0")
        router = Node("router", ("router", *flags, f"--tenants-file={file}"), http)
        stack.push_async_callback(router.stop)
        await router.start()

        async def sees_both() -> bool:
            rows = (await http.get(f"{router.url}/workers", headers=_bearer("ops"))).json()["data"]
            return all(row["state"] == "ready" for row in rows)

        await until(sees_both, "the router sees both workers")

        async def ask(key: str) -> tuple[int, int, str]:
            """Tokens of the prompt that were cached anywhere, and at the decode worker; and the text."""
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = await http.post(f"{router.url}/v1/completions", json=body, headers=_bearer(key))
            cached = int(answer.raise_for_status().headers[headers.CACHED])
            rows: list[dict[str, Any]] = []

            async def reloaded() -> bool:
                every = (await http.get(f"{decode.url}/debug/requests")).json()["data"]
                rows[:] = [one for one in every if one["request_id"] == answer.headers[headers.REQUEST_ID]]
                return bool(rows)

            await until(reloaded, "the decode worker tells of the request")
            row = rows[0]
            held = sum(relay["local_tokens"] for relay in row["relays"]) if row["relays"] else cached
            return cached, held, answer.json()["choices"][0]["text"]

        first = await ask("a-1")
        text = first[2]
        assert first == (0, 0, text)
        assert await ask("a-2") == (WHOLE, WHOLE, text)
        assert await ask("b-1") == (0, 0, text)
        assert [(await ask(key))[0] for key in ("b-1", "a-1")] == [WHOLE, WHOLE]

        # The decode worker forgets: now it is the prefill worker whose cache is asked.
        await until(decode.at_rest, "no request holds blocks, which would stay")
        (await http.post(f"{decode.url}/flush_cache")).raise_for_status()
        assert await ask("a-1") == (WHOLE, 0, text)
        assert await ask("ops") == (0, 0, text)


def _hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
