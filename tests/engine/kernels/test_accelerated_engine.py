"""
Whole engines with accelerators' kernels, on the device here or by Triton's interpreter.

Their tokens are those of transformers. They do not depend on the batch, on chunks, retractions, cached
prefixes or workers that computed a part, with weights and keys in full and in few bits.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import transformers

from baton_api.sampling import SamplingParams
from baton_engine.kv.cache import BLOCK_SIZE
from baton_engine.model.decoder import Decoder
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.requests import Output, Request
from tests.decode.pair import Side, tokens
from tests.decode.real_model import real_side
from tests.decode.test_pair_equals_one import (
    GREEDY,
    PENALISED,
    SAMPLED,
    TRANSPORTS,
    WAYS,
    WITHOUT_NIXL,
    Race,
    choices,
    open_race,
    prefill_processes,
    text,
)
from tests.engine.gguf_files import write_gguf
from tests.engine.greedy import by_transformers
from tests.engine.kernels.cases import DEVICE
from tests.engine.models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # of numpy
    pytest.mark.usefixtures("interpreted"),
]

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "few bits": {"quantize": "keep", "kv_cache": "fp8"},
    "latents": {},
}
"""Options of `real_side`: full precision, kept weights in Q8_0 and keys in float8, or latent attention."""

TOLERANCE = {"float32": 1e-4, "few bits": 0.05, "latents": 1e-4}
"""
Of logprobs. Products of fp32 are rounded otherwise for another number of rows, and a key between two float8
numbers then becomes the other one.
"""

each_kind = pytest.mark.parametrize(
    "kind",
    ["float32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("few bits", "latents"))],
)

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 64}
"""As few programs as possible: the interpreter takes a millisecond for each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


@pytest.fixture(scope="module")
def paths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    quantized = write_gguf(folder, tmp_path_factory.mktemp("gguf") / "model.gguf", quantised=True)
    sizes = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    latents = make_model(tmp_path_factory.mktemp("latents"), "deepseek-v3", **sizes)
    return {"float32": folder, "few bits": quantized, "latents": latents}


def worker(kind: str) -> Any:
    """Return `real_side` for workers of `kind`, which have the kernels."""

    def create(name: str, path: Path, chunk_tokens: int, **how: Any) -> Side:
        side = real_side(name, path, chunk_tokens, device=DEVICE, **KINDS[kind], **how)
        assert isinstance(side.model, Decoder)
        assert isinstance(side.model.ops, AcceleratorOps)
        return side

    return create


async def answers(side: Side, requests: list[Request], together: bool) -> list[list[Any]]:
    """Return the tokens of each request with their logprobs, and end the engine."""
    await side.open()
    if together:
        outputs = await asyncio.gather(*(side.generate(request) for request in requests))
    else:
        outputs = [await side.generate(request) for request in requests]
    await side.close()
    return [choices(each) for each in outputs]


def assert_near(results: list[list[Any]], expected: list[list[Any]], tolerance: float) -> None:
    """Assert equal tokens, and logprobs within `tolerance`."""
    for result, other in zip(results, expected, strict=True):
        assert [choice.token for choice in result] == [choice.token for choice in other]
        logprobs = [choice.logprob for choice in other]
        assert [choice.logprob for choice in result] == pytest.approx(logprobs, abs=tolerance)


def request_of(name: str, prompt: list[int], **sampling: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"logprobs": 2, **sampling}))


# --- Oracle ---


@pytest.mark.parametrize(
    ("kind", "length", "count"),
    [
        pytest.param("float32", 19, 4, id="short"),
        pytest.param("float32", 37, 64, id="long", marks=pytest.mark.slow),
        pytest.param("latents", 37, 24, id="latents", marks=pytest.mark.slow),
    ],
)
async def test_accelerated_engine_gives_the_tokens_of_transformers(
    paths: dict[str, Path], kind: str, length: int, count: int
) -> None:
    prompt = text(1, length)
    request = request_of("a", prompt, **GREEDY, max_tokens=count)
    (result,) = await answers(worker(kind)("one", paths[kind], BLOCK_SIZE), [request], together=False)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(paths[kind])
    expected = by_transformers(oracle, prompt, [choice.token for choice in result])
    assert len(result) == count
    assert [choice.token for choice in result] == expected.tokens
    assert [choice.logprob for choice in result] == pytest.approx(expected.logprobs, abs=2e-4)


