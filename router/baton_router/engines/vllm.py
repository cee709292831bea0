"""
vLLM's protocol: the prefill worker first, then the decode worker with what the first one returned.

The prefill worker computes the prompt and one token, and returns `kv_transfer_params`: where its KV blocks
are. The decode worker gets them in the body and reads the blocks by NIXL. The prefill worker keeps the
blocks until they were read, or until their lease ends (30 s by default).

Sources: `vllm/distributed/kv_transfer/kv_connector/v1/nixl` and `vllm/entrypoints/openai` of vLLM 0.32.

**Checks.** `/health`, `/v1/models` and `/metrics` are read each time, the rest once per process. The router
asks each worker once whether it can be part of a pair: the worker computes a prompt of one token for another
worker. It returns its side channel if it has a connector. Streams are in `vllm_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_api.hashing import client_salt
from baton_api.prompt_report import Fallback, PromptReport
from baton_api.workers import EngineKind, Load, Role
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange, UpstreamLost
from baton_router.cache.token_blocks import prompt_tail
from baton_router.engines.bodies import openai_error, read_options, with_members
from baton_router.engines.checks import OK, WorkerApi, label_values, layout_text, mean, total
from baton_router.engines.engine_request import BAD, EngineRequest, ResumeState
from baton_router.engines.openai import estimated_report, usage_of
from baton_router.engines.spec import EngineSpec
from baton_router.engines.vllm_stream import (
    ABORTED,
    StreamOptions,
    VllmState,
    VllmStream,
    with_cached_tokens,
)

TRANSFER = "kv_transfer_params"

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` that make a worker keep the blocks of a prompt for another one."""

OLDEST = (0, 12)
"""Oldest version whose pairs follow the protocol of `baton_router.engines.vllm`."""

EPOCH = "process_start_time_seconds"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
CACHE = "vllm:cache_config_info"
STEP = "vllm:inter_token_latency_seconds"


class _Version(msgspec.Struct):
    version: str


