"""Packed weights in files: used as if they were packed again, and never if they are damaged."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.sampling import SamplingParams
from baton_engine.batch import Batch
from baton_engine.machine import in_huge_pages
from baton_engine.model.loading import WRITER
from baton_engine.model.native_decoder import NativeDecoder, native_decoder
from baton_engine.model.stored_weights import (
    HEADER_BYTES,
    PARTIAL,
    PIECE_BYTES,
    Damaged,
    WeightsFile,
    content_digest,
    file_name,
)
from baton_engine.model.weights import Weights
from baton_engine.quantized import Format
from baton_engine.requests import Request
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ExpertSpec, ModelSpec
from baton_engine.worker import Worker, open_worker
from tests.engine.models import make_model
from tests.engine.random_weights import random_weights, tiny_spec
from tests.engine.test_cpu_ops import CPU, ROWS, filled_cache, native_model, rows_of
from tests.engine.test_quantized import quantized_weights

LIMIT = 1 << 30
LARGE: dict[str, Any] = {"vocab": 6_000, "hidden": 1024, "heads": 8, "intermediate": 1024}
"""More than one piece."""


def logits(model: NativeDecoder) -> Tensor:
    batch = Batch(rows_of(ROWS, model.spec.vocab, random.Random(1)), 16, CPU)
    return model.forward(batch, filled_cache(model.spec, model.dtype))


def stored(spec: ModelSpec, weights: Weights, dtype: torch.dtype, folder: Path) -> tuple[WeightsFile, Tensor]:
    """Store a model in a folder. Returns the file and the model's logits."""
    native_model(tiny_spec(), dtype)  # skips without kernels
    model = native_decoder(spec, weights, dtype, threads=2)
    assert model is not None
    file = WeightsFile(folder / file_name("model"), LIMIT)
    model.store(file, "digest", 7)
    return file, logits(model)


def used(file: WeightsFile, spec: ModelSpec, dtype: torch.dtype) -> NativeDecoder | None:
    with file.open() as opened:
        return None if opened is None else native_decoder(spec, opened, dtype, threads=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied_embeddings": False, "qk_norm": True},
        {"experts": ExpertSpec(count=3, chosen=2, intermediate=40)},
        {"hidden": 256, "experts": ExpertSpec(count=32, chosen=2, intermediate=256)},
        LARGE,
    ],
    ids=["tiny", "biases and an embedding", "experts", "experts that all threads pack", "several pieces"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_stored_weights_give_the_same_logits(
    changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    spec = tiny_spec(**changes)
    file, expected = stored(spec, random_weights(spec, dtype), dtype, tmp_path)
    model = used(file, spec, dtype)
    assert model is not None and torch.equal(logits(model), expected)
    with file.open() as opened:
        assert opened is not None and (opened.header.digest, opened.header.loaded_bytes) == ("digest", 7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False},
        {"experts": ExpertSpec(count=3, chosen=2, intermediate=64, layers=(False, True))},
        {"experts": ExpertSpec(count=64, chosen=2, intermediate=192)},
    ],
    ids=["tied", "an embedding", "experts", "experts that all threads pack"],
)
def test_stored_quantized_weights_give_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = tiny_spec(head_dim=64, heads=3, kv_heads=3, hidden=192, intermediate=256, **changes)
    kept, _ = quantized_weights(spec, [Format.Q4_0, Format.Q8_0])
    file, expected = stored(spec, kept, torch.float32, tmp_path)
    model = used(file, spec, torch.float32)
    assert model is not None and torch.equal(logits(model), expected)


def change_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


