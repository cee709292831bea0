"""
Workers of other engines: the settings that a pair depends on, and checks of them.

Values that a worker does not report stay unset. One prompt of one token shows whether a vLLM worker has a KV
connector and reports cached tokens; it leaves no full block behind.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from baton_api.workers import TRTLLM_OWNER, EngineKind, Role
from baton_cli.doctor.machine import EngineWorker, Finding, Level, Machine, good, note
from baton_cli.router_workers import samples

CONNECT_S = 3.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1"})


def engine_workers(client: httpx.Client, listed: Sequence[tuple[str, str]]) -> Iterator[EngineWorker]:
    """Yield the workers of other engines among servers, given as URL and role. Others are skipped."""
    for url, role in listed:
        if "epoch" in _get(client, f"{url}/load"):
            continue  # a worker of Baton
        models = _get(client, f"{url}/v1/models").get("data") or [{}]
        if models[0].get("owned_by") == TRTLLM_OWNER:
            continue  # it has no setting that could be read, and serves vLLM's /version
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
    found = samples(client, url)
    return next((sample.labels for sample in found if sample.name == "vllm:cache_config_info"), {})


CHECK = "workers"
TITLES = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}

CONNECTOR = {
    EngineKind.VLLM: """Start it with --kv-transfer-config '{"kv_connector": "NixlConnector", ...}'.""",
    EngineKind.SGLANG: "Start it with --disaggregation-mode prefill or decode.",
}
SIDE_CHANNEL = {
    EngineKind.VLLM: "Set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that other workers reach, and open the "
    "port.",
    EngineKind.SGLANG: "Open its port to the other workers.",
}
EVENTS = {
    EngineKind.VLLM: """Start it with --kv-events-config '{"enable_kv_cache_events": true, ...}'.""",
    EngineKind.SGLANG: """Start it with --kv-events-config '{"publisher": "zmq", ...}'.""",
}
DETAILS = {
    EngineKind.VLLM: "Start it with --enable-prompt-tokens-details.",
    EngineKind.SGLANG: "Start it with --enable-cache-report.",
}


def workers(machine: Machine) -> Iterator[Finding]:
    """Yield findings about each worker, and about each pair."""
    for worker in machine.workers:
        findings = [*_version(worker), *_connector(worker), *_side_channel(worker)]
        findings += [*_events(worker), *_details(worker)]
        yield from findings
        if not findings:
            blocks = "" if worker.block_size is None else f", blocks of {worker.block_size} tokens"
            yield good(CHECK, f"{_name(worker)}: {TITLES[worker.engine]} {worker.version}{blocks}")
    yield from _block_sizes(machine.workers)


def _version(worker: EngineWorker) -> Iterator[Finding]:
    if not worker.version:
        yield note(CHECK, f"{_name(worker)}: version unknown", "The router assumes the newest version.")


def _connector(worker: EngineWorker) -> Iterator[Finding]:
    if worker.connector is None:
        yield note(CHECK, f"{_name(worker)}: KV connector unknown", "It answered no test prompt.")
    elif not worker.connector and worker.role in (Role.PREFILL, Role.DECODE):
        is_prefill = worker.role == Role.PREFILL
        yield Finding(
            CHECK,
            Level.ERROR if is_prefill else Level.WARNING,
            f"{_name(worker)} has no KV connector",
            limit="a KV connector",
            why="The router cannot use it as a prefill worker."
            if is_prefill
            else "It computes all prompts itself.",
            remedy=CONNECTOR[worker.engine],
        )


def _side_channel(worker: EngineWorker) -> Iterator[Finding]:
    if worker.side_channel_trouble:
        yield Finding(
            CHECK,
            Level.WARNING,
            f"the side channel {worker.side_channel} of {_name(worker)}: {worker.side_channel_trouble}",
            limit="a connection",
            why="If other workers cannot connect either, transfers fail.",
            remedy=SIDE_CHANNEL[worker.engine],
        )


def _events(worker: EngineWorker) -> Iterator[Finding]:
    if worker.kv_events is None:
        yield note(CHECK, f"{_name(worker)}: KV events unknown", "It does not report their configuration.")
    elif not worker.kv_events:
        yield Finding(
            CHECK,
            Level.WARNING,
            f"{_name(worker)} publishes no KV events",
            limit="KV events",
            why="The router estimates its cache from the prompts that it sent.",
            remedy=EVENTS[worker.engine],
        )


def _details(worker: EngineWorker) -> Iterator[Finding]:
    if worker.prompt_tokens_details is None:
        yield note(
            CHECK, f"{_name(worker)}: report of cached tokens unknown", "It does not report the setting."
        )
    elif not worker.prompt_tokens_details:
        yield Finding(
            CHECK,
            Level.WARNING,
            f"{_name(worker)} does not report cached tokens",
            limit="prompt_tokens_details in answers",
            why="Clients see no cached tokens, and the router cannot check its expectations.",
            remedy=DETAILS[worker.engine],
        )


def _block_sizes(listed: tuple[EngineWorker, ...]) -> Iterator[Finding]:
    """Yield an error if workers of one engine have different block sizes: they form no pairs."""
    of_engine: dict[EngineKind, dict[int, EngineWorker]] = {}
    for worker in listed:
        if worker.block_size is not None and worker.connector:
            of_engine.setdefault(worker.engine, {}).setdefault(worker.block_size, worker)
    for sizes in of_engine.values():
        if len(sizes) > 1:
            yield Finding(
                CHECK,
                Level.ERROR,
                "different block sizes: " + ", ".join(_sized(sizes)),
                limit="one block size",
                why="Workers with different block sizes form no pairs.",
                remedy="Start all workers with the same --block-size (SGLang: --page-size).",
            )


def _sized(sizes: Mapping[int, EngineWorker]) -> Iterator[str]:
    return (f"{size} tokens on {_name(worker)}" for size, worker in sorted(sizes.items()))


def _name(worker: EngineWorker) -> str:
    return f"{worker.url} ({worker.role})" if worker.role else worker.url
