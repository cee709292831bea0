"""Check workers of other engines: can they form pairs, and does the router see their cache?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton_api.engines import EngineKind
from baton_api.workers import Role
from baton_cli.doctor.engine_probes import EngineWorker
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

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
