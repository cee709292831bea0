"""
SGLang's protocol: both workers get the same body at once, with the number of their transfer session.

The prefill worker serves a bootstrap port. The router adds to the body its host, its port and a random number
of the session. The decode worker waits for the KV cache of that session, and the client gets its answer. A
decode worker of a pair computes no prompts: if the prefill worker is lost, the request begins again with
another pair.

Health checks read `/health` and `/server_info`, which reports the arguments of the server, among them its
disaggregation mode and bootstrap port, and the states of its schedulers.

Sources: `sglang_router/mini_lb.py` and `sglang/srt/disaggregation` of SGLang 0.5.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from baton_api.prompt_report import PromptReport
from baton_api.workers import EngineKind, Load, Role
from baton_http.upstream import UpstreamExchange, UpstreamLost
from baton_router.cache.tiers import Tier
from baton_router.engines.bodies import read_options, with_members
from baton_router.engines.checks import OK, WorkerApi, layout_text, mean, total
from baton_router.engines.engine_request import (
    CRASH_CAUSES,
    FAILED,
    PREFILL_CRASHED,
    PREFILL_LOST,
    EngineRequest,
)
from baton_router.engines.openai import OpenAiEngine, estimated_report, usage_of
from baton_router.engines.spec import EngineSpec

SESSIONS = 2**63
"""Transfer sessions (`bootstrap_room`) are random numbers below this."""

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")

GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate")
"""Paths that a pair serves."""


class SglangBody(msgspec.Struct):
    """The members of a request's body that decide its transfer sessions."""

    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    @property
    def reserved(self) -> Mapping[str, object]:
        values = (self.bootstrap_host, self.bootstrap_port, self.bootstrap_room)
        return dict(zip(BOOTSTRAP, values, strict=True))

    @property
    def prompts(self) -> int | None:
        """Number of prompts in a list of them; None for a single prompt."""
        for several in (self.prompt, self.text, self.input_ids):
            if isinstance(several, list) and several and not isinstance(several[0], int):
                return len(several)
        return None


_bodies = msgspec.json.Decoder(SglangBody)


def bootstrap_members(host: str, port: int, prompts: int | None, rng: random.Random) -> dict[str, Any]:
    """The members that make both workers meet: one value, or a list with one for each prompt."""
    if prompts is None:
        return dict(zip(BOOTSTRAP, (host, port, rng.randrange(SESSIONS)), strict=True))
    sessions = [rng.randrange(SESSIONS) for _ in range(prompts)]
    return dict(zip(BOOTSTRAP, ([host] * prompts, [port] * prompts, sessions), strict=True))


async def _prefill(attempt: EngineRequest, body: bytes) -> None:
    """The prefill worker's half of a request; if it fails, the decode worker's exchange ends."""
    worker = attempt.grant.prefill
    half = _Half()
    try:
        exchange = await attempt.upstreams.get(worker).request(
            attempt.head.for_worker(worker, len(body)), body, half
        )
        try:
            while await exchange.read():
                pass  # the client gets the decode worker's answer
        finally:
            exchange.close()
        cause = PREFILL_LOST if exchange.status >= FAILED else ""
    except UpstreamLost as lost:
        cause = PREFILL_CRASHED if lost.cause in CRASH_CAUSES else PREFILL_LOST
    if cause:
        attempt.prefill_lost = cause
        if attempt.exchange is not None:
            attempt.exchange.fail(cause)


class _Half:
    """Holds the prefill worker's exchange."""

    def __init__(self) -> None:
        self.exchange: UpstreamExchange | None = None


