"""A worker put together from its settings, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from baton_api.announcements import Announcement, Announcer, Listening, Ready
from baton_api.errors import BatonError, SetupError
from baton_api.sampling import SamplingParams
from baton_api.workers import Role
from baton_engine import machine, service
from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint
from baton_engine.model.lora import LoraWeights
from baton_engine.model.progress import SILENT
from baton_engine.model.tensor_reader import samples
from baton_engine.requests import Request
from baton_engine.service import RoleServices
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec
from baton_engine.tiers import namespace
from baton_engine.tiers.opening import read_weights
from baton_engine.tiers.slab import WEIGHTS
from baton_engine.worker import Worker, open_worker
from tests.engine.models import make_model
from tests.plain_http import PLAIN

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Two layers, keys and values, two key heads of 16, 16 tokens, float32."""


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


def settings(model: Path, **given: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {"model": str(model), "dtype": "float32", "threads": 1, "kv_cache_memory": "1MiB", **given}
    )


async def test_worker_open_has_generated_and_answers(tiny: Path) -> None:
    async with open_worker(settings(tiny, port=8123)) as worker:
        assert worker.engine.snapshot().totals.generated_tokens == 1
        request = Request("r", tuple(range(3, 40)), SamplingParams(temperature=0.0, max_tokens=5))
        tokens = [
            choice.token async for output in worker.client.generate(request) for choice in output.tokens
        ]
        assert len(tokens) == 5
        load = worker.load(control="127.0.0.1:9")
    assert worker.name == "both-8123"
    assert worker.model_name == "tiny"
    assert worker.model_names == load.names == ("tiny", str(tiny))
    assert (load.role, load.model, load.control) == (Role.BOTH, "tiny", "127.0.0.1:9")
    assert load.total_blocks == 2**20 // BLOCK_BYTES - 1
    assert load.compatibility == worker.compatibility.digest


class BrokenModel:
    """Every pass fails, as with a GPU that has fallen off the bus."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.forward(batch, cache)

    def project(self, states: Tensor) -> Tensor:
        return states

    def interrupt(self) -> None:
        raise AssertionError("no request is patient")

    def prepare_adapter(self, weights: LoraWeights) -> None:
        raise MemoryError("no memory for the adapter")


class Listener(Announcer):
    """Keeps what a starting process says."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.ready = asyncio.Event()

    def __call__(self, announcement: Announcement) -> None:
        match announcement:
            case Listening(port=port):
                self.port = port
            case Ready():
                self.ready.set()


async def test_service_accelerator_error_ends_process_with_reason(tiny: Path) -> None:
    """Clients get errors, and the process ends for its supervisor to start another."""
    listener = Listener()

    @contextlib.asynccontextmanager
    async def breaking(worker: Worker) -> AsyncIterator[RoleServices]:
        worker.engine._pipeline._model = BrokenModel(worker.spec)  # after the warm-up, as hardware does
        yield RoleServices()

    chosen = settings(tiny, port=0, name="gpu-worker")
    running = asyncio.ensure_future(service.run(chosen, listener, SILENT, breaking))
    await listener.ready.wait()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{listener.port}", trust_env=False, verify=PLAIN
    ) as http:
        assert (await http.get("/ready")).status_code == 200
        body = {"model": "tiny", "prompt": [3, 4], "max_tokens": 4}
        assert (await http.post("/v1/completions", json=body)).status_code == 500
    with pytest.raises(
        BatonError, match=r"gpu-worker cannot continue: the accelerator failed.*launch failure"
    ):
        await running


async def test_worker_restarts_are_distinguishable_and_share_blocks(tiny: Path) -> None:
    async with open_worker(settings(tiny)) as one, open_worker(settings(tiny)) as other:
        assert one.epoch != other.epoch
        assert one.compatibility == other.compatibility


async def test_worker_settings_reach_the_engine(tiny: Path) -> None:
    chosen = settings(tiny, max_model_len=100, chunk_tokens=32, max_running=3, served_model_name="mine")
    async with open_worker(chosen) as worker:
        limits = worker.engine.limits
        assert (limits.max_model_len, limits.chunk_tokens, limits.max_running) == (100, 32, 3)
        assert worker.model_names == ("mine",)
        assert worker.cache.kv.dtype == torch.float32