# --- Batch invariance and resumption ---


def requests(count: int) -> list[Request]:
    """Each way of sampling, with prompts of one block and answers of `count` tokens."""
    return [
        request_of(f"{number}", text(number, 12 + number), **way, max_tokens=count)
        for number, way in enumerate(WAYS.values())
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count", "blocks"), [("float32", 22, 7), ("few bits", 6, 32), ("latents", 6, 32)]
)
async def test_accelerated_answers_do_not_depend_on_the_batch(
    paths: dict[str, Path], kind: str, count: int, blocks: int
) -> None:
    """Together they are computed in chunks of one block. 6 blocks are too few for all, so some wait."""
    create = worker(kind)
    separate = await answers(create("separate", paths[kind], 4 * BLOCK_SIZE), requests(count), together=False)
    shared = create("shared", paths[kind], BLOCK_SIZE, blocks=blocks)
    together = await answers(shared, requests(count), together=True)
    assert (shared.now.totals.retractions > 0) == (blocks == 7)
    assert_near(together, separate, TOLERANCE[kind])


@each_kind
async def test_accelerated_answer_is_resumed_after_any_token(paths: dict[str, Path], kind: str) -> None:
    """In the worker that has the prefix in its cache, and in one that computes all of it as a prompt."""
    prompt, count = text(5, BLOCK_SIZE + 1), 4
    one, other = (worker(kind)(name, paths[kind], 4 * BLOCK_SIZE) for name in ("one", "other"))
    await one.open()
    await other.open()
    whole = await one.generate(request_of("whole", prompt, **PENALISED, max_tokens=count))
    for side, after, cached in ((one, 1, BLOCK_SIZE), (other, 3, 0)):
        given = [*prompt, *tokens(whole)[:after]]
        sampling = {**PENALISED, "drawn": after, "max_tokens": count - after}
        rest = await side.generate(request_of("rest", given, **sampling))
        assert rest[0].cached_tokens == cached
        assert_near([choices(rest)], [choices(whole)[after:]], TOLERANCE[kind])
    await one.close()
    await other.close()


# --- Pair ---


async def equal(race: Race, length: int, **sampling: Any) -> list[Output]:
    return await race.equal(text(length, length), **sampling, max_tokens=4, logprobs=2)


@each_kind
async def test_accelerated_pair_equals_one_worker(paths: dict[str, Path], kind: str) -> None:
    async with open_race(paths[kind], worker=worker(kind)) as race:
        race.tolerance = TOLERANCE[kind]
        await equal(race, 17, **SAMPLED)


@pytest.mark.slow
@each_kind
async def test_accelerated_pair_equals_one_for_lengths(paths: dict[str, Path], kind: str) -> None:
    """Also with a prefix that the decode worker has, and where prompts share batches on both sides."""
    async with open_race(paths[kind], worker=worker(kind)) as race:
        race.tolerance = TOLERANCE[kind]
        await asyncio.gather(
            *(equal(race, length, **way) for length, way in zip((1, 16, 50), WAYS.values(), strict=True))
        )
        prompt = text(3, 41)
        await race.warm(prompt[:32], race.decode)
        relay = (await race.equal(prompt, **SAMPLED, max_tokens=4))[0].relay
        assert relay is not None
        assert (relay.local_tokens, relay.blocks) == (32, 1)
        assert race.prefills.outcomes == {"whole": 4}


@pytest.mark.slow
@pytest.mark.nixl
@WITHOUT_NIXL
async def test_accelerated_pair_over_nixl_equals_one_worker(folder: Path) -> None:
    """The prefill worker is a process of its own."""
    route = "nixl over shared memory"
    with prefill_processes(folder, DEVICE) as started:
        address, _, ops = started(route).partition(" ")
        assert ops == AcceleratorOps.__name__
        async with open_race(folder, route, address, worker("float32")) as race:
            await equal(race, 17, **SAMPLED)
            await equal(race, 40, **PENALISED)
            assert race.prefills.outcomes == {"whole": 2}
            if DEVICE.type == "cpu":
                assert race.transports == [TRANSPORTS[route]] * 2
