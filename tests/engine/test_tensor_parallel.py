"""Tensor parallelism: several ranks give the answers of one, and a failed rank ends the worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.errors import SetupError, TransferFailed
from baton_api.sampling import SamplingParams
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, create_decoder
from baton_engine.model.group import Group, RankFailed
from baton_engine.model.progress import SILENT
from baton_engine.model.shards import Shard, check_degree
from baton_engine.ops.plain import CpuOps
from baton_engine.parallel.loading import load_parallel
from baton_engine.parallel.messages import LENGTH_BYTES, Channel, RankError
from baton_engine.parallel.ranks import RankPools
from baton_engine.requests import FinishReason, RemotePrefill, Request
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from tests.engine.models import make_model
from tests.engine.random_weights import tiny_spec
from tests.engine.rank_pairs import open_pair

CPU = torch.device("cpu")
BLOCKS = 20
TIMEOUT_S = 300.0
SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "tie_word_embeddings": True,
}
"""The heads of SmolLM2."""
DIVIDED = (
    "llama",
    "llama with one key head",
    "llama with biases",
    "llama with its own head size",
    "llama with tied embeddings",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "phi4 mini",
    "granite with biases",
    "glm4",
    "mixtral",
    "qwen3 with experts in some layers",
    "llama 4 with dense layers",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-v2 with groups",
    "olmo2",
    "minimax m2",
)
"""Variants whose weights are divided in different ways."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A worker sets what belongs to its whole process; tests give it back."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def settings(model: Path, ranks: int, **given: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "threads": 1,
            "kv_cache_memory": "1MiB",
            "tensor_parallel_size": ranks,
            **given,
        }
    )


# --- Model ---


def rows() -> list[BatchRow]:
    """A prompt of several blocks and one of a few tokens."""
    return [
        BatchRow(list(range(3, 43)), 0, [1, 2, 3], 3),
        BatchRow([5, 6, 7, 300, 319], 0, [4], 1),
    ]


def logits_of(checkpoint: Checkpoint, size: int, store: Path) -> Tensor:
    """Logits of `rows` by `size` ranks, each on a thread of its own; those of rank 0."""
    results: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        model = part_of(checkpoint, Shard(rank, size), store)
        cache = KVCache(model.spec, BLOCKS, torch.float32, CPU)
        results[rank] = model.forward(Batch(rows(), BLOCK_SIZE, CPU), cache)

    on_ranks(size, run)
    return results[0]


def part_of(checkpoint: Checkpoint, shard: Shard, store: Path) -> Decoder:
    """Return the part of one rank, which waits for the others."""
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.float32, shard=shard)
    group = Group(shard, spec.vocab, CPU)
    group.connect(store, TIMEOUT_S)
    return create_decoder(shard.spec(spec), weights, CPU, torch.float32, group)


