"""
Health checks of vLLM's workers: `/health`, `/v1/models` and `/metrics` each time, the rest once per process.

The router asks each worker once whether it can be part of a pair: the worker computes a prompt of one token
for another worker. It returns its side channel if it has a connector.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_api.engines import EngineKind
from baton_api.workers import Load, Role
from baton_router.engines.checks import OK, WorkerApi, label_values, layout_text, mean, total

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
