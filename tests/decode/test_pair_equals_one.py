"""
A prefill and a decode worker give what one worker gives: the same tokens, logprobs, ends and usage.

A real decoder with random weights in fp32. The prefill worker computes in chunks of one block, the single
worker in chunks of four, so that neither the way of the blocks nor the cuts may matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_api.sampling import SamplingParams
from baton_decode.prefill_workers import PrefillWorkers
from baton_engine.model.native_decoder import NativeDecoder
from baton_engine.requests import FinishReason, Output, Request
from baton_engine.transfer.kinds import create_transfer
from tests.decode.pair import TIMEOUT_S, Side, ask, eventually, lend, open_pair, slow_clock, tokens
from tests.decode.real_model import CPU, real_side
from tests.engine.models import VOCAB, make_model

BLOCK = 16

_numbers = itertools.count()

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 1234}
PENALISED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 2**63 + 5,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": ((7, 2.0), (9, -100.0)),
}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


PROCESSES = [pytest.mark.slow, pytest.mark.nixl]
WITHOUT_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
TRANSPORTS = {
    "loopback": "loopback",
    "nixl over shared memory": "nixl/ucx shm",
    "nixl over TCP": "nixl/ucx tcp",
}
UCX_TLS = {"nixl over shared memory": "all", "nixl over TCP": "tcp"}
"""Of all that there is on one machine, UCX takes shared memory."""
LOOPBACK = "loopback"

ROUTES = [LOOPBACK, *(pytest.param(route, marks=[*PROCESSES, WITHOUT_NIXL]) for route in UCX_TLS)]

each_route = pytest.mark.parametrize("route", ROUTES)

RUNS = [
    *(pytest.param(LOOPBACK, way, id=f"loopback, {way}") for way in WAYS),
    *(
        pytest.param(route, way, id=f"{route}, {way}", marks=[*PROCESSES, WITHOUT_NIXL])
        for route in UCX_TLS
        for way in WAYS
    ),
]
"""Every way of drawing over loopback and over each of NIXL's transports."""

each_run = pytest.mark.parametrize("route, way", RUNS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@dataclass
class Race:
    """The pair, and the one worker that it is compared with."""

    route: str
    decode: Side
    prefills: PrefillWorkers
    address: str
    one: Side
    prefill: Side | None = None
    """If it is in this process."""
    transports: list[str] = field(default_factory=list)
    """The transport of each prompt's blocks."""
    tolerance: float = 1e-4
    """Of logprobs."""

    def request(self, prompt: list[int], **sampling: Any) -> Request:
        name = f"q{next(_numbers)}"
        remote = self.prefills.remote(self.address, "", name)
        return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 12, **sampling}), remote=remote)

    async def equal(self, prompt: list[int], **sampling: Any) -> list[Output]:
        """Give the prompt to both, compare all that a client can see, and return the pair's outputs."""
        request = self.request(prompt, **sampling)
        local = Request(request.id, request.prompt, request.sampling)
        ours, expected = await asyncio.gather(self.decode.generate(request), self.one.generate(local))
        assert tokens(ours) == tokens(expected)
        assert (ours[-1].finish, ours[-1].stop_id) == (expected[-1].finish, expected[-1].stop_id)
        for mine, theirs in zip(choices(ours), choices(expected), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=self.tolerance)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=self.tolerance)
        relay = ours[0].relay
        assert relay is not None, "the prompt did not come from the prefill worker"
        self.transports.append(relay.transport)
        return ours

    async def warm(self, prompt: list[int], *workers: Side | None) -> None:
        """Have the whole blocks of `prompt` in these workers' prefix caches."""
        for worker in workers:
            assert worker is not None
            request = Request(f"warm{next(_numbers)}", tuple(prompt), SamplingParams(max_tokens=1))
            await worker.generate(request)


@pytest.fixture(scope="module")
def prefill_at(folder: Path) -> Iterator[Callable[[str], str]]:
    """The address of a prefill worker in a process of its own, one for each route over NIXL."""
    with prefill_processes(folder) as started:
        yield lambda route: started(route).partition(" ")[0]


