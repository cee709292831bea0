"""Draft heads on several ranks: they draft what one rank drafts, in a worker and in a pair of workers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch
from baton_engine.client import AsyncEngine
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.counters import Totals
from baton_engine.model.checkpoint import Checkpoint
from baton_engine.model.group import Group
from baton_engine.model.head_loading import load_eagle3
from baton_engine.model.shards import Shard, check_head_degree
from baton_engine.parallel.parallel_head import ParallelHead
from baton_engine.parallel.ranks import ParallelModel
from baton_engine.requests import RemotePrefill, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.spec import HeadSpec
from baton_engine.worker import Worker, open_worker
from tests.engine.draft_heads import (
    CountingDecoder,
    Folders,
    decoder_of,
    make_eagle3,
    make_heads,
    make_mtp,
    spec_of,
)
from tests.engine.greedy import CPU
from tests.engine.models import make_model
from tests.engine.random_weights import tiny_spec
from tests.engine.rank_pairs import open_pair
from tests.engine.rank_threads import RankDevice, rank_threads
from tests.engine.test_draft_heads import mixed, request_of, text

LIMITS = EngineLimits(max_model_len=512, chunk_tokens=32, max_running=8, speculation_tokens=3)
BLOCKS = 60
GLM = "glm4 with experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A worker sets what belongs to its whole process; tests give it back."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


# --- Drafts ---


class RecordedHead:
    """Passes of a head, with their logits."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.logits: list[Tensor] = []

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        logits: Tensor = self._head.forward(batch, cache)
        self.logits.append(logits.clone())
        return logits