def on_ranks(size: int, run: Callable[[int], None]) -> None:
    """Call `run` for each rank, on a thread of its own."""
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "variant", [DIVIDED[0], *(pytest.param(variant, marks=pytest.mark.slow) for variant in DIVIDED[1:])]
)
def test_two_ranks_compute_the_logits_of_one(variant: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_model(tmp_path / "model", variant), variant)
    spec = load_spec(checkpoint)
    whole = create_decoder(spec, load_weights(checkpoint, spec, torch.float32), CPU, torch.float32)
    expected = whole.forward(Batch(rows(), BLOCK_SIZE, CPU), KVCache(spec, BLOCKS, torch.float32, CPU))
    logits = logits_of(checkpoint, 2, tmp_path / "store")
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_ranks_read_only_their_part(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny, "tiny")
    spec = load_spec(checkpoint)
    whole = load_weights(checkpoint, spec, torch.float32).bytes
    norms = (2 * spec.layers + 1) * spec.hidden * 4
    parts = [load_weights(checkpoint, spec, torch.float32, shard=Shard(rank, 2)).bytes for rank in (0, 1)]
    assert parts == [(whole + norms) // 2] * 2


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a degree that divides nothing": (
        {"heads": 9, "kv_heads": 3, "intermediate": 96},
        2,
        "--tensor-parallel-size 2 does not divide tiny: it has 9 query heads, 3 key heads and an "
        "intermediate size of 96. Possible degrees: 1, 3.",
    ),
    "key heads": (
        {"heads": 12, "kv_heads": 4, "intermediate": 96},
        6,
        "Possible degrees: 1, 2, 4, 12.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_check_degree_refuses_with_the_possible_ones(name: str) -> None:
    changes, size, message = REFUSED[name]
    with pytest.raises(SetupError) as caught:
        check_degree(tiny_spec(**changes), size, "tiny")
    assert message in caught.value.message


def test_shards_together_hold_everything_once() -> None:
    for count in range(1, 40):
        for size in range(1, count + 1):
            parts = [Shard(rank, size).part(count) for rank in range(size)]
            assert [number for part in parts for number in part] == list(range(count))
    for size in (4, 8):
        held = [Shard(rank, size).kv_heads(4) for rank in range(size)]
        assert [list(part) for part in held] == [[rank * 4 // size] for rank in range(size)]


# --- Worker ---


SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, seed=8, max_tokens=12),
    SamplingParams(temperature=0.0, max_tokens=3),
)


def request_of(name: str, sampling: SamplingParams, remote: RemotePrefill | None = None) -> Request:
    length = 11 + 13 * SAMPLING.index(sampling)
    prompt = tuple(3 + (5 * number) % 300 for number in range(length))
    return Request(name, prompt, sampling, remote=remote)


async def tokens_of(worker: Worker, name: str, sampling: SamplingParams) -> list[int]:
    outputs = worker.client.generate(request_of(name, sampling))
    return [choice.token async for output in outputs for choice in output.tokens]


async def answers(worker: Worker) -> list[list[int]]:
    """Answers to requests of one batch, which must be those of each request alone."""
    together = await asyncio.gather(
        *(tokens_of(worker, f"together-{number}", one) for number, one in enumerate(SAMPLING))
    )
    worker.engine.clear_cache()
    separate = [await tokens_of(worker, f"separate-{number}", one) for number, one in enumerate(SAMPLING)]
    assert list(together) == separate
    return separate


@pytest.mark.parametrize(
    ("degree", "variant", "overrides"),
    [
        pytest.param(2, "llama", {}, id="two"),
        pytest.param(4, "llama", {}, id="more than key heads", marks=pytest.mark.slow),
        pytest.param(3, "llama", SMOLLM2, id="smollm2", marks=pytest.mark.slow),
        pytest.param(2, "deepseek-v3", {}, id="two with latents", marks=pytest.mark.slow),
        pytest.param(4, "deepseek-v2 with groups", {}, id="four with latents", marks=pytest.mark.slow),
        pytest.param(4, "minimax m2", {}, id="four with a norm of all heads", marks=pytest.mark.slow),
    ],
)
async def test_worker_answers_do_not_depend_on_the_degree(
    degree: int, variant: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", variant, **overrides)
    async with open_worker(settings(model, 1)) as worker:
        expected, compatibility = await answers(worker), worker.compatibility
    async with open_worker(settings(model, degree, chunk_tokens=16)) as worker:
        assert await answers(worker) == expected
        assert worker.compatibility == compatibility
        assert len(children()) == degree - 1
    assert not children()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 3}, "Possible degrees: 1, 2, 4."),
        ({"quantize": "q8_0"}, "ranks on a CPU compute with torch operations. Use --quantize off."),
        ({"kv_cache_dtype": "fp8"}, "the kernels of CPUs do not read it"),
        ({"speculation": "draft", "draft_model": "x"}, "does not support --speculation draft"),
        ({"speculation": "mtp"}, r"(LlamaForCausalLM) has none"),
        ({"role": "decode", "transfer": "loopback"}, "does not support --transfer loopback"),
    ],
    ids=[
        "degree",
        "quantize",
        "data type of the KV cache",
        "draft model",
        "draft head that the model does not have",
        "loopback",
    ],
)
async def test_worker_refuses_what_ranks_cannot_compute(
    tiny: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetupError) as caught:
        async with open_worker(settings(tiny, **({"ranks": given.get("tensor_parallel_size", 2)} | given))):
            pass
    assert message in caught.value.message


