"""
Ask workers of other engines for the settings that a pair depends on.

Values that a worker does not report stay unset. One prompt of one token shows whether a vLLM worker has a KV
connector and reports cached tokens; it leaves no full block behind.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton_api.engines import EngineKind

CONNECT_S = 3.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorker:
    """A worker of another engine, as it reports its settings. None means unknown."""

    url: str
    role: str = ""
    """As its router lists it; empty without a router."""
    engine: EngineKind
    version: str | None = None
    connector: bool | None = None
    """Whether it moves KV blocks to or from other workers."""
    side_channel: str = ""
    """`host:port` at which other workers ask for its blocks; empty without one, or if it does not
    report it."""
    side_channel_trouble: str = ""
    """Why this machine cannot connect to it."""
    kv_events: bool | None = None
    prompt_tokens_details: bool | None = None
    """Whether answers report the cached tokens of a prompt."""
    block_size: int | None = None
    """Tokens of a KV block."""


def engine_workers(client: httpx.Client, listed: Sequence[tuple[str, str]]) -> Iterator[EngineWorker]:
    """Yield the workers of other engines among servers, given as URL and role. Others are skipped."""
    for url, role in listed:
        if "epoch" in _get(client, f"{url}/load"):
            continue  # a worker of Baton
        if isinstance(version := _get(client, f"{url}/version").get("version"), str):
            yield _vllm(client, url, role, version)
        elif "disaggregation_mode" in (info := _get(client, f"{url}/server_info")):
            yield _sglang(url, role, info)


def _vllm(client: httpx.Client, url: str, role: str, version: str) -> EngineWorker:
    cache = _cache_config(client, url)
    sources = _get(client, f"{url}/kv_event_sources")
    models = _get(client, f"{url}/v1/models").get("data") or [{}]
    reply = _post(
        client,
        f"{url}/v1/completions",
        {
            "model": models[0].get("id"),
            "prompt": [1],
            "max_tokens": 1,
            "kv_transfer_params": REMOTE_DECODE,
        },
    )
    params = reply.get("kv_transfer_params") or {}
    side_channel = ""
    if params.get("remote_host"):
        side_channel = _address(url, str(params["remote_host"]), params.get("remote_port"))
    block_size = cache.get("block_size", "")
    answered = "usage" in reply
    return EngineWorker(
        url=url,
        role=role,
        engine=EngineKind.VLLM,
        version=version,
        connector=bool(params) if answered else None,
        side_channel=side_channel,
        side_channel_trouble=_trouble(side_channel),
        kv_events=any(source.get("enable_kv_cache_events") for source in sources.values())
        if sources
        else None,
        prompt_tokens_details=reply["usage"].get("prompt_tokens_details") is not None if answered else None,
        block_size=int(block_size) if block_size.isdigit() else None,
    )


def _sglang(url: str, role: str, info: Mapping[str, Any]) -> EngineWorker:
    mode = info["disaggregation_mode"]
    side_channel = ""
    if mode == "prefill":
        side_channel = _address(url, "", info.get("disaggregation_bootstrap_port"))
    events = info.get("kv_events_config")
    return EngineWorker(
        url=url,
        role=role,
        engine=EngineKind.SGLANG,
        version=info.get("version"),
        connector=mode in ("prefill", "decode"),
        side_channel=side_channel,
        side_channel_trouble=_trouble(side_channel),
        kv_events="zmq" in str(events) if "kv_events_config" in info else None,
        prompt_tokens_details=info.get("enable_cache_report"),
        block_size=info.get("page_size"),
    )


def _address(url: str, host: str, port: object) -> str:
    """Return an address that this machine can use: a worker's own host if it reports a local one."""
    if host in EVERY_ADDRESS:
        host = urlsplit(url).hostname or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _trouble(address: str) -> str:
    if not address:
        return ""
    split = urlsplit(f"//{address}")
    try:
        with socket.create_connection((split.hostname or "", split.port or 0), CONNECT_S):
            return ""
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _get(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return a JSON object, or an empty one if there is no such answer."""
    try:
        return _object(client.get(url))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}


def _post(client: httpx.Client, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _object(client.post(url, json=body))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}


def _object(answer: httpx.Response) -> dict[str, Any]:
    value = json.loads(answer.text) if answer.is_success else {}
    return value if isinstance(value, dict) else {}


def _cache_config(client: httpx.Client, url: str) -> Mapping[str, str]:
    """Return the labels of vLLM's metric of that name. Nothing if the worker exposes none."""
    try:
        families = list(text_string_to_metric_families(client.get(f"{url}/metrics").raise_for_status().text))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    samples = (sample for family in families for sample in family.samples)
    return next((sample.labels for sample in samples if sample.name == "vllm:cache_config_info"), {})