async def test_without_a_size_the_cache_takes_a_part_of_the_memory(tiny: Path) -> None:
    async with open_worker(settings(tiny, kv_cache_memory=0)) as worker:
        assert 1000 < worker.cache.blocks <= 131_072


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            {"kv_cache_memory": BLOCK_BYTES},
            ("8.19 kB", "2 blocks of 16 tokens", "16.4 kB", "--kv-cache-memory"),
        ),
        ({"kv_cache_memory": 2**60}, ("--kv-cache-memory", "1152922 TB", "are free")),
        ({"max_model_len": 513}, ("--max-model-len 513", "512 tokens", "tiny")),
        ({"device": "abacus"}, ("--device 'abacus'", "cpu, cuda")),
        ({"device": "meta"}, ("--device 'meta'", "cpu, cuda")),
        ({"device": "cuda:99"}, ("--device cuda:99", "--device cpu")),
        ({"kv_memory_tier": 2**60}, ("--kv-memory-tier", "1152922 TB", "are free")),
        ({"kv_memory_tier": BLOCK_BYTES - 1}, ("--kv-memory-tier", "one KV block", "8.19 kB")),
        (
            {"kv_memory_tier": 2**20, "tensor_parallel_size": 2},
            ("--tensor-parallel-size 2", "with --kv-memory-tier:", "Use --tensor-parallel-size 1"),
        ),
        (
            {"kv_shared_store": "file:///tmp/kv", "kv_disk_tier": "/tmp/kv", "tensor_parallel_size": 2},
            ("with --kv-disk-tier and --kv-shared-store:", "Use --tensor-parallel-size 1"),
        ),
        ({"kv_disk_tier": "/tmp/kv"}, ("--kv-disk-tier-size", "100GiB")),
        (
            {"kv_disk_tier": "/tmp/kv", "kv_disk_tier_size": 2**20},
            ("--kv-disk-tier needs --kv-memory-tier", "1GiB"),
        ),
        (
            {"kv_memory_tier": 2**20, "kv_disk_tier": "/tmp/kv", "kv_disk_tier_size": 9000},
            ("--kv-disk-tier-size 9.00 kB", "one KV block"),
        ),
        ({"kv_shared_store": "s3://bucket"}, ("--kv-shared-store-size", "1TiB")),
        (
            {"kv_shared_store": "file:///tmp/kv", "kv_shared_store_size": 2**20},
            ("--kv-shared-store needs --kv-memory-tier", "1GiB"),
        ),
        (
            {"kv_memory_tier": 2**20, "kv_shared_store": "file:///tmp/kv", "kv_shared_store_size": 9000},
            ("--kv-shared-store-size 9.00 kB", "one object of 64 KV blocks", "526 kB"),
        ),
        (
            {"kv_memory_tier": 2**20, "kv_shared_store": "/tmp/kv", "kv_shared_store_size": 2**20},
            ("Invalid KV store '/tmp/kv'", "s3://BUCKET/PATH", "file:///FOLDER"),
        ),
        (
            {"kv_memory_tier": 2**20, "kv_shared_store": "file://tmp/kv", "kv_shared_store_size": 2**20},
            ("Invalid KV store 'file://tmp/kv'", "file:///FOLDER"),
        ),
    ],
    ids=[
        "a cache of one block",
        "a cache larger than memory",
        "a context too long",
        "no device",
        "not served",
        "no GPU",
        "a tier larger than memory",
        "a tier of no block",
        "a tier of several ranks",
        "two tiers of several ranks",
        "a disk without its size",
        "a disk without memory",
        "a disk of no block",
        "a store without its size",
        "a store without memory",
        "a store of no object",
        "a store without a scheme",
        "a store on a host",
    ],
)
async def test_worker_impossible_settings_are_rejected_with_numbers(
    tiny: Path, given: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(SetupError) as caught:
        async with open_worker(settings(tiny, **given)):
            pass
    for part in parts:
        assert part in caught.value.message


async def test_worker_with_a_memory_tier_copies_and_restores(tiny: Path) -> None:
    """What evicts a prompt, and brings it back, is real: the settings, the threads and the metrics."""
    given = settings(tiny, kv_cache_memory=BLOCK_BYTES * 34, kv_memory_tier=BLOCK_BYTES * 100)
    async with open_worker(given) as worker:
        tier = worker.engine.snapshot().tiers[0]
        assert (tier.name, tier.capacity, tier.block_bytes) == ("memory", 100, BLOCK_BYTES)
        answers: list[list[int]] = []
        for number, seed in enumerate((1, 2, 3, 1)):
            prompt = tuple((3 + position * (7 + seed) + position**2) % 64 for position in range(490))
            request = Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=8))
            outputs = [output async for output in worker.client.generate(request)]
            answers.append([choice.token for output in outputs for choice in output.tokens])
            async with asyncio.timeout(60):
                # The engine's thread copies them.
                while worker.engine.snapshot().tiers[0].blocks < min(90, 30 * (number + 1)):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert answers[3] == answers[0]
        after = worker.engine.snapshot()
        restored = after.totals.prompt_tokens_restored["memory"]
        assert outputs[0].cached_tokens == restored, "as was sooner by the speeds of this machine"
        text = service.served_of(worker).metrics.text().decode()
        assert f'baton_worker_tier_blocks{{tier="memory"}} {float(after.tiers[0].blocks)}' in text
        assert (
            f'baton_worker_prompt_tokens_total{{source="memory"}} {float(restored)}' in text or not restored
        )


