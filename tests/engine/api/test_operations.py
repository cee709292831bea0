"""A worker's description of itself, and whether it can generate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from baton_api import __version__, headers
from baton_api.errors import Overloaded
from baton_api.keys import KeyDigest, Keys
from baton_api.messages import TokenChoice
from baton_api.workers import Role
from baton_engine.api.operations import SECRETS
from baton_engine.api.served import Served
from baton_engine.requests import Fetch, FetchResult, RelayRecord
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import CONTEXT, MODEL, TOKENIZER, Api, eventually, open_api
from tests.engine.api.test_metrics import RELAY


async def get(api: Api, path: str) -> Any:
    response = await api.http.get(path)
    assert response.status_code == 200
    return response.json()


async def test_models_card_is_complete_and_stable(api: Api, sdk: openai.AsyncOpenAI) -> None:
    listed = [model async for model in sdk.models.list()]
    (card,) = listed
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "baton")
    assert card.created > 0
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == CONTEXT
    assert [model async for model in sdk.models.list()] == listed
    assert await sdk.models.retrieve(MODEL) == card
    assert "/" in MODEL
    encoded = await api.http.get("/v1/models/" + MODEL.replace("/", "%2F"))
    assert encoded.json() == (await get(api, f"/v1/models/{MODEL}"))


async def test_models_every_served_name_has_a_card() -> None:
    async with open_api(names=(MODEL, "other")) as api:
        cards = (await get(api, "/v1/models"))["data"]
        assert [(card["id"], card["root"]) for card in cards] == [(MODEL, MODEL), ("other", MODEL)]
        assert (await api.chat(model="other")).json()["model"] == MODEL


async def test_version_is_returned(api: Api) -> None:
    assert (await get(api, "/version"))["version"] == __version__


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_describes_the_model(api: Api, path: str) -> None:
    info = await get(api, path)
    assert (info["served_model_name"], info["is_generation"]) == (MODEL, True)
    assert (info["max_model_len"], info["vocab_size"]) == (CONTEXT, TOKENIZER.vocab_size)
    assert info["disaggregation_mode"] == "null"
    async with open_api(settings=WorkerSettings(role=Role.DECODE)) as decode:
        assert (await get(decode, path))["disaggregation_mode"] == "decode"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_settings_and_metrics_without_secrets(path: str) -> None:
    key = KeyDigest.of("a-key-that-nobody-may-see")
    settings = WorkerSettings(api_key=(key,), ticket_secret="a-secret-too", max_queued=77)
    async with open_api(settings=settings, keys=Keys((key,))) as api:
        response = await api.http.get(path, headers={"authorization": "Bearer a-key-that-nobody-may-see"})
        info = response.json()
        assert info["settings"]["max_queued"] == 77
        assert info["figures"]["total_blocks"] == 511
        assert info["max_total_num_tokens"] == 511 * 4
        assert info["figures"]["totals"]["finished"] == {}
        for secret in ("nobody-may-see", key.sha256.hex(), "a-secret-too"):
            assert secret not in response.text
        assert not SECRETS & set(info["settings"])


def test_server_info_hides_every_secret_setting() -> None:
    words = ("key", "secret", "token_", "password", "credential")
    suspects = {name for name in WorkerSettings.model_fields if any(word in name for word in words)}
    assert suspects == SECRETS


async def test_server_info_counts_finished_requests(api: Api) -> None:
    await api.chat(max_tokens=3)
    snapshot = (await get(api, "/server_info"))["figures"]
    assert snapshot["totals"]["finished"] == {"length": 1}
    assert snapshot["totals"]["generated_tokens"] == 3
    assert snapshot["running"] == 0


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_are_short(api: Api, path: str) -> None:
    response = await api.http.get(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_flush_cache_empties_it_and_keeps_running_requests(api: Api) -> None:
    prompt = "a prompt of several blocks of four"
    whole = (await api.complete(prompt=prompt, temperature=0)).json()["choices"][0]["text"]
    cached = api.served.computing.snapshot().cached_blocks
    assert cached > 4
    assert (await api.http.post("/flush_cache")).json() == {"flushed_blocks": cached}
    await eventually(lambda: not api.served.computing.snapshot().cached_blocks)
    api.model.stops_at = api.model.passes + 3
    running = asyncio.create_task(api.complete(prompt=prompt, temperature=0, max_tokens=100))
    await eventually(lambda: api.served.computing.snapshot().running == 1)
    await api.http.post("/flush_cache")
    api.model.resume()
    again = (await running).json()
    assert again["choices"][0]["text"].startswith(whole)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    api.assert_all_blocks_back()


# --- /health_generate ---


async def test_health_generate_generates_a_token(api: Api) -> None:
    before = api.served.computing.snapshot().totals.generated_tokens
    for _ in range(2):  # the second finds nothing in the cache
        assert (await api.http.get("/health_generate")).status_code == 200
    now = api.served.computing.snapshot()
    assert now.totals.generated_tokens == before + 2
    assert now.totals.prompt_tokens_cached == 0
    api.assert_all_blocks_back()


async def test_health_generate_stopped_engine_is_a_503(api: Api) -> None:
    await api.served.computing.close()
    response = await api.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, Overloaded.code)
    assert (await api.http.get("/health")).status_code == 200


async def test_while_it_drains_it_is_not_asked(api: Api) -> None:
    assert await api.served.drain.drain(1)
    assert (await api.http.get("/health_generate")).status_code == 503


@dataclass
class Prefill:
    """A prefill worker that brings prompts, or fails to."""

    relay: RelayRecord | None
    served: Served | None = None
    requested_tokens: int = 0

    def __call__(self, address: str, ticket: str, request_id: str) -> Prefill:
        return self

    def start(self, fetch: Fetch, unused: object) -> None:
        assert self.served is not None
        self.requested_tokens = len(fetch.tokens)
        arrived = len(fetch.blocks) if self.relay else 0
        first = TokenChoice(token=1) if self.relay else None
        self.served.computing.engine.fetched(
            FetchResult(fetch.request_id, arrived, first=first, relay=self.relay, reason="peer_lost")
        )

    def cancel(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize("relay", [RELAY, None], ids=["brings it", "fails"])
async def test_health_generate_pair_needs_the_prefill_workers_prompt(relay: RelayRecord | None) -> None:
    prefill = Prefill(relay)
    async with open_api(remote=prefill) as api:
        prefill.served = api.served
        response = await api.http.get("/health_generate", headers={headers.PREFILL: "127.0.0.1:1"})
        assert prefill.requested_tokens > api.served.settings.local_prefill_tokens
        assert response.status_code == (200 if relay else 503)
        if relay is None:
            assert "prefill worker" in response.json()["error"]["message"]
        assert (await api.http.get("/health_generate")).status_code == 200
        await eventually(lambda: not api.served.computing.snapshot().owned_blocks)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache"])
async def test_administration_needs_the_key_for_it(path: str) -> None:
    """With a key for administration no other one will do; without it, that of the API."""
    keys, admin = Keys((KeyDigest.of("client"),)), Keys((KeyDigest.of("admin"),))
    both: dict[str, Any] = {"keys": keys, "admin_keys": admin}
    for given, key, allowed in (
        ({}, "", True),
        ({"keys": keys}, "client", True),
        ({"admin_keys": admin}, "", False),
        ({"admin_keys": admin}, "admin", True),
        (both, "client", False),
        (both, "admin", True),
    ):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with open_api(**given) as api:
            answer = await api.http.post(path, json={}, headers=headers)
            assert (answer.status_code != 401) == allowed, (given, key)


async def test_key_for_administration_is_none_for_clients() -> None:
    both: dict[str, Any] = {
        "keys": Keys((KeyDigest.of("client"),)),
        "admin_keys": Keys((KeyDigest.of("admin"),)),
    }
    async with open_api(**both) as api:
        headers = {"authorization": "Bearer admin"}
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 401
    async with open_api(admin_keys=Keys((KeyDigest.of("admin"),))) as api:
        assert (await api.http.get("/v1/models")).status_code == 200


async def test_operations_need_the_key_except_probes() -> None:
    async with open_api(keys=Keys((KeyDigest.of("k"),))) as api:
        for path in ("/server_info", "/model_info", "/health_generate", "/version", "/debug/requests"):
            assert (await api.http.get(path)).status_code == 401
        for path in ("/generate", "/tokenize", "/detokenize", "/abort_request"):
            assert (await api.http.post(path, json={})).status_code == 401
        probes = (api.http.get(path) for path in ("/health", "/ready", "/ping", "/metrics"))
        assert [response.status_code for response in await asyncio.gather(*probes)] == [200] * 4