class SglangEngine(OpenAiEngine):
    """Implements `engine_request.EngineDriver`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        grant, body = attempt.grant, attempt.request.body
        options = read_options(body, _bodies) if attempt.request.path in GENERATING else None
        if options is not None and grant.prefill:
            prefill = urlsplit(f"//{grant.control}")
            host, port = prefill.hostname or "", prefill.port or 0
            body = with_members(body, bootstrap_members(host, port, options.prompts, self._rng))
            attempt.prefill_task = asyncio.create_task(
                _prefill(attempt, body), name=f"prefill at {grant.prefill}"
            )
        head = attempt.head.for_worker(grant.decode, len(body))
        exchange = await attempt.upstreams.get(grant.decode).request(head, body, attempt)
        if attempt.prefill_lost:
            exchange.fail(attempt.prefill_lost)
        return exchange

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        tokens, cached = usage_of(opening)
        return estimated_report(tokens, cached, remote=bool(attempt.grant.prefill)) if tokens else None


RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
TOKEN_USAGE = "sglang:token_usage"
EPOCH = "process_start_time_seconds"

MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


class ServerInfo(msgspec.Struct):
    """The members of `/server_info` that are used."""

    model_path: str = ""
    served_model_name: str | None = None
    version: str = ""
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: str = ""
    page_size: int | None = None
    kv_cache_dtype: str = ""
    max_total_num_tokens: int | None = None
    kv_events_config: str | None = None
    dp_size: int = 1
    """Data-parallel ranks behind its port, each with a cache of its own."""


class _EventsConfig(msgspec.Struct):
    publisher: str = ""
    endpoint: str = ""
    replay_endpoint: str | None = None


_infos = msgspec.json.Decoder(ServerInfo)
_events_configs = msgspec.json.Decoder(_EventsConfig)


class SglangChecks:
    """Implements `checks.EngineChecks`."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api

    async def load(self) -> tuple[Load, str]:
        unavailable_reason = await self._api.ready("/health")
        reply = await self._api.get("/server_info")
        if reply.status != OK:
            reply = await self._api.get("/get_server_info")
        info = _infos.decode(reply.body)
        models = await self._api.models()
        reply = await self._api.get("/metrics")  # only with --enable-metrics
        text = reply.body.decode("utf-8", "replace") if reply.status == OK else ""
        base = [model for model in models if not model.parent]
        name = info.served_model_name or (base[0].id if base else info.model_path)
        page = info.page_size or 1
        usage = mean(text, TOKEN_USAGE)
        blocks = (info.max_total_num_tokens or 0) // page
        events = _events(info.kv_events_config if info.dp_size == 1 else None)
        layout = {
            "version": info.version,
            "model": info.model_path,
            "served name": name,
            "page size": str(page),
            "KV cache data type": info.kv_cache_dtype,
            "transfer backend": info.disaggregation_transfer_backend,
        }
        paired = info.disaggregation_mode in MODES.values()
        load = Load(
            role=self._api.role,
            model=name,
            adapters=tuple(model.id for model in models if model.parent),
            max_model_len=next((model.max_model_len for model in base if model.max_model_len), 0),
            running=int(total(text, RUNNING) or 0),
            queued=int(total(text, WAITING) or 0),
            total_blocks=blocks if usage is not None else 0,
            free_blocks=int((1 - usage) * blocks) if usage is not None else 0,
            block_size=page,
            control=_address(self._api.upstream.host, info.disaggregation_bootstrap_port) if paired else "",
            epoch=str(total(text, EPOCH) or ""),
            compatibility=layout_text(EngineKind.SGLANG, layout) if paired else "",
            kv_events=events.endpoint,
            kv_replay=events.replay_endpoint or "",
            engine=EngineKind.SGLANG,
            version=info.version,
            local_prefill=info.disaggregation_mode != MODES[Role.DECODE],
        )
        return load, unavailable_reason or _role_mismatch(self._api.role, info.disaggregation_mode)


def _role_mismatch(role: Role, mode: str) -> str:
    """Why a healthy worker cannot serve in its role, as a clause; empty if it can."""
    if role is Role.PREFILL and mode != MODES[Role.PREFILL]:
        return (
            f"it is listed as a prefill worker, but its --disaggregation-mode is {mode!r}: start it with "
            f"--disaggregation-mode {MODES[Role.PREFILL]}"
        )
    if role is not Role.PREFILL and mode == MODES[Role.PREFILL]:
        return "its --disaggregation-mode is 'prefill', but it is listed as a decode worker"
    return ""


def _events(config: str | None) -> _EventsConfig:
    try:
        events = _events_configs.decode(config or "{}")
    except msgspec.DecodeError:
        return _EventsConfig()
    return events if events.publisher == "zmq" else _EventsConfig()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def single_body(path: str, body: bytes, salt: str) -> bytes:
    read_options(body, _bodies)
    return body


SPEC = EngineSpec(
    title="SGLang",
    signatures=[
        ("/server_info", lambda reply: "disaggregation_mode" in reply),
        ("/get_server_info", lambda reply: "disaggregation_mode" in reply),
    ],
    checks=SglangChecks,
    driver=SglangEngine,
    tried="0.5",
    no_connector="runs without disaggregation: start it with --disaggregation-mode",
    single_body=single_body,
    cleared_tiers=(Tier.MEMORY,),  # it clears the host's memory with the pool
)
"""Its protocol was read, not tried."""