async def test_worker_writes_its_memory_to_the_disk_and_finds_it_again(tiny: Path, tmp_path: Path) -> None:
    """The end of the first worker writes what only its memory has."""
    given = settings(
        tiny,
        kv_cache_memory=BLOCK_BYTES * 34,
        kv_memory_tier=BLOCK_BYTES * 100,
        kv_disk_tier=str(tmp_path / "kv"),
        kv_disk_tier_size=2 * 2**20,
    )
    prompt = tuple((3 + position * 8 + position**2) % 64 for position in range(490))
    answers = []
    for start in range(2):
        async with open_worker(given) as worker:
            tier = worker.engine.snapshot().tiers[1]
            assert (tier.name, tier.block_bytes, tier.paused) == ("disk", BLOCK_BYTES, False)
            assert tier.blocks >= 30 * start
            with pytest.raises(SetupError, match="is in use by another process"):
                async with open_worker(given):
                    pass
            request = Request(str(start), prompt, SamplingParams(temperature=0.0, max_tokens=8))
            outputs = [output async for output in worker.client.generate(request)]
            answers.append([choice.token for output in outputs for choice in output.tokens])
            text = service.served_of(worker).metrics.text().decode()
            assert 'baton_worker_tier_paused{tier="disk"} 0.0' in text
            assert 'baton_worker_tier_limit_bytes{tier="disk"} ' in text
    assert answers[0] == answers[1]


def flip_between_samples(path: Path) -> None:
    """Change a number that `weights_digest` does not read, and not the time of change."""
    content, before = bytearray(path.read_bytes()), path.stat()
    first = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:first])
    tensors = [one for name, one in header.items() if name != "__metadata__"]
    begin, end = max((one["data_offsets"] for one in tensors), key=lambda offsets: offsets[1] - offsets[0])
    count = (end - begin) // 4
    read = {number for sample in samples(count, 4) for number in sample}
    content[first + begin + 4 * next(number for number in range(count) if number not in read)] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_worker_with_other_weights_types_or_version_finds_nothing_on_the_disk(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters and salts: `test_disk_other_models_and_tenants_find_nothing`."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    prompt = tuple((3 + position * 8 + position**2) % 64 for position in range(490))

    async def found(dtype: str = "bfloat16") -> int:
        """Start, and answer once. Returns the blocks that the disk had at the start."""
        given = settings(
            model,
            dtype=dtype,
            kv_memory_tier=BLOCK_BYTES * 100,
            kv_disk_tier=str(tmp_path / "kv"),
            kv_disk_tier_size=2 * 2**20,
        )
        async with open_worker(given) as worker:
            blocks = worker.engine.snapshot().tiers[1].blocks
            request = Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=8))
            _ = [output async for output in worker.client.generate(request)]
        return blocks

    assert await found() == 0
    assert await found() >= 30
    assert [await found("float32"), await found()] == [0, 0], "blocks of another size empty the folder"
    assert await found() >= 30
    flip_between_samples(next(model.glob("*.safetensors")))
    assert await found() == 0, "a fine-tune whose difference the digest of `Compatibility` does not have"
    monkeypatch.setattr(namespace, "__version__", "another one")
    assert await found() == 0