@contextlib.contextmanager
def prefill_processes(folder: Path, device: torch.device = CPU) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns the line of the process of a route, and starts it first if necessary."""
    running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def line(route: str) -> str:
        if route == LOOPBACK:
            return ""
        if route not in running:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.decode.worker_process", str(folder), str(BLOCK), str(device)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "UCX_TLS": UCX_TLS[route]},
                text=True,
            )
            assert process.stdout is not None
            running[route] = (process, process.stdout.readline().strip())
        return running[route][1]

    try:
        yield line
    finally:
        for process, _ in running.values():
            process.communicate(timeout=TIMEOUT_S)  # its standard input ends, and so does it
    assert all(process.returncode == 0 for process, _ in running.values())


@contextlib.asynccontextmanager
async def open_race(
    folder: Path,
    route: str = LOOPBACK,
    prefill: str = "",
    worker: Callable[..., Side] = real_side,
    **how: Any,
) -> AsyncIterator[Race]:
    """`prefill` is the address of a worker of another process. `how` is for the decode worker."""
    one, decode = worker("one", folder, 4 * BLOCK), worker("decode", folder, 4 * BLOCK, **how)
    await one.open()
    try:
        if prefill:
            async with open_nixl(decode, UCX_TLS[route]) as prefills:
                yield Race(route, decode, prefills, prefill, one)
        else:
            computing = worker("prefill", folder, BLOCK, clock=slow_clock())
            async with open_pair(computing, decode, peers=True) as pair:
                yield Race(route, decode, pair.prefills, pair.server.address, one, pair.prefill)
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def open_nixl(decode: Side, ucx_tls: str) -> AsyncIterator[PrefillWorkers]:
    """A decode worker whose NIXL is limited to some of UCX's transports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", ucx_tls)
        decode.transfer = await create_transfer("nixl", decode.cache, decode.name)
    await decode.open()
    lender = lend(decode)
    await lender.start()
    prefills = ask(decode, source=lender.address)
    try:
        yield prefills
        await eventually(lambda: decode.now.owned_blocks + decode.now.quarantined_blocks == 0)
    finally:
        await prefills.close()
        await lender.close()
        await decode.close()


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_pair_with_speculation_equals_one(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    All passes take as long by this clock, so drafts look free.

    The native kernels give all bits of one. torch's round a row of several tokens otherwise.
    """
    if kernels == "torch":
        monkeypatch.setenv("BATON_KERNELS", "off")
    drafting: dict[str, Any] = {"speculation_tokens": 8, "clock": itertools.count().__next__}
    async with open_race(folder, **drafting) as race:
        if kernels == "native" and not isinstance(race.decode.model, NativeDecoder):
            pytest.skip("the native kernels are unavailable: no C compiler is installed")
        for number, way in enumerate(WAYS.values()):
            prompt = [(3 + number + place * 7) % VOCAB for place in range(40)]
            request = race.request(prompt, max_tokens=40, logprobs=2, **way)
            local = Request(request.id, request.prompt, request.sampling)
            expected = await race.one.generate(local)
            answer = tokens(expected)
            predicted = replace(request, prediction=(*answer[:15], 3, *answer[15:]))
            ours = await race.decode.generate(predicted)
            if kernels == "native":
                assert choices(ours) == choices(expected)
            assert tokens(ours) == answer
            logprobs = [choice.logprob for choice in choices(expected)]
            assert [choice.logprob for choice in choices(ours)] == pytest.approx(logprobs, abs=race.tolerance)
            assert ours[-1].finish is expected[-1].finish
        totals = race.decode.now.totals
        assert totals.draft_tokens > totals.accepted_tokens > 20
        assert race.one.now.totals.drafts == 0


def choices(outputs: list[Output]) -> list[Any]:
    return [choice for output in outputs for choice in output.tokens]


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB - 20), k=length)


LENGTHS = (1, 15, 16, 17, 47, 48, 49, 100, 145)


@each_run
async def test_pair_equals_one_for_every_prompt_length(
    folder: Path, prefill_at: Callable[[str], str], route: str, way: str
) -> None:
    async with open_race(folder, route, prefill_at(route)) as race:
        for length in LENGTHS:
            # A worker of a route has served the other ways before, whose prompts it holds.
            prompt = text(10_000 * list(WAYS).index(way) + length, length)
            outputs = await race.equal(prompt, **WAYS[way])
            assert outputs[0].cached_tokens == 0
        assert race.prefills.outcomes == {"whole": len(LENGTHS)}
        assert race.transports[-1] == TRANSPORTS[route]
        assert race.decode.now.totals.prompt_tokens_computed == 0


async def test_pair_with_halved_last_chunk_equals_one(folder: Path) -> None:
    """Each piece is announced, and read, by itself."""
    one = real_side("one", folder, 4 * BLOCK)
    halving = real_side("prefill", folder, 80, last_chunk_tokens=BLOCK)
    await one.open()
    try:
        async with open_pair(halving, real_side("decode", folder, 4 * BLOCK)) as pair:
            race = Race(LOOPBACK, pair.decode, pair.prefills, pair.server.address, one)
            for number, way in enumerate(WAYS.values()):
                pair.decode.faulty.requested.clear()
                relay = (await race.equal(text(20_000 + number, 140), **way, logprobs=2))[0].relay
                assert relay is not None and relay.computed_tokens == 140
                reads = [len(request.remote) for request in pair.decode.faulty.requested]
                assert reads == [5, 1, 1, 2], "80 tokens, then 60 as 16, 16 and 28"
    finally:
        await one.close()


FAMILIES = (
    "gemma2", "gemma3", "phi4 mini", "granite", "olmo2", "glm4", "smollm3", "mixtral",
    "gpt-oss", "deepseek-v3", "llama 4",
)  # fmt: skip
"""With the layer options that the other tests' model lacks."""


@pytest.mark.parametrize("variant", FAMILIES)
async def test_pair_of_each_family_equals_one(tmp_path: Path, variant: str) -> None:
    async with open_race(make_model(tmp_path, variant)) as race:
        for length in (1, 17, 60):
            for way in (GREEDY, SAMPLED):
                await race.equal(text(length, length), **way)


async def test_pair_of_quantized_experts_equals_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mixtral", intermediate_size=64)
    async with open_race(folder, worker=partial(real_side, quantize="q8_0")) as race:
        if not isinstance(race.decode.model, NativeDecoder):
            pytest.skip("the native kernels are unavailable: no C compiler is installed")
        for length in (1, 17, 60):
            for way in WAYS.values():
                await race.equal(text(length, length), **way)


@each_run
@pytest.mark.parametrize("length", [80, 81, 95])
async def test_pair_equals_one_for_every_cached_prefix_length(
    folder: Path, prefill_at: Callable[[str], str], route: str, way: str, length: int
) -> None:
    """Peers' defects 2, 7 and 28: hits of none to all blocks, each mapped by its position."""
    async with open_race(folder, route, prefill_at(route)) as race:
        for held in range(length // BLOCK + 1):
            prompt = text(1000 * length + held, length)
            if held:
                await race.warm(prompt[: held * BLOCK], race.decode)
            relay = (await race.equal(prompt, **WAYS[way]))[0].relay
            assert relay is not None
            usable = min(held, (length - 1) // BLOCK)
            assert relay.local_tokens == usable * BLOCK
            assert relay.blocks == -(-length // BLOCK) - usable


@each_route
async def test_pair_second_turn_is_read_and_equals_one(
    folder: Path, prefill_at: Callable[[str], str], route: str
) -> None:
    """The prefill worker reads the blocks of the answer from the decode worker, which generated them."""
    async with open_race(folder, route, prefill_at(route)) as race:
        prompt = text(9000, 50)
        for turn in range(1, 4):
            first = await race.equal(prompt, **SAMPLED, max_tokens=60)
            assert (first[0].cached_tokens > 0) is (turn > 1)
            # Of the answer and the question before it: the prefill worker has all before.
            assert (first[0].peer_tokens > 0) is (turn > 1)
            prompt = [*prompt, *tokens(first), *text(turn, 20)]
            assert first[0].peer_tokens <= 64


async def test_usage_is_the_same_where_both_hold_the_same_prefix(folder: Path) -> None:
    """Peers' defect 29: cached tokens are counted once, on whichever worker they are."""
    async with open_race(folder) as race:
        for held in range(6):
            prompt = text(7000 + held, 90)
            if held:
                await race.warm(prompt[: held * BLOCK], race.decode, race.prefill, race.one)
            request = race.request(prompt)
            ours = await race.decode.generate(request)
            expected = await race.one.generate(Request(request.id, request.prompt, request.sampling))
            assert ours[0].cached_tokens == expected[0].cached_tokens == held * BLOCK
            assert len(tokens(ours)) == len(tokens(expected)) == 12


async def test_pair_prefix_cached_only_on_prefill_counts_as_cached(folder: Path) -> None:
    async with open_race(folder) as race:
        prompt = text(1, 90)
        await race.warm(prompt[:48], race.prefill)
        relay = (outputs := await race.equal(prompt))[0].relay
        assert relay is not None
        assert (outputs[0].cached_tokens, relay.computed_tokens, relay.blocks) == (48, 42, 6)


@each_run
async def test_max_tokens_of_one_and_two(
    folder: Path, prefill_at: Callable[[str], str], route: str, way: str
) -> None:
    """Peers' defect 30: one token asked for is one token given."""
    async with open_race(folder, route, prefill_at(route)) as race:
        for count in (1, 2):
            outputs = await race.equal(text(count, 33), **{**WAYS[way], "max_tokens": count})
            assert len(tokens(outputs)) == count
            assert outputs[-1].finish is FinishReason.LENGTH


@each_run
async def test_pair_stop_on_the_first_token_ends_the_request(
    folder: Path, prefill_at: Callable[[str], str], route: str, way: str
) -> None:
    """Peers' defect 30: the prefill worker's token is under the stop rules like any other."""
    async with open_race(folder, route, prefill_at(route)) as race:
        prompt = text(11, 40)
        first = tokens(await race.equal(prompt, **WAYS[way]))[0]
        outputs = await race.equal(prompt, **WAYS[way], stop_ids=frozenset({first}))
        assert tokens(outputs) == [first]
        assert (outputs[-1].finish, outputs[-1].stop_id) == (FinishReason.STOP, first)


@each_run
async def test_min_tokens_keeps_the_stop_from_the_first_token(
    folder: Path, prefill_at: Callable[[str], str], route: str, way: str
) -> None:
    async with open_race(folder, route, prefill_at(route)) as race:
        prompt = text(12, 40)
        first = tokens(await race.equal(prompt, **WAYS[way]))[0]
        stop = {"stop_ids": frozenset({first}), "min_tokens": 3}
        outputs = await race.equal(prompt, **WAYS[way], **stop)
        assert tokens(outputs)[0] != first


@each_route
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_logprobs(folder: Path, prefill_at: Callable[[str], str], route: str, count: int) -> None:
    async with open_race(folder, route, prefill_at(route)) as race:
        outputs = await race.equal(text(13, 50), **SAMPLED, logprobs=count)
        assert all(choice.logprob is not None and len(choice.top) == count for choice in choices(outputs))


@each_route
async def test_prompts_that_share_batches_on_both_sides(
    folder: Path, prefill_at: Callable[[str], str], route: str
) -> None:
    async with open_race(folder, route, prefill_at(route)) as race:
        ways = list(WAYS.values())
        lengths = [random.Random(n).randint(1, 120) for n in range(18)]
        await asyncio.gather(
            *(race.equal(text(50 + n, length), **ways[n % 3]) for n, length in enumerate(lengths))
        )
        assert race.prefills.outcomes == {"whole": 18}


async def test_pair_broken_transfer_resumes_from_the_good_prefix(
    folder: Path,
) -> None:
    async with open_race(folder) as race:
        race.decode.faulty.flip_bit_next()
        prompt = text(21, 100)
        request = race.request(prompt, **SAMPLED, max_tokens=12)
        ours = await race.decode.generate(request)
        expected = await race.one.generate(Request(request.id, request.prompt, request.sampling))
        assert race.prefills.outcomes == {"checksum": 1}
        assert tokens(ours) == tokens(expected)