class Ranks:
    """An engine on several ranks, or on one, that always drafts as much as possible."""

    def __init__(self, folders: tuple[Path, Path | None], ranks: int) -> None:
        def part(shard: Shard, group: Group) -> CountingDecoder:
            return decoder_of(*folders, group=group)

        spec = spec_of(*folders)
        self.cache = KVCache(Shard(0, ranks).spec(spec) if ranks > 1 else spec, BLOCKS, torch.float32, CPU)
        self.closing = contextlib.ExitStack()
        model: CountingDecoder | ParallelModel
        if ranks == 1:
            model = counted = decoder_of(*folders)
            head = counted.drafts
        else:
            self.cache.ranks = ranks
            model = rank_threads([RankDevice() for _ in range(ranks)], part, spec, self.cache, context=512)
            self.closing.callback(model.ranks.close)
            counted = model.part  # type: ignore[assignment]
            head = ParallelHead(counted.drafts, model.ranks)  # type: ignore[arg-type, assignment]
        assert head is not None
        head.reserve(LIMITS.results)
        self.passes = RecordedHead(head)
        clock = lambda: float(counted.passes)  # noqa: E731
        self.client = AsyncEngine(model, self.cache, LIMITS, clock=clock, head=(head, self.passes))
        self.client.start()

    async def run(self, requests: list[Request]) -> tuple[list[list[int]], Totals]:
        """Return the tokens of each request, one after the other, and the counters."""
        with self.closing:
            answers = [
                [choice.token async for output in self.client.generate(request) for choice in output.tokens]
                for request in requests
            ]
            totals = self.client.snapshot().totals
            await self.client.close()
        return answers, totals

    def states(self) -> dict[bytes, Tensor]:
        """Return the states of all cached blocks by their hashes."""
        assert self.cache.head is not None
        blocks, _ = self.client.engine._pool.published()
        return {name: self.cache.head.states[block] for name, block in blocks.items()}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("mtp of glm", 2, marks=pytest.mark.slow),
        pytest.param("mtp", 2, marks=pytest.mark.slow),
        pytest.param("mtp of glm", 4, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
        pytest.param("eagle3", 4, marks=pytest.mark.slow),
        pytest.param("eagle3 with norms of its inputs", 2, marks=pytest.mark.slow),
    ],
)
async def test_ranks_draft_what_one_rank_drafts(kind: str, ranks: int, folders: Folders) -> None:
    """
    Rejected drafts, hits of the prefix cache, and chunks of prompts. With 4 ranks, two have each key head.

    A rank with a wrong state would make another draft from then on.
    """
    one, several = Ranks(folders[kind], 1), Ranks(folders[kind], ranks)
    expected, of_one = await one.run(mixed())
    answers, totals = await several.run(mixed())
    assert answers == expected
    assert (totals.draft_tokens, totals.accepted_tokens) == (of_one.draft_tokens, of_one.accepted_tokens)
    assert totals.draft_tokens > totals.accepted_tokens
    assert totals.prompt_tokens_cached > 0
    assert len(several.passes.logits) == len(one.passes.logits) > 30
    for ours, theirs in zip(several.passes.logits, one.passes.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    states, parts = one.states(), several.states()
    assert states.keys() == parts.keys()
    for name, part in parts.items():
        torch.testing.assert_close(part, states[name][: len(part)], rtol=1e-3, atol=1e-3)
        assert len(part) == len(states[name]) // (1 if kind == "mtp" else 2)  # latents are not divided


# --- Worker ---


def settings(model: Path, ranks: int, **given: Any) -> WorkerSettings:
    every = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory": "2MiB"}
    return WorkerSettings.model_validate(
        {"model": str(model), "tensor_parallel_size": ranks, **every, **given}
    )


def right_head(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model and the settings of its head, whose drafts are all accepted if its states are right."""
    if kind != "eagle3":
        variant = GLM if kind == "mtp of glm" else "deepseek-v3"
        return make_mtp(folder / "model", variant, right=True), {"speculation": "mtp"}
    model = make_model(folder / "model", num_hidden_layers=8)
    head = make_eagle3(folder / "head", model, right=True)
    return model, {"speculation": "eagle3", "draft_model": str(head), "speculation_tokens": 1}


def drafted(number: int, remote: RemotePrefill | None = None) -> Request:
    request = request_of(f"r{number}", text(20 + 13 * number, number), max_tokens=24)
    return Request(request.id, request.prompt, request.sampling, remote=remote)


async def answer(worker: Worker, number: int) -> list[int]:
    outputs = [output async for output in worker.client.generate(drafted(number))]
    return [choice.token for output in outputs for choice in output.tokens]


async def expected_of(model: Path) -> list[list[int]]:
    """Return the answers of one rank without drafts."""
    async with open_worker(settings(model, 1, speculation="off")) as worker:
        return [await answer(worker, number) for number in range(3)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("mtp of glm", 2),
        pytest.param("mtp", 2, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
        pytest.param("mtp of glm", 4, marks=pytest.mark.slow),
        pytest.param("eagle3", 4, marks=pytest.mark.slow),
    ],
)
async def test_worker_with_ranks_accepts_the_drafts_of_its_head(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    model, given = right_head(kind, tmp_path)
    expected = await expected_of(model)
    async with open_worker(settings(model, 1, **given)) as worker:
        compatibility = worker.compatibility
    async with open_worker(settings(model, ranks, chunk_tokens=16, **given)) as worker:
        assert worker.compatibility == compatibility
        assert [await answer(worker, number) for number in range(3)] == expected
        totals = worker.client.snapshot().totals
    assert totals.draft_tokens == totals.accepted_tokens > 10


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        ({"kv_heads": 2, "heads": 6}, 4, "(eagle3): it has 6 query heads, 2 key heads"),
        ({"hidden": 36}, 2, "states of the draft head (eagle3): they have 36 values"),
    ],
    ids=["heads", "states"],
)
def test_degree_that_does_not_divide_a_head_is_refused(head: dict[str, int], size: int, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        check_head_degree(HeadSpec(kind="eagle3", layer=tiny_spec(**head)), tiny_spec(), size)
    assert message in caught.value.message


def test_rank_has_memory_for_its_part_of_a_head_only(tmp_path: Path) -> None:
    """Tensors are converted, as on the way to a device: views of whole ones would keep their memory."""
    model = make_model(tmp_path / "model", num_hidden_layers=8)
    own, spec = Checkpoint(make_eagle3(tmp_path / "head", model), "head"), spec_of(model, tmp_path / "head")
    assert spec.draft_head is not None
    weights = load_eagle3(own, spec.draft_head, spec, torch.bfloat16, CPU, Shard(1, 2))
    for name, tensor in weights.named():
        assert isinstance(tensor, Tensor)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


async def test_prefill_worker_refuses_a_head_that_is_not_divided_alike(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=8, num_key_value_heads=4)
    head = {"speculation": "eagle3", "draft_model": str(make_eagle3(tmp_path / "head", model))}
    message = r"--role prefill with the draft head \(eagle3\): it has 2 key heads and the model 4, which"
    with pytest.raises(SetupError, match=message):
        async with open_worker(settings(model, 4, role="prefill", transfer="nixl", **head)):
            pass


# --- Pair ---


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("eagle3", (2, 2)),
        ("eagle3", (2, 1)),
        ("eagle3", (1, 2)),
        ("mtp of glm", (2, 2)),
        ("mtp", (2, 1)),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{given[0]} to {given[1]}",
)
async def test_pair_accepts_drafts_as_one_worker(kind: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    """The first draft after a transfer comes from the state of the prompt's last block."""
    model, given = right_head(kind, tmp_path)
    expected = await expected_of(model)
    async with open_pair(settings, model, ranks, chunk_tokens=16, **given) as pair:
        answers = [await pair.answer(drafted(number, pair.remote(f"r{number}"))) for number in range(3)]
        totals = pair.worker.client.snapshot().totals
    assert answers == expected
    assert totals.draft_tokens == totals.accepted_tokens > 10
