"""Why workers form no pairs: as a table, and as a router shows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from baton_api.workers import EngineKind, Load, Role
from baton_router.engines.checks import layout_text
from baton_router.workers.pairing import PairSide, unknown_version, why_not_paired
from tests.router.engines.fake_engine import FakeEngine
from tests.router.engines.fake_sglang import FakeSglang
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.engines.test_detection import FakeOpenAi
from tests.router.engines.test_vllm import CHAT, PAIRS_ALWAYS
from tests.router.running import RunningRouter, running_router, until

LAYOUT = {"version": "0.32.0", "model": "m", "block size": "16", "KV cache data type": "auto"}
LOAD = Load(
    role=Role.DECODE,
    model="m",
    engine=EngineKind.VLLM,
    version="0.32.0",
    compatibility=layout_text(EngineKind.VLLM, LAYOUT),
)
SGLANG = msgspec.structs.replace(
    LOAD, engine=EngineKind.SGLANG, version="0.5.2", compatibility=layout_text(EngineKind.SGLANG, LAYOUT)
)
OPENAI = Load(role=Role.DECODE, model="m", engine=EngineKind.OPENAI)
BATON = Load(role=Role.DECODE, model="m", compatibility="0123abcd")


def vllm(**changes: str) -> Load:
    """A load whose layout differs."""
    layout = LAYOUT | {name.replace("_", " "): value for name, value in changes.items()}
    return msgspec.structs.replace(LOAD, compatibility=layout_text(EngineKind.VLLM, layout))


def digest(value: str) -> Load:
    return msgspec.structs.replace(BATON, compatibility=value)


WITHOUT_CONNECTOR = msgspec.structs.replace(LOAD, compatibility="")
WITHOUT_MODE = msgspec.structs.replace(SGLANG, compatibility="")

CASES = {
    "equal": (LOAD, LOAD, []),
    "block size": (vllm(block_size="4"), LOAD, ["block size 4", "16"]),
    "data type": (LOAD, vllm(KV_cache_data_type="fp8"), ["KV cache data type auto", "fp8"]),
    "model": (LOAD, vllm(model="n"), ["model m", "n"]),
    "two": (LOAD, vllm(model="n", version="0.31.0"), ["model m", "version 0.32.0", "0.31.0"]),
    "member unknown": (LOAD, vllm(transfer_mode="pull"), ["transfer mode unknown", "pull"]),
    "no connector at prefill": (WITHOUT_CONNECTOR, LOAD, ["prefill worker p:1 runs", "--kv-transfer-config"]),
    "no connector at decode": (LOAD, WITHOUT_CONNECTOR, ["decode worker d:1 runs", "--kv-transfer-config"]),
    "no connector at both": (WITHOUT_CONNECTOR, WITHOUT_CONNECTOR, ["prefill worker p:1 runs"]),
    "no mode": (SGLANG, WITHOUT_MODE, ["decode worker d:1 runs", "--disaggregation-mode"]),
    "engines": (LOAD, SGLANG, ["engine vLLM", "SGLang"]),
    "engine without pairs": (LOAD, OPENAI, ["engine vLLM", "a server of the OpenAI API"]),
    "engines without pairs": (OPENAI, OPENAI, ["neither p:1 nor d:1"]),
    "Baton": (BATON, BATON, []),
    "Baton's digests": (BATON, digest("ffff"), ["KV layout 0123abcd", "ffff"]),
}


@pytest.mark.parametrize(("prefill", "decode", "words"), CASES.values(), ids=CASES)
def test_why_not_paired_names_both_sides(prefill: Load, decode: Load, words: list[str]) -> None:
    reason = why_not_paired(PairSide("p:1", prefill), PairSide("d:1", decode))
    assert bool(reason) is bool(words)
    for word in (*words, *(["p:1", "d:1"] if words else [])):
        assert word in reason, reason


def test_why_not_paired_names_both_revisions() -> None:
    reason = why_not_paired(PairSide("p:1", LOAD, "one"), PairSide("d:1", LOAD))
    assert reason == "revision one at the prefill worker p:1, but none at the decode worker d:1"


@pytest.mark.parametrize(
    ("engine", "version", "supported"),
    [
        (EngineKind.VLLM, "0.32.0", True),
        (EngineKind.VLLM, "0.32.1+cpu", True),
        (EngineKind.VLLM, "0.32", True),
        (EngineKind.VLLM, "0.3.2", False),
        (EngineKind.VLLM, "0.33.0", False),
        (EngineKind.VLLM, "dev", False),
        (EngineKind.SGLANG, "0.5.23", True),
        (EngineKind.SGLANG, "0.6.0", False),
        (EngineKind.BATON, "9", True),
        (EngineKind.VLLM, "", True),
    ],
)
def test_unknown_version_says_which_was_tried(engine: EngineKind, version: str, supported: bool) -> None:
    warning = unknown_version(Load(role=Role.DECODE, model="m", engine=engine, version=version))
    assert (not warning) is supported
    assert supported or (version in warning and "tried: 0." in warning)


async def rows(router: RunningRouter) -> dict[str, list[str]]:
    """The warnings of each worker, as the router lists them."""
    listed = (await router.client.get("/workers")).json()["data"]
    return {row["worker"]: row["warnings"] for row in listed}


ENGINES: dict[str, tuple[Callable[[], FakeEngine], Callable[[], FakeEngine], str]] = {
    "block size": (lambda: FakeVllm(block_size=4), lambda: FakeVllm(block_size=8), "block size 4"),
    "model": (FakeVllm, lambda: FakeVllm(model="other"), "served names tiny"),
    "version": (FakeVllm, lambda: FakeVllm(version="0.32.1"), "version 0.32.0"),
    "no connector": (FakeVllm, lambda: FakeVllm(connector=False), "without NixlConnector"),
    "engine": (FakeVllm, FakeSglang, "engine vLLM"),
    "no pairs": (FakeVllm, FakeOpenAi, "engine vLLM"),
}


@pytest.mark.parametrize(("one", "other", "words"), ENGINES.values(), ids=ENGINES)
async def test_workers_without_a_pair_have_a_warning(
    one: Callable[[], FakeEngine],
    other: Callable[[], FakeEngine],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        one() as prefill,
        other() as decode,
        running_router([decode], [prefill], dashboard=True, health_interval_s=0.2, **PAIRS_ALWAYS) as router,
    ):
        await until(lambda: all(worker.warnings for worker in router.router.workers.all))
        warnings = await rows(router)
        for (warning,) in warnings.values():
            assert words in warning and prefill.name in warning and decode.name in warning
        model = getattr(decode, "model", "tiny")
        assert (await router.post({**CHAT, "model": model})).status_code == 200, "the rest serves on"
        page = (await router.client.get("/dashboard/state")).json()["service"]["workers"]
        assert [row["warnings"] for row in page] == list(warnings.values())
        await checked_again(router)
        logged = [record for record in caplog.records if "no pair" in record.getMessage()]
        assert len(logged) == 2, "one line for each worker, not for each check"


async def checked_again(router: RunningRouter) -> None:
    """Wait until each worker was checked twice more."""
    for _ in range(2):
        before = [worker.health for worker in router.router.workers.all]
        await until(
            lambda: all(
                worker.health is not old
                for worker, old in zip(router.router.workers.all, before, strict=True)  # noqa: B023
            )
        )


async def test_odd_worker_of_a_pool_has_the_only_warning() -> None:
    async with AsyncExitStack() as stack:
        prefill, good = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        odd = await stack.enter_async_context(FakeVllm(block_size=32))
        router = await stack.enter_async_context(
            running_router([good, odd], [prefill], health_interval_s=0.2)
        )
        await until(lambda: any(worker.warnings for worker in router.router.workers.all))
        await checked_again(router)
        warned = {name for name, warnings in (await rows(router)).items() if warnings}
        assert warned == {odd.name}


async def test_warning_ends_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        FakeVllm(block_size=8) as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill], health_interval_s=0.2) as router,
    ):
        await until(lambda: all(worker.warnings for worker in router.router.workers.all))
        prefill.block_size = decode.block_size
        await until(lambda: not any(worker.warnings for worker in router.router.workers.all))
        assert "no longer apply" in caplog.text


async def test_unknown_version_is_a_warning_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeVllm(version="0.99.0") as worker, running_router([worker]) as router:
        await until(lambda: router.router.workers.decode[0].warnings)
        ((warning,),) = (await rows(router)).values()
        assert "0.99.0" in warning and "0.32" in warning
        assert (await router.post(CHAT)).status_code == 200


async def test_prefill_with_another_connector_says_what_it_returned() -> None:
    async with FakeVllm() as prefill, FakeVllm() as decode:
        prefill.foreign_connector = True
        async with running_router([decode], [prefill]) as router:
            (worker,) = router.router.workers.prefill
            assert "not NixlConnector" in worker.reason and "remote_bootstrap_addr" in worker.reason