class _EventSource(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


class _Probe(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_versions = msgspec.json.Decoder(_Version)
_sources = msgspec.json.Decoder(dict[str, _EventSource])
_probes = msgspec.json.Decoder(_Probe)


class _Process(msgspec.Struct):
    """The properties of one process, which are requested once."""

    epoch: str
    version: str
    side_channel: str
    """`host:port` of NixlConnector; empty without it."""
    events: _EventSource
    transfer_mode: str = ""
    """`pull` or `push`: which side of NixlConnector moves the blocks."""
    other_connector: str = ""
    """The members that another connector than NixlConnector returns."""


class VllmChecks:
    """Implements `checks.EngineChecks`."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api
        self._process: _Process | None = None
        self._steps = (0.0, 0.0)
        """Sum and number of the times between tokens at the last check."""
        self._step_s = 0.0

    async def load(self) -> tuple[Load, str]:
        unavailable_reason = await self._api.ready("/health")
        models = await self._api.models()
        reply = await self._api.get("/metrics")
        text = reply.body.decode("utf-8", "replace") if reply.status == OK else ""
        base = [model for model in models if not model.parent]
        if not base:
            raise msgspec.DecodeError("it serves no model")
        epoch = str(total(text, EPOCH) or "")
        if not unavailable_reason and (self._process is None or self._process.epoch != epoch):
            self._process = await self._ask(epoch, base[0].id)
        process = self._process or _Process(epoch, "", "", _EventSource())
        cache = label_values(text, CACHE)
        block_size, blocks = _number(cache.get("block_size")), _number(cache.get("num_gpu_blocks"))
        usage = mean(text, USAGE)
        layout = {
            "version": process.version,
            "model": base[0].root or "",
            "served names": ", ".join(sorted(model.id for model in base)),
            "block size": str(block_size),
            "KV cache data type": cache.get("cache_dtype", ""),
            "transfer mode": process.transfer_mode,
        }
        load = Load(
            role=self._api.role,
            model=base[0].id,
            names=tuple(model.id for model in base),
            adapters=tuple(model.id for model in models if model.parent),
            max_model_len=base[0].max_model_len or 0,
            running=int(total(text, RUNNING) or 0),
            queued=int(total(text, WAITING) or 0),
            step_s=self._measure_step(text),
            total_blocks=blocks if usage is not None else 0,
            free_blocks=int((1 - usage) * blocks) if usage is not None else 0,
            block_size=block_size or 16,
            control=process.side_channel,
            epoch=epoch,
            compatibility=layout_text(EngineKind.VLLM, layout) if process.side_channel else "",
            kv_events=(process.events.endpoint or "") if process.events.enable_kv_cache_events else "",
            kv_replay=process.events.replay_endpoint or "",
            engine=EngineKind.VLLM,
            version=process.version,
        )
        return load, unavailable_reason or _role_mismatch(load, process)

    async def _ask(self, epoch: str, model: str) -> _Process:
        version = _versions.decode((await self._api.get("/version")).body).version
        reply = await self._api.get("/kv_event_sources")
        sources = _sources.decode(reply.body) if reply.status == OK else {}
        # Each data-parallel rank has a cache of its own, and vLLM chooses the rank.
        events = next(iter(sources.values())) if len(sources) == 1 else _EventSource()
        prompt = {"model": model, "prompt": [1], "max_tokens": 1, TRANSFER: REMOTE_DECODE}
        reply = await self._api.post("/v1/completions", prompt)
        params = _probes.decode(reply.body).kv_transfer_params if reply.status == OK else None
        if not params or not params.get("remote_host"):
            return _Process(epoch, version, "", events, other_connector=", ".join(params or ()))
        side_channel = f"{params['remote_host']}:{params.get('remote_port')}"
        return _Process(epoch, version, side_channel, events, str(params.get("transfer_mode", "pull")))

    def _measure_step(self, text: str) -> float:
        """Mean seconds between two tokens since the last check; the last value if none came."""
        seconds, steps = total(text, f"{STEP}_sum") or 0.0, total(text, f"{STEP}_count") or 0.0
        before_s, before = self._steps
        self._steps = seconds, steps
        if steps > before:
            self._step_s = (seconds - before_s) / (steps - before)
        return self._step_s


def _role_mismatch(load: Load, process: _Process) -> str:
    """Why a healthy worker cannot serve in its role, as a clause; empty if it can."""
    if load.role is not Role.PREFILL:
        return ""
    if process.other_connector:
        return (
            "it is listed as a prefill worker, but its KV connector is not NixlConnector: it returned "
            f"{process.other_connector}"
        )
    if not load.control:
        return (
            "it is listed as a prefill worker, but vLLM was started without a KV connector: start it with "
            "--kv-transfer-config"
        )
    if parsed_version(load.version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"vLLM {load.version} cannot be part of a pair: {oldest} or later is required"
    return ""


def parsed_version(text: str) -> tuple[int, ...]:
    """
    The leading numbers of a version; an unknown version counts as the newest.

    >>> parsed_version("0.32.0+cpu"), parsed_version("dev")
    ((0, 32, 0), (9999,))
    """
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or (9999,)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATING = (CHAT, COMPLETIONS)
"""Paths that a pair can serve."""


class VllmBody(msgspec.Struct):
    """The members of a request's body that decide how vLLM's workers are driven."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt: Any = None
    prompt_logprobs: int | None = None
    prompt_embeds: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: Any = None
    tool_choice: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None

    @property
    def reserved(self) -> Mapping[str, object]:
        return {TRANSFER: self.kv_transfer_params}

    @property
    def single(self) -> bool:
        """Whether there are one prompt and one answer."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        one = (self.n or 1) == 1 and (self.best_of or 1) == 1
        return one and not several and not self.use_beam_search and self.prompt_embeds is None

    @property
    def pairs(self) -> bool:
        """Whether a prefill worker can compute the prompt for a decode worker."""
        return self.single and not self.echo and self.prompt_logprobs is None

    @property
    def resumable(self) -> bool:
        """
        Whether another worker can continue the answer by its token ids.

        It cannot where a worker has state of the answer besides its tokens: a grammar, or text that is held
        back because it may begin a stop sequence.
        """
        constrained = self.structured_outputs is not None or self.tool_choice not in (None, "none", "auto")
        free = self.response_format is None or self.response_format == {"type": "text"}
        return self.pairs and free and not constrained and not self.stop and not self.min_tokens

    @property
    def usage(self) -> bool:
        return bool(self.stream_options) and self.stream_options.get("include_usage") is True  # type: ignore[union-attr]

    def left(self, passed: int) -> dict[str, int]:
        """The limits of an answer of which `passed` tokens exist."""
        limits = {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}
        return {name: limit - passed for name, limit in limits.items() if limit is not None}


class _TransferParams(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None


class _PrefillUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _PrefillChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PrefillReply(msgspec.Struct):
    usage: _PrefillUsage = msgspec.field(default_factory=_PrefillUsage)
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: list[int] | None = None
    choices: list[_PrefillChoice] = msgspec.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        of_choice = self.choices[0].prompt_token_ids if self.choices else None
        return self.prompt_token_ids or of_choice or []


BODIES = msgspec.json.Decoder(VllmBody)
_replies = msgspec.json.Decoder(_PrefillReply)
_transfers = msgspec.json.Decoder(_TransferParams)


def salt_members(salt: str, options: VllmBody) -> dict[str, Any]:
    """The cache salt of a tenant, combined with the client's; empty without one of the tenant."""
    if not salt:
        return {}
    return {"cache_salt": client_salt(salt, options.cache_salt) if options.cache_salt else salt}


def common_members(attempt: EngineRequest, options: VllmBody) -> dict[str, Any]:
    """The members that both workers get: the tenant's cache salt, and what a resumed answer has so far."""
    members = salt_members(attempt.request.tenant.salt, options)
    if isinstance(attempt.state, VllmState):
        members |= options.left(attempt.state.passed)
        if attempt.request.path == COMPLETIONS:
            members["prompt"] = attempt.state.tokens
    return members


def transfer_members(attempt: EngineRequest, params: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params`; in a resumed chat also the token ids that replace its messages."""
    if isinstance(attempt.state, VllmState) and attempt.request.path == CHAT:
        params = {**params, "prompt_token_ids": attempt.state.tokens}
    return {TRANSFER: params} if params else {}


def prefill_body(attempt: EngineRequest, options: VllmBody) -> bytes:
    """The body for the prefill worker: the prompt, one token, and no stream."""
    members = common_members(attempt, options)
    members |= {"stream": False, "max_tokens": 1, "return_token_ids": True}
    if attempt.request.path == CHAT:
        members["max_completion_tokens"] = 1
    if options.stream_options is not None:
        members["stream_options"] = None
    if options.min_tokens:
        members["min_tokens"] = 0
    return with_members(attempt.request.body, members | transfer_members(attempt, REMOTE_DECODE))


def decode_body(attempt: EngineRequest, options: VllmBody, transfer: dict[str, Any]) -> bytes:
    """The body for the decode worker, with the prefill worker's `transfer`, empty without one."""
    members = common_members(attempt, options)
    if options.stream and not options.echo:  # a stream with both has the prompt's ids, but not its text
        members["return_token_ids"] = True
    if options.stream:
        members["stream_options"] = {**(options.stream_options or {}), "include_usage": True}
    return with_members(attempt.request.body, members | transfer_members(attempt, transfer))


class VllmEngine:
    """Implements `engine_request.EngineDriver`."""

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        grant = attempt.grant
        body = attempt.request.body
        options = read_options(body, BODIES) if attempt.request.path in GENERATING else None
        if options is not None:
            attempt.options = options
            transfer: dict[str, Any] = {}
            if grant.prefill and options.pairs:
                transfer = await self._prefill(attempt, options)
            body = decode_body(attempt, options, transfer)
        attempt.decode_sent = attempt.clock()
        head = attempt.head.for_worker(grant.decode, len(body))
        return await attempt.upstreams.get(grant.decode).request(head, body, attempt)

    async def _prefill(self, attempt: EngineRequest, options: VllmBody) -> dict[str, Any]:
        """Let the prefill worker compute the prompt; empty, with `attempt.fallback`, if it did not."""
        reply = await attempt.prefill(prefill_body(attempt, options))
        if not reply:
            return {}
        try:
            answer = _replies.decode(reply)
            params = msgspec.json.decode(answer.kv_transfer_params, type=dict[str, Any] | None)
            cached = (
                _transfers.decode(answer.kv_transfer_params).remote_prefill_cached_tokens if params else None
            )
        except msgspec.DecodeError:
            attempt.fallback = Fallback.PROTOCOL
            return {}
        if not params:
            attempt.fallback = Fallback.PROTOCOL  # it has no connector, or is set up to send nothing
            return {}
        tokens = len(answer.tokens) or answer.usage.prompt_tokens
        attempt.prefill_s = attempt.clock() - attempt.started
        attempt.prompt_tokens, attempt.cached, attempt.tail = tokens, cached, tail_of(attempt, answer.tokens)
        return params

    def stream(self, attempt: EngineRequest) -> EventStream | None:
        options = attempt.options
        if not isinstance(options, VllmBody):
            return attempt.request.events() if attempt.request.events is not None else None
        state = attempt.state if isinstance(attempt.state, VllmState) else None
        wanted = StreamOptions(options.usage, bool(options.return_token_ids))
        return VllmStream(wanted, state, _cached_at_prefill(attempt))

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        events = attempt.events
        now, remote = attempt.clock(), bool(attempt.prefill_s)
        tokens, cached = attempt.prompt_tokens, attempt.cached
        tail = attempt.tail
        if not remote and isinstance(events, VllmStream):
            tokens, tail = len(events.prompt_tokens), tail_of(attempt, events.prompt_tokens)
        elif not remote:
            tokens, cached = usage_of(opening)
        if not tokens and attempt.fallback:
            tokens = attempt.grant.prompt_tokens  # a long answer begins without its usage; the failure counts
        if not tokens:
            return None
        streams = events is not None
        return estimated_report(
            tokens,
            cached,
            compute_s=attempt.prefill_s if remote else (now - attempt.started if streams else 0.0),
            transfer_s=now - attempt.decode_sent if remote and streams else 0.0,
            remote=remote,
            tail=tail,
            fallback=attempt.fallback or "",
        )

    def client_body(self, attempt: EngineRequest, body: bytes) -> bytes:
        if attempt.status >= BAD:
            return openai_error(attempt.status, body, attempt.request.path)
        if ABORTED in body:
            raise UpstreamLost(attempt.grant.decode, "aborted")
        cached = _cached_at_prefill(attempt)
        return body if cached is None else with_cached_tokens(body, cached)

    def cached_tokens(self, attempt: EngineRequest) -> int | None:
        events = attempt.events
        return events.cached if isinstance(events, VllmStream) else None

    def resume_state(self, attempt: EngineRequest) -> ResumeState | None:
        events = attempt.events
        state = events.state if isinstance(events, VllmStream) else None
        options = attempt.options
        if state is None or not isinstance(options, VllmBody):
            return None
        if state.ending:
            return state
        return state if options.resumable and not state.tool_call else None


def _cached_at_prefill(attempt: EngineRequest) -> int | None:
    """The cached tokens of a prompt that a prefill worker computed; None if unknown, or without one."""
    return attempt.cached if attempt.prefill_s else None


def tail_of(attempt: EngineRequest, tokens: list[int]) -> str:
    """The name of the prompt's last full block; empty if the worker's KV events are not followed."""
    options = attempt.options
    if not attempt.grant.block_size or not tokens or not isinstance(options, VllmBody):
        return ""
    salt = common_members(attempt, options).get("cache_salt") or options.cache_salt or ""
    return prompt_tail(tokens, attempt.grant.block_size, salt, attempt.grant.adapter)


def single_body(path: str, body: bytes, salt: str) -> bytes:
    options = read_options(body, BODIES)
    return body if options is None else with_members(body, salt_members(salt, options))


SPEC = EngineSpec(
    title="vLLM",
    signatures=[("/version", lambda reply: isinstance(reply.get("version"), str))],
    checks=VllmChecks,
    driver=lambda rng: VllmEngine(),
    tried="0.32",
    no_connector="runs without NixlConnector: start it with --kv-transfer-config",
    single_body=single_body,
)
