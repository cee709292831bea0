"""Tensor parallelism with accelerators' kernels: ranks under Triton's interpreter, joined by gloo."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from baton_api.sampling import SamplingParams
from baton_engine.client import AsyncEngine
from baton_engine.graphs import GraphModel, GraphPasses, capture_limits, head_with_graphs, with_graphs
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, create_decoder
from baton_engine.model.group import Group
from baton_engine.model.shards import Shard
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.parallel.parallel_head import ParallelHead
from baton_engine.requests import RemotePrefill, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from tests.decode.pair import tokens
from tests.decode.real_model import real_side
from tests.decode.test_pair_equals_one import GREEDY, SAMPLED, text
from tests.engine.draft_heads import decoder_of, make_eagle3, make_mtp, spec_of
from tests.engine.expert_models import LATENT_BLOCKS
from tests.engine.gguf_files import write_gguf
from tests.engine.greedy import CPU
from tests.engine.kernels.cases import DEVICE
from tests.engine.models import make_model
from tests.engine.rank_pairs import open_pair
from tests.engine.rank_threads import RankDevice, rank_threads
from tests.engine.test_quantized_folder import SCHEMES, quantized_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="these models are on a CPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # of numpy
    pytest.mark.usefixtures("interpreted", "threads"),
]

WAYS: tuple[dict[str, Any], ...] = (GREEDY, SAMPLED)
COUNT = 3
"""Tokens of an answer."""


@pytest.fixture
def threads() -> Iterator[None]:
    """A worker sets the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 heads and 2 key heads, so that 4 ranks share key heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", **sizes)


def request_of(way: int, remote: RemotePrefill | None = None, count: int = COUNT) -> Request:
    prompt = tuple(text(way, BLOCK_SIZE + 3 * way + 1))
    return Request(f"{way}", prompt, SamplingParams(**WAYS[way], max_tokens=count), remote=remote)


@pytest.fixture
async def expected(folder: Path) -> list[list[int]]:
    return await answers_of_one(folder)


async def answers_of_one(folder: Path) -> list[list[int]]:
    """Answers of one rank with the kernels, one after the other."""
    side = real_side("one", folder, 4 * BLOCK_SIZE)
    await side.open()
    answers = [tokens(await side.generate(request_of(way))) for way in range(len(WAYS))]
    await side.close()
    return answers


def settings(folder: Path, ranks: int, **given: Any) -> WorkerSettings:
    every = {"dtype": "float32", "threads": 1, "kv_cache_memory": "1MiB", "chunk_tokens": BLOCK_SIZE}
    return WorkerSettings.model_validate(
        {"model": str(folder), "tensor_parallel_size": ranks, **every, **given}
    )