# --- Pair ---


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        *(("llama", ranks) for ranks in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4))),
        *(("deepseek-v3", ranks) for ranks in ((2, 1), (1, 2), (4, 2), (2, 4))),
        ("deepseek-v2 with groups", (2, 2)),
        ("minimax m2", (2, 4)),
    ],
)
async def test_pair_of_any_degrees_answers_as_one_worker(
    variant: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", variant)
    async with open_worker(settings(model, 1)) as worker:
        expected = [await tokens_of(worker, f"one-{number}", way) for number, way in enumerate(SAMPLING)]
    async with open_pair(settings, model, ranks, chunk_tokens=16) as pair:
        for number, way in enumerate(SAMPLING):
            name = f"pair-{number}"
            assert await pair.answer(request_of(name, way, pair.remote(name))) == expected[number]


def test_rank_0_returns_after_all_ranks_have_stored(tiny: Path, tmp_path: Path) -> None:
    """The blocks of a pass without logits may be announced at once."""
    order: list[str] = []
    returned = threading.Event()

    class Late(CpuOps):
        def rope_and_store(self, *given: Any) -> Tensor:
            returned.wait(0.1)
            result = super().rope_and_store(*given)
            order.append("stored")
            return result

    def run(rank: int) -> None:
        model = part_of(Checkpoint(tiny, "tiny"), Shard(rank, 2), tmp_path / "store")
        if rank == 1:
            model.ops = Late(model.spec, torch.float32)
        cache = KVCache(model.spec, BLOCKS, torch.float32, CPU)
        model.forward(Batch([BatchRow(list(range(3, 19)), 0, [1], 0)], BLOCK_SIZE, CPU), cache)
        if rank == 0:
            order.append("returned")
            returned.set()

    on_ranks(2, run)
    assert order == ["stored"] * load_spec(Checkpoint(tiny, "tiny")).layers + ["returned"]


# --- Failures ---


def children() -> list[int]:
    """The processes of ranks that this process has started."""
    processes = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended since
            processes += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in processes if b"baton_engine.parallel.rank" in _command(pid)]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def test_killed_rank_ends_requests_and_the_worker(tiny: Path) -> None:
    async with open_worker(settings(tiny, 2)) as worker:
        # Without an end-of-sequence token, so that it runs until the rank is killed.
        request = Request("r", (3, 4, 5), SamplingParams(temperature=0.0, max_tokens=500))
        (rank,) = children()
        outputs = worker.client.generate(request)
        assert (await anext(outputs)).tokens
        os.kill(rank, signal.SIGKILL)
        last = [output async for output in outputs][-1]
        assert last.finish is FinishReason.ERROR
        reason = await asyncio.wait_for(asyncio.shield(worker.fatal), TIMEOUT_S)
    assert "rank 1 (process" in reason and "ended with signal 9" in reason


def test_killed_rank_fails_its_orders(tiny: Path) -> None:
    """Also one that it has not read yet, so that no transfer waits for it."""
    checkpoint = Checkpoint(tiny, "tiny")
    with contextlib.ExitStack() as stack:
        given = settings(tiny, 2), "w", checkpoint, load_spec(checkpoint), CPU, torch.float32, SILENT, stack
        model, _, _ = load_parallel(*given)
        model.connect(None, torch.float32, lambda: 0)
        model.open_cache(BLOCKS, torch.float32, CPU)
        pools = RankPools(model.ranks)
        stack.callback(pools.close, 0.0)
        (sums,) = pools.checksums([1, 2])
        assert len(sums.result(TIMEOUT_S)) == 2
        (rank,) = children()
        os.kill(rank, signal.SIGSTOP)
        (late,) = pools.checksums([1])
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(TransferFailed, match="ended with signal 9"):
            late.result(TIMEOUT_S)
        (later,) = pools.pull("peer", [1], [1])
        with pytest.raises(TransferFailed, match="ended with signal 9"):
            later.result(TIMEOUT_S)


def test_stopped_rank_fails_the_pass_within_the_timeout(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny, "tiny")
    spec = load_spec(checkpoint)
    with contextlib.ExitStack() as stack:
        chosen = settings(tiny, 2)
        model, _, _ = load_parallel(
            chosen, "w", checkpoint, spec, CPU, torch.float32, SILENT, stack, timeout_s=10
        )
        model.connect(None, torch.float32, lambda: 0)
        cache = model.open_cache(BLOCKS, torch.float32, CPU)
        assert torch.isfinite(model.forward(Batch(rows(), BLOCK_SIZE, CPU), cache)).all()
        (rank,) = children()
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="did not answer within 10 s"):
            model.forward(Batch(rows(), BLOCK_SIZE, CPU), cache)
        with pytest.raises(RankFailed, match="did not answer within 10 s"):
            model.forward(Batch(rows(), BLOCK_SIZE, CPU), cache)
    assert not children()


@pytest.mark.slow
def test_rank_ends_at_an_invalid_message() -> None:
    """Its thread for messages would end alone otherwise, and the process would wait forever."""
    own, other = socket.socketpair()
    with other:
        process = subprocess.Popen([sys.executable, "-m", "baton_engine.parallel.rank"], stdin=other.fileno())
    channel = Channel(own)
    try:
        own.sendall((1).to_bytes(LENGTH_BYTES) + b"\xc1")  # no value of msgpack begins with this byte
        reply = channel.receive()
        assert isinstance(reply, RankError) and "invalid message" in reply.reason
        assert process.wait(TIMEOUT_S) == 1
    finally:
        channel.close()
        process.kill()
        process.wait()
