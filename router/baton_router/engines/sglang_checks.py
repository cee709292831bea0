"""
Health checks of SGLang's workers: `/health` and `/server_info` each time.

`/server_info` reports the arguments of the server, among them its disaggregation mode and bootstrap port, and
the states of its schedulers.
"""

from __future__ import annotations

import msgspec

from baton_api.engines import EngineKind
from baton_api.workers import Load, Role
from baton_router.engines.checks import OK, WorkerApi
from baton_router.engines.layout import layout_text
from baton_router.engines.prometheus_text import mean, total

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