def file_of(folder: Path) -> Path:
    """The formats of parts differ, and the embedding is quantized. Query and key rows are reordered."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32}
    model = make_model(folder / "model", "llama with tied embeddings", **sizes)
    forms = {"ffn_down": GGMLQuantizationType.Q4_0, "attn_v": GGMLQuantizationType.Q5_1}
    return write_gguf(model, folder / "tiny.gguf", quantised=True, forms=forms)


def float8_of(folder: Path) -> Path:
    config, matrix, _ = SCHEMES["fp8 in blocks"]
    quantized_folder(folder, config, matrix)
    return folder


def latents_of(folder: Path) -> Path:
    """The inputs of o are divided inside a block."""
    config, matrix, _ = SCHEMES["fp8 in blocks"]
    quantized_folder(folder, config, matrix, "deepseek-v3", **LATENT_BLOCKS)
    return folder


def plain_of(folder: Path) -> Path:
    return make_model(folder, "qwen3", hidden_size=32, intermediate_size=64, head_dim=16)


QUANTIZED: dict[str, tuple[Callable[[Path], Path], dict[str, Any], set[str]]] = {
    "gguf": (file_of, {}, {"Q8_0", "Q5_1", "Q4_0", "float32"}),
    "fp8 in blocks": (float8_of, {}, {"FP8", "float32"}),
    "latents in fp8": (latents_of, {}, {"FP8", "float32"}),
    "converted": (plain_of, {"quantize": "q4_0"}, {"Q4_0", "float32"}),
    "a float8 cache": (plain_of, {"kv_cache_dtype": "fp8"}, {"float32"}),
}
"""Models, settings, and the formats of a rank."""


async def tokens_of(worker: Worker, request: Request) -> list[int]:
    return await answer(worker.client, request)


async def answer(client: AsyncEngine, request: Request) -> list[int]:
    return tokens([output async for output in client.generate(request)])


@pytest.mark.parametrize("degree", [2, 4])
async def test_accelerated_ranks_give_the_tokens_of_one(
    folder: Path, expected: list[list[int]], degree: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_worker(settings(folder, degree)) as worker:
        answers = await asyncio.gather(*(tokens_of(worker, request_of(way)) for way in range(len(WAYS))))
    assert list(answers) == expected
    assert "an interpreter runs Triton kernels" in caplog.text


@pytest.mark.parametrize("name", QUANTIZED)
async def test_ranks_with_kept_weights_give_the_tokens_of_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make, given, formats = QUANTIZED[name]
    path = make(tmp_path)
    async with open_worker(settings(path, 1, **given)) as worker:
        expected, compatibility = await tokens_of(worker, request_of(1)), worker.compatibility
    async with open_worker(settings(path, 2, **given)) as worker:
        assert worker.compatibility == compatibility
        assert await tokens_of(worker, request_of(1)) == expected
    (line,) = [message for message in caplog.messages if message.startswith("Weights of rank 0: ")]
    assert set(re.findall(r" in (\w+)", line)) == formats


CAPTURED: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "two ranks": ("qwen3", {"head_dim": 16}, 2, True),
    "four ranks": ("qwen3", {"head_dim": 16}, 4, False),
    "latents": (
        "deepseek-v3",
        {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 2},
        2,
        True,
    ),
    "a norm over all heads": ("minimax m2", {"num_local_experts": 4}, 4, False),
}
"""A variant, what its configuration sets, the degree, and whether passes are launched ahead."""


@pytest.mark.parametrize("name", CAPTURED)
async def test_accelerated_ranks_replay_captured_passes(name: str, tmp_path: Path) -> None:
    """Ranks are threads here, each with a fake of CUDA's graphs."""
    variant, sizes, degree, overlap = CAPTURED[name]
    folder = make_model(tmp_path / "tiny", variant, **{"hidden_size": 32, "intermediate_size": 64, **sizes})
    expected = await answers_of_one(folder)
    checkpoint = Checkpoint(folder, "tiny")
    spec = load_spec(checkpoint)

    def part(shard: Shard, group: Group) -> Decoder:
        weights = load_weights(checkpoint, spec, torch.float32, shard=shard)
        environment = {"TRITON_INTERPRET": "1"}
        return create_decoder(shard.spec(spec), weights, CPU, torch.float32, group, environment)

    # With overlap, rank 0's calls run at once: a late replay would find the input of the next pass.
    devices = [RankDevice(late=rank == 0 and not overlap) for rank in range(degree)]
    own = Shard(0, degree).spec(spec)
    replicas = Shard(0, degree).replicas(spec.kv_heads)
    cache = KVCache(own, 20, torch.float32, CPU, ranks=degree, replicas=replicas)
    limits = EngineLimits(max_model_len=64, chunk_tokens=BLOCK_SIZE, max_running=2, overlap=overlap)
    parallel = rank_threads(devices, part, spec, cache, context=64)
    with contextlib.closing(parallel.ranks):
        captures = capture_limits(settings(folder, degree, graph_rows=2, graph_seconds=3600), parallel)
        model = with_graphs(parallel, cache, limits, captures, devices[0].taken)
        assert isinstance(model, GraphModel) and model.rows == [1, 2]
        client = AsyncEngine(model, cache, limits)
        client.start()
        answers = await asyncio.gather(*(answer(client, request_of(way)) for way in range(len(WAYS))))
        await client.close()
        model.close()
    assert bool(client.engine._pipeline.ahead) is overlap
    assert list(answers) == expected
    replays = [[graph.replays for graph in cuda.captured] for cuda in devices]
    assert replays == [replays[0]] * degree
    assert all(replays[0])


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
async def test_accelerated_ranks_replay_captured_passes_of_a_draft_head(kind: str, tmp_path: Path) -> None:
    """All drafts are accepted, as those of one rank: the ranks have the states of their part of blocks."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32}
    own: Path | None = None
    if kind == "mtp":
        model = make_mtp(tmp_path / "model", "glm4 with experts", right=True)
    else:
        model = make_model(tmp_path / "model", num_hidden_layers=3, **sizes)
        layers: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        own = make_eagle3(tmp_path / "head", model, right=True, **layers)
    spec, request = spec_of(model, own), request_of(0, count=6)
    side = real_side("one", model, 4 * BLOCK_SIZE)
    await side.open()
    expected = tokens(await side.generate(request))
    await side.close()

    def part(_: Shard, group: Group) -> Decoder:
        return decoder_of(model, own, AcceleratorOps, group=group)

    devices = [RankDevice(), RankDevice()]
    cache = KVCache(Shard(0, 2).spec(spec), 20, torch.float32, CPU, ranks=2)
    limits = EngineLimits(max_model_len=64, chunk_tokens=BLOCK_SIZE, max_running=1, speculation_tokens=1)
    parallel = rank_threads(devices, part, spec, cache, context=64)
    with contextlib.closing(parallel.ranks):
        captures = capture_limits(settings(model, 2, graph_rows=2, graph_seconds=3600), parallel)
        assert parallel.part.drafts is not None
        head = ParallelHead(parallel.part.drafts, parallel.ranks)
        head.reserve(limits.results)
        graphs = with_graphs(parallel, cache, limits, captures, devices[0].taken)
        drafting = head_with_graphs(head, cache, limits, captures, devices[0].taken)
        assert isinstance(graphs, GraphModel) and isinstance(drafting, GraphPasses)
        clock = lambda: float(graphs.replays)  # noqa: E731
        client = AsyncEngine(graphs, cache, limits, clock=clock, head=(head, drafting))
        client.start()
        assert await answer(client, request) == expected
        totals = client.snapshot().totals
        await client.close()
        drafting.close()
        graphs.close()
    assert totals.draft_tokens == totals.accepted_tokens > 0
    replays = [[graph.replays for graph in cuda.captured] for cuda in devices]
    assert replays[0] == replays[1]
    assert drafting.replays > 0 and graphs.replays > 0


@pytest.mark.nixl
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["two to one", "one to two"])
async def test_accelerated_pair_of_any_degrees_answers_as_one(
    folder: Path, expected: list[list[int]], ranks: tuple[int, int]
) -> None:
    assert await answers_of_pair(folder, ranks) == expected


@pytest.mark.nixl
async def test_pair_with_kept_weights_and_float8_cache_answers_as_one(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    async with open_worker(settings(path, 1, kv_cache_dtype="fp8")) as worker:
        expected = [await tokens_of(worker, request_of(way)) for way in range(len(WAYS))]
    assert await answers_of_pair(path, (2, 1), kv_cache_dtype="fp8") == expected


async def answers_of_pair(path: Path, ranks: tuple[int, int], **given: Any) -> list[list[int]]:
    async with open_pair(settings, path, ranks, **given) as pair:
        return [await pair.answer(request_of(way, pair.remote(f"{way}"))) for way in range(len(WAYS))]
