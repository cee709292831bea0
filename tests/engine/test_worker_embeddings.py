"""A worker makes the vectors that transformers and sentence-transformers would make of the same folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from baton_api.errors import SetupError
from baton_api.sampling import SamplingParams
from baton_engine.model.embedder import Embedder, NoEmbeddings
from baton_engine.requests import Pooling, Request
from baton_engine.settings import WorkerSettings
from baton_engine.worker import open_worker
from tests.engine.models import make_model

TEXT = "Each runner hands the baton to the next."


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A worker sets what belongs to its whole process; tests give it back."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved as such models are: a decoder without a head, pooled by its last token, normalized."""
    folder = make_model(tmp_path_factory.mktemp("models") / "embedding", "qwen3")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.model.save_pretrained(folder)
    steps = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": number,
            "path": f"{number}_{step}" if number else "",
            "type": f"sentence_transformers.models.{step}",
        }
        for number, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def settings(model: Path, **given: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {"model": str(model), "dtype": "float32", "threads": 1, "kv_cache_memory": "1MiB", **given}
    )


@torch.inference_mode()
def states(folder: Path, tokens: list[int]) -> np.ndarray:
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    last_states: np.ndarray = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return last_states


async def vector(worker: Any, tokens: list[int]) -> np.ndarray:
    request = Request("r", tuple(tokens), SamplingParams(max_tokens=0), pooling=worker.embedder.pooling)
    (output,) = [output async for output in worker.client.generate(request)]
    assert isinstance(output.prompt_output, np.ndarray)
    return output.prompt_output


async def test_worker_embedding_model_is_detected_by_its_files(embedding_model: Path) -> None:
    async with open_worker(settings(embedding_model)) as worker:
        assert worker.embedder == Embedder(pooling=Pooling.LAST) and worker.spec.headless
        tokens = worker.tokenizer.encode(TEXT)
        embedding = await vector(worker, tokens)
    np.testing.assert_allclose(embedding, states(embedding_model, tokens)[-1], atol=1e-4)


async def test_worker_pooling_flag_makes_any_decoder_embed(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    async with open_worker(settings(folder)) as worker:
        assert isinstance(worker.embedder, NoEmbeddings)
    async with open_worker(settings(folder, pooling="mean", matryoshka=True)) as worker:
        assert worker.embedder == Embedder(pooling=Pooling.MEAN, shortens=True)
        tokens = worker.tokenizer.encode(TEXT)
        embedding = await vector(worker, tokens)
    np.testing.assert_allclose(embedding, states(folder, tokens).mean(0), atol=1e-4)


async def test_worker_damaged_pooling_config_fails_before_weights(embedding_model: Path) -> None:
    config = embedding_model / "1_Pooling" / "config.json"
    kept = config.read_text()
    try:
        config.write_text("{")
        with pytest.raises(SetupError, match=r"config\.json"):
            async with open_worker(settings(embedding_model)):
                pass
    finally:
        config.write_text(kept)