def test_worker_with_a_shared_store_alone_keeps_the_digest_of_its_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(namespace, "SETTLED_S", -60.0)  # its files were just written
    shared = settings(tiny, kv_memory_tier=2**20, kv_shared_store="file:///kv", kv_shared_store_size=2**20)
    weights = read_weights(shared, tiny, None)
    (kept,) = (tmp_path / "cache").glob(f"digests/*/{WEIGHTS}")
    kept.write_text(json.dumps(["read from here", weights.states]))
    assert read_weights(shared, tiny, None).digest == "read from here"
    other = shutil.copytree(tiny, tmp_path / "other")
    assert read_weights(shared, other, None).digest == weights.digest, "it has the same bytes"
    assert read_weights(shared, tiny, None).digest == "read from here", "each has a folder"


async def test_worker_cache_and_tier_must_fit_into_the_memory_together(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a CPU's cache counts as free until blocks are used."""
    monkeypatch.setattr(machine, "free_memory", lambda: 100 * 10**6)
    given = settings(tiny, kv_cache_memory=60 * 10**6, kv_memory_tier=60 * 10**6)
    with pytest.raises(SetupError, match=r"tier requires 60\.0 MB, but only 40\.0 MB are free beside"):
        async with open_worker(given):
            pass


async def test_worker_load_has_the_kv_event_addresses(tiny: Path) -> None:
    async with open_worker(settings(tiny)) as worker:
        assert (worker.load().kv_events, worker.load().kv_replay) == ("", "")
    async with open_worker(settings(tiny, kv_events="tcp://127.0.0.1:0")) as worker:
        load = worker.load()
        assert load.kv_events.startswith("tcp://127.0.0.1:") and not load.kv_events.endswith(":0")
        assert load.kv_replay not in ("", load.kv_events)
        snapshot = await worker.client.kv_snapshot()
        assert (snapshot.seq < worker.kv_batches()) and len(snapshot) == 1  # of the request that warmed it up


@pytest.mark.slow
async def test_worker_restores_what_another_one_put_into_the_shared_store(
    smollm2: Checkpoint, tmp_path: Path
) -> None:
    """SmolLM2, two workers at once, and a folder between them."""
    block = 16 * 30 * 2 * 3 * 64 * 2  # tokens, layers, keys and values, heads, size, bytes
    given = settings(
        smollm2.path,
        dtype="bfloat16",
        threads=2,
        kv_cache_memory=200 * block,
        kv_memory_tier=150 * block,
        kv_shared_store=f"file://{tmp_path / 'kv'}",
        kv_shared_store_size="1GiB",
    )
    prompt = tuple((3 + position * 8 + position**2) % 20_000 for position in range(2100))
    answers, outputs = [], []
    async with open_worker(given) as first, open_worker(given) as second:
        for number, worker in enumerate((first, second)):
            request = Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=8))
            outputs = [output async for output in worker.client.generate(request)]
            answers.append([choice.token for output in outputs for choice in output.tokens])
            async with asyncio.timeout(60):
                # The threads of the tiers write them.
                while first.engine.snapshot().tiers[1].totals.writes < 128:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        after = second.engine.snapshot()
        assert [tier.name for tier in after.tiers] == ["memory", "shared"]
        assert dict(outputs[0].tier_tokens) == {"shared": 2048}
        assert (after.tiers[1].totals.hits, after.totals.prompt_tokens_restored["shared"]) == (128, 2048)
        assert first.engine.snapshot().tiers[1].totals.writes == 128
        text = service.served_of(second).metrics.text().decode()
        assert 'baton_worker_tier_block_hits_total{tier="shared"} 128.0' in text
    assert answers[0] == answers[1]