SPOILS: dict[str, Callable[[Path], None]] = {
    "first weight": lambda path: change_byte(path, HEADER_BYTES),
    "last byte": lambda path: change_byte(path, path.stat().st_size - 1),
    "second piece": lambda path: change_byte(path, HEADER_BYTES + PIECE_BYTES + 12_345),
    "header": lambda path: change_byte(path, 200),
    "magic": lambda path: change_byte(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 64),
    "in the header": lambda path: os.truncate(path, 1000),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 64),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_damaged_weights_are_never_used(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    spec = tiny_spec(**LARGE)
    file, _ = stored(spec, random_weights(spec, torch.bfloat16), torch.bfloat16, tmp_path)
    spoil(file.path)
    try:
        assert used(file, spec, torch.bfloat16) is None and not file.path.exists()
    except Damaged as reason:
        assert "checksums" in str(reason)


def test_weights_of_more_layers_are_not_used(tmp_path: Path) -> None:
    spec = tiny_spec(layers=3)
    file, _ = stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    with pytest.raises(Damaged, match="sizes"):
        used(file, replace(spec, layers=1), torch.float32)


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_weights_that_others_can_write_are_not_used(mode: int, tmp_path: Path) -> None:
    spec = tiny_spec()
    file, _ = stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    file.path.chmod(mode)
    assert used(file, spec, torch.float32) is None and file.path.exists()


def test_weights_of_several_writers_are_written_once(tmp_path: Path) -> None:
    spec = tiny_spec()
    file, expected = stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    model = used(file, spec, torch.float32)
    assert model is not None
    inode = file.path.stat().st_ino
    model.store(file, "digest", 7)
    assert file.path.stat().st_ino == inode and [path.name for path in tmp_path.iterdir()] == [file.path.name]

    file.path.unlink()
    threads = [threading.Thread(target=model.store, args=(file, "digest", 7)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = used(file, spec, torch.float32)
    assert again is not None and torch.equal(logits(again), expected)
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of this process have at most 3 MiB; a write beyond fails with an error as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_failed_write_leaves_nothing_behind(small_files: None, tmp_path: Path) -> None:
    spec = tiny_spec(**LARGE)
    with pytest.raises(OSError, match="too large"):
        stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_beyond_the_limit_are_not_stored(tmp_path: Path) -> None:
    spec = tiny_spec()
    file, _ = stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    model = used(file, spec, torch.float32)
    assert model is not None
    small = WeightsFile(tmp_path / file_name("other"), HEADER_BYTES)
    model.store(small, "digest", 7)
    assert not small.path.exists()


def test_least_recently_used_files_are_deleted(tmp_path: Path) -> None:
    spec = tiny_spec()
    file, _ = stored(spec, random_weights(spec, torch.float32), torch.float32, tmp_path)
    model = used(file, spec, torch.float32)
    assert model is not None
    size = file.path.stat().st_size
    file.path.unlink()
    files = [WeightsFile(tmp_path / file_name(number), 3 * size) for number in range(4)]
    for age, place in enumerate(files[:3]):
        model.store(place, "digest", 7)
        os.utime(place.path, (1000 + age, 1000 + age))
    abandoned = tmp_path / (file_name("abandoned") + PARTIAL)
    abandoned.touch()
    os.utime(abandoned, (1, 1))
    assert used(files[0], spec, torch.float32) is not None
    model.store(files[3], "digest", 7)
    assert {path.name for path in tmp_path.iterdir()} == {files[number].path.name for number in (0, 2, 3)}


def test_content_digest_changes_with_the_checkpoint(tmp_path: Path) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(3 << 20))
    config.write_text("{}")
    seen = {content_digest(tmp_path)}
    os.utime(weights, (1, 1))
    seen.add(content_digest(tmp_path))
    change_byte(weights, (3 << 20) - 1)
    os.utime(weights, (1, 1))  # the same size and time
    seen.add(content_digest(tmp_path))
    config.write_text("[]")
    seen.add(content_digest(tmp_path))
    weights.rename(tmp_path / "other.safetensors")
    seen.add(content_digest(tmp_path))
    assert len(seen) == 5
    (tmp_path / "README.md").write_text("text")
    assert content_digest(tmp_path) in seen


SMAPS = """7f0000000000-7f0000800000 r--s 00200000 fe:00 12 /cache/weights-1
Size:               8192 kB
FilePmdMapped:      {huge} kB
7f0000800000-7f0000c00000 r--s 00200000 fe:00 13 /cache/weights-2
FilePmdMapped:      4096 kB
"""


@pytest.mark.parametrize(("huge", "expected"), [(8192, True), (4096, True), (2048, False), (0, False)])
def test_in_huge_pages_counts_one_mapping(huge: int, expected: bool, tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS.format(huge=huge))
    assert in_huge_pages(0x7F0000000000, 8 << 20, smaps) is expected


async def answer(worker: Worker) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = [output async for output in worker.client.generate(Request("a", (1, 2, 3), params))]
    return [choice.token for output in outputs for choice in output.tokens]


@pytest.mark.slow
async def test_worker_stores_weights_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written once, and again if it is damaged. A limit of 0 or a tiny model writes none."""
    native_model(tiny_spec(), torch.float32)  # skips without kernels
    cache = tmp_path / "cache"
    monkeypatch.setenv("BATON_CACHE", str(cache))
    settings = WorkerSettings(
        model=str(make_model(tmp_path / "model", intermediate_size=24_000)),
        device="cpu",
        kv_cache_tokens=640,
        threads=1,
        port=0,
    )

    async def start(**changes: Any) -> tuple[list[int], str]:
        async with open_worker(settings.model_copy(update=changes)) as worker:
            for thread in threading.enumerate():
                if thread.name == WRITER:
                    await asyncio.to_thread(thread.join)
            return await answer(worker), worker.compatibility.digest

    expected = await start(weights_cache=0)
    await start(model=str(make_model(tmp_path / "tiny")))
    assert not list(cache.glob("weights-*"))
    assert await start() == expected
    (path,) = cache.glob("weights-*")
    inode = path.stat().st_ino
    assert await start() == expected and path.stat().st_ino == inode
    change_byte(path, HEADER_BYTES + 1000)
    assert await start() == expected
    (path,) = cache.glob("weights-*")
    assert await start() == expected


EXITING = """
import atexit, sys, threading
exiting, written = threading.Event(), threading.Event()

@atexit.register  # the first one, so it runs after all others, which release what they know of
def last():
    exiting.set()
    written.wait(60)

import torch
from pathlib import Path
from baton_engine.model.loading import LoadedWeights
from baton_engine.model.native_decoder import native_decoder
from baton_engine.model.stored_weights import WeightsFile
from tests.engine.random_weights import random_weights, tiny_spec

class LateFile(WeightsFile):
    def write(self, *given):
        exiting.wait(60)
        try:
            super().write(*given)
        finally:
            written.set()

spec = tiny_spec()
model = native_decoder(spec, random_weights(spec, torch.float32), torch.float32, threads=1)
LoadedWeights(model, "digest", 1 << 30, LateFile(Path(sys.argv[1]), 1 << 30)).store()
"""


@pytest.mark.slow  # a process of its own, which imports torch
def test_weights_are_written_while_the_process_exits(tmp_path: Path) -> None:
    """The thread that writes them reads memory that is the model's, until the process has ended."""
    native_model(tiny_spec(), torch.float32)  # skips without kernels
    file = tmp_path / file_name("model")
    command = [sys.executable, "-c", EXITING, str(file)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=root)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert file.exists()
