"""A worker with adapters from its settings, and the models and settings that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_api.sampling import SamplingParams
from baton_engine.requests import LoadedAdapter, Request
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from tests.engine.encoders import make_encoder
from tests.engine.gguf_files import write_gguf
from tests.engine.lora_adapters import make_adapter
from tests.engine.models import make_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    make_adapter(root / "pirate", make_model(root / "base"), r=4)
    write_gguf(root / "base", root / "quantized.gguf", quantised=True)
    return root


def settings(model: Path, **given: Any) -> WorkerSettings:
    usual = {"dtype": "float32", "threads": 1, "kv_cache_memory": "1MiB", "enable_lora": True}
    return WorkerSettings.model_validate({"model": str(model), **usual, **given})


async def answer(worker: Worker, adapter: LoadedAdapter | None) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    request = Request(f"r{adapter and adapter.name}", tuple(range(3, 40)), sampling, adapter=adapter)
    outputs = [output async for output in worker.client.generate(request)]
    assert outputs[-1].error is None
    return [choice.token for output in outputs for choice in output.tokens]


@pytest.mark.parametrize("speculation", ["ngram", "off"])
async def test_lora_worker_keeps_quantized_weights(root: Path, speculation: str) -> None:
    given = {"lora_modules": (f"pirate={root / 'pirate'}",), "speculation": speculation}
    async with open_worker(settings(root / "quantized.gguf", **given)) as worker:
        assert worker.load().adapters == ("pirate",)
        base = await answer(worker, None)
        adapted = await answer(worker, worker.adapters.get("pirate"))
    async with open_worker(settings(root / "quantized.gguf", enable_lora=False)) as worker:
        assert await answer(worker, None) == base
    assert base != adapted
    assert len(base) == len(adapted) == 30


@pytest.mark.parametrize(
    ("variant", "given", "words"),
    [
        ("", {"enable_lora": False, "lora_modules": ("a=/a",)}, ("--lora-modules", "--enable-lora")),
        ("", {"lora_modules": ("a=/no/such/folder",)}, ("a=/no/such/folder", "No adapter found")),
        ("qwen3 with experts", {}, ("Qwen3MoeForCausalLM", "experts", "Remove the flag")),
        ("deepseek-v2", {}, ("DeepseekV2ForCausalLM", "latent attention", "Remove the flag")),
        ("encoder", {}, ("BertModel", "encoder", "Remove the flag")),
    ],
)
async def test_lora_worker_refuses(
    root: Path, tmp_path: Path, variant: str, given: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = root / "base"
    if variant:
        model = (
            make_encoder(tmp_path, "bert")
            if variant == "encoder"
            else make_model(tmp_path / "model", variant)
        )
    with pytest.raises(SetupError) as caught:
        async with open_worker(settings(model, **given)):
            pass
    for word in words:
        assert word in caught.value.message
