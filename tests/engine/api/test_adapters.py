"""LoRA adapters by the API: loading, requests by name, and unloading while requests run."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_engine.adapters import AdapterRegistry
from baton_engine.requests import LoadedAdapter
from tests.engine.api.api import MODEL, Api, eventually, open_api

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


alive: weakref.WeakSet[LoadedAdapter] = weakref.WeakSet()
"""Adapters whose memory is not freed yet."""


def read(name: str, path: str) -> LoadedAdapter:
    """As the real one fails: by the path."""
    match path:
        case "/missing":
            raise FileNotFoundError(path)
        case "/wide":
            raise SetupError("the rank is 64, but --max-lora-rank is 16.")
        case "/large":
            raise MemoryError("no memory for the adapter")
    digest = hashlib.sha256(path.encode()).hexdigest()[:32]
    adapter = LoadedAdapter(name, path, digest, 8, 65 + int(digest[:2], 16) % 26)
    alive.add(adapter)
    return adapter


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(adapters=AdapterRegistry(read, 3, (MODEL,))) as api:
        yield api


async def load(api: Api, name: str, path: str, **more: Any) -> tuple[int, str]:
    answer = await api.http.post(LOAD, json={"lora_name": name, "lora_path": path, **more})
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]


async def unload(api: Api, name: str) -> tuple[int, str]:
    answer = await api.http.post(UNLOAD, json={"lora_name": name})
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]


async def say(api: Api, model: str, prompt: str = "Hi there, you", **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, **more}
    answer = await api.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_adapters_load_answer_and_unload(api: Api) -> None:
    assert await load(api, "pirate", "/pirate") == (
        200,
        "Success: LoRA adapter 'pirate' added successfully.",
    )
    assert await load(api, "poet", "/poet") == (200, "Success: LoRA adapter 'poet' added successfully.")
    listed = (await api.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        (MODEL, MODEL, None),
        ("pirate", "/pirate", MODEL),
        ("poet", "/poet", MODEL),
    ]
    assert (await api.http.get("/v1/models/poet")).json() == listed[2]
    base, pirate, poet = await asyncio.gather(*(say(api, name) for name in (MODEL, "pirate", "poet")))
    assert [one["model"] for one in (base, pirate, poet)] == [MODEL, "pirate", "poet"]
    assert len({one["choices"][0]["text"] for one in (base, pirate, poet)}) == 3
    chat = await api.chat(model="poet")
    assert chat.json()["model"] == "poet"
    assert await unload(api, "poet") == (200, "Success: LoRA adapter 'poet' removed successfully.")
    gone = await api.complete(model="poet")
    assert gone.status_code == 404
    assert f"Served here: {MODEL}, pirate" in gone.json()["error"]["message"]


async def test_adapters_have_their_own_prefix_cache(api: Api) -> None:
    await load(api, "pirate", "/pirate")
    await load(api, "corsair", "/pirate")

    async def cached(model: str) -> int:
        return int((await say(api, model))["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(name) for name in (MODEL, "pirate", "corsair", "pirate", MODEL)] == [
        0,
        0,
        12,
        12,
        12,
    ]
    await load(api, "pirate", "/poet", load_inplace=True)
    assert await cached("pirate") == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_path": "/pirate"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "there", "lora_path": "/x"}, 400, "'there' has already been loaded"),
        ({"lora_name": MODEL, "lora_path": "/x"}, 400, "is a name of the model"),
        ({"lora_name": "a\nb", "lora_path": "/x"}, 400, "not printable"),
        ({"lora_name": "x" * 257, "lora_path": "/x"}, 400, "exceeds 256 characters"),
        ({"lora_name": 3, "lora_path": "/x"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": "/missing"}, 404, "No adapter found for /missing"),
        ({"lora_name": "x", "lora_path": "/wide"}, 400, "--max-lora-rank is 16"),
        ({"lora_name": "x", "lora_path": "/large"}, 503, "no memory for the adapter"),
    ],
)
async def test_adapters_load_fails_and_keeps_the_others(
    api: Api, body: dict[str, Any], status: int, words: str
) -> None:
    await load(api, "there", "/pirate")
    answer = await api.http.post(LOAD, json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert api.served.adapters.names == ("there",)


async def test_adapters_limit_and_unknown_names(api: Api) -> None:
    for name in ("a", "b", "c"):
        assert (await load(api, name, f"/{name}"))[0] == 200
    status, message = await load(api, "d", "/d")
    assert (status, "--max-loras 4" in message) == (400, True)
    assert (await load(api, "c", "/other", load_inplace=True))[0] == 200
    assert await unload(api, "d") == (404, "The lora adapter 'd' cannot be found.")
    assert (await unload(api, ""))[0] == 400


async def test_adapters_disabled_worker_names_the_flag() -> None:
    async with open_api() as api:
        status, message = await load(api, "a", "/a")
        assert (status, "--enable-lora" in message) == (400, True)


async def test_adapters_load_at_once_only_one_wins(api: Api) -> None:
    results = await asyncio.gather(*(load(api, "same", f"/{number}") for number in range(5)))
    assert sorted(status for status, _ in results) == [200, 400, 400, 400, 400]


async def test_adapters_unloaded_while_requests_run(api: Api) -> None:
    """A request keeps its adapter, though the name now refers to another one; then the memory is freed."""
    await load(api, "pirate", "/pirate")
    expected = (await say(api, "pirate", max_tokens=40))["choices"][0]["text"]
    api.model.go.clear()
    running = asyncio.create_task(say(api, "pirate", max_tokens=40))
    await eventually(api.model.inside.is_set)
    assert (await unload(api, "pirate"))[0] == 200
    assert (await api.complete(model="pirate")).status_code == 404
    await load(api, "pirate", "/poet")
    gc.collect()
    assert {one.path for one in alive} == {"/pirate", "/poet"}
    api.model.go.set()
    assert (await running)["choices"][0]["text"] == expected
    del running

    def freed() -> bool:
        gc.collect()
        return {one.path for one in alive} == {"/poet"}

    await eventually(freed)


async def test_adapters_churn_leaves_nothing(api: Api) -> None:
    """Loads and unloads beside requests; each answer is that of its adapter."""
    expected = {}
    for number in range(3):
        await load(api, "once", f"/{number}", load_inplace=True)
        expected[f"/{number}"] = (await say(api, "once"))["choices"][0]["text"]
    await unload(api, "once")
    for cycle in range(20):
        path = f"/{cycle % 3}"
        await load(api, f"n{cycle}", path)
        answers = [asyncio.create_task(say(api, f"n{cycle}")) for _ in range(3)]
        _, *done = await asyncio.gather(say(api, MODEL), *answers)
        await unload(api, f"n{cycle}")
        assert {one["choices"][0]["text"] for one in done} == {expected[path]}
    assert api.served.adapters.names == ()

    def freed() -> bool:
        gc.collect()
        return not alive

    await eventually(freed)
    await eventually(api.at_rest)
    api.assert_all_blocks_back()


async def test_adapters_at_startup_fail_with_the_entry() -> None:
    registry = AdapterRegistry(read, 3, (MODEL,))
    await registry.load_all(["a=/a", "b=/b=c"])
    assert [(one.name, one.path) for one in registry.all] == [("a", "/a"), ("b", "/b=c")]
    with pytest.raises(SetupError, match="Expected NAME=PATH"):
        await registry.load_all(["/path"])
    with pytest.raises(SetupError, match=r"--lora-modules w=/wide: .*--max-lora-rank"):
        await registry.load_all(["w=/wide"])
