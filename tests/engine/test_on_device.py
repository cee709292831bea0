"""Whole engines on the accelerator here: graphs, kernels and overlap give the tokens of transformers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton_api.sampling import SamplingParams
from baton_engine import LLM
from baton_engine.quantized import Format, Quantized, pack_float8, quantize
from baton_engine.requests import Request
from baton_engine.settings import WorkerSettings
from baton_engine.worker import open_worker
from tests.engine.draft_heads import make_eagle3, make_mtp
from tests.engine.greedy import by_transformers
from tests.engine.lora_adapters import make_adapter
from tests.engine.models import VOCAB, make_model
from tests.engine.test_quantized import CONVERTED, hard_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator"),
]

PROMPTS = [[3 + (at * (7 + row) + at**2) % (VOCAB - 3) for at in range(5 + 37 * row)] for row in range(4)]
"""Of 5 to 116 tokens: more than a chunk, and over several blocks."""

GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama with one key head",
        "mistral with a sliding window",
        "qwen3",
        "gemma2",
        "gemma3",
        "gpt-oss",
        "llama 4",
        "mixtral",
        "deepseek-v3",
    ],
)
def test_engine_on_a_device_gives_the_tokens_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, variant)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"max_model_len": 256, "chunk_tokens": 64, "max_running": 8, "graph_rows": 4}
    with LLM(str(folder), device="cuda", dtype="float32", kv_cache_tokens=4096, **settings) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    for prompt, results in zip(PROMPTS, zip(together, alone, strict=True), strict=True):
        for result in results:
            (answer,) = result.outputs
            expected = by_transformers(oracle, prompt, answer.token_ids)
            assert list(answer.token_ids) == expected.tokens
            assert answer.logprobs is not None
            assert answer.logprobs["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", ["mtp", "mtp of glm", "eagle3"])
async def test_draft_head_on_a_device_changes_no_token(kind: str, tmp_path: Path) -> None:
    """The drafts of these heads are right, so that captured passes verify them."""
    head: dict[str, Any] = {"speculation": "mtp"}
    if kind == "eagle3":
        folder = make_model(tmp_path / "model", num_hidden_layers=8)
        own = make_eagle3(tmp_path / "head", folder, right=True)
        head = {"speculation": "eagle3", "draft_model": str(own), "speculation_tokens": 1}
    else:
        variant = "deepseek-v3" if kind == "mtp" else "glm4 with experts"
        folder = make_mtp(tmp_path / "model", variant, right=True)
    given = {
        "model": str(folder), "device": "cuda", "dtype": "float32", "kv_cache_tokens": 4096, "graph_rows": 8,
        "max_model_len": 256, "chunk_tokens": 64,
    }  # fmt: skip
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    async with open_worker(WorkerSettings.model_validate(given | head)) as worker:
        for number, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0.0, max_tokens=24)
            outputs = worker.client.generate(Request(f"r{number}", tuple(prompt), sampling))
            got = [choice.token async for output in outputs for choice in output.tokens]
            assert by_transformers(oracle, prompt, got).tokens == got
        totals = worker.client.snapshot().totals
    assert totals.draft_tokens == totals.accepted_tokens > 0


@pytest.mark.parametrize("form", CONVERTED)
def test_conversion_on_a_device_has_the_bits_of_the_cpu(form: Format) -> None:
    random = torch.randn(3000, 1024, generator=torch.Generator().manual_seed(2))
    for values in (hard_values(), random, random.bfloat16()):
        (ours,) = quantize(values, form, torch.device("cuda")).parts
        (expected,) = quantize(values, form).parts
        assert ours.rows.is_cuda
        assert torch.equal(ours.rows.cpu(), expected.rows)


@pytest.mark.parametrize("group", [128, 1024])
def test_product_in_float8_on_a_device_is_near_the_exact_one(group: int) -> None:
    """By what rounding the inputs changes, if the device multiplies in FP8; otherwise, closer."""
    from baton_engine.ops.kernels.quantized import EXPANDED_ROWS, QuantizedLinear

    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(96, 1024, generator=generator).to(torch.float8_e4m3fn)
    scales = 0.01 + torch.rand(96, 1024 // group, generator=generator) / 100
    (part,) = pack_float8(numbers.view(torch.uint8), scales, group).parts
    matrix = Quantized((replace(part, rounds_inputs=True),), 1024).to(torch.device("cuda"))
    x = torch.randn(EXPANDED_ROWS + 9, 1024, generator=generator).bfloat16()
    exact = x.double() @ (numbers.double() * scales.double().repeat_interleave(group, 1)).T
    linear, capability = QuantizedLinear(matrix), torch.cuda.get_device_capability()
    if torch.version.hip is None and (capability[0] == 9 or (group == 1024 and capability >= (8, 9))):
        assert linear._scaled
    product = linear(x.cuda()).double().cpu()
    assert (product - exact).norm() < 0.05 * exact.norm()


async def test_tier_behind_a_device_gives_the_computed_tokens_back(tmp_path: Path) -> None:
    """A prompt returns after other prompts took its blocks: what is restored counts as computed."""
    given = {
        "model": str(make_model(tmp_path, "llama")), "device": "cuda", "dtype": "float32",
        "kv_cache_tokens": 34 * 16, "kv_memory_tier": "64MiB", "max_model_len": 512, "graph_rows": 4,
    }  # fmt: skip
    async with open_worker(WorkerSettings.model_validate(given)) as worker:

        async def answer(number: int, row: int) -> tuple[list[int], int]:
            prompt = tuple(3 + (at * (7 + row) + at**2) % (VOCAB - 3) for at in range(490))
            request = Request(f"r{number}", prompt, SamplingParams(temperature=0.0, max_tokens=8))
            outputs = [output async for output in worker.client.generate(request)]
            return [choice.token for output in outputs for choice in output.tokens], outputs[0].cached_tokens

        answers: list[tuple[list[int], int]] = []
        for number, row in enumerate((1, 2, 3, 1)):
            if number == 3:  # computing is slow, so that this prompt is restored
                worker.engine._scheduler.prompt_speed.add(8192, 3600.0)
            answers.append(await answer(number, row))
            async with asyncio.timeout(60):
                # The engine's thread copies them.
                while worker.engine.snapshot().tiers[0].blocks < min(90, 30 * (number + 1)):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert answers[3] == (answers[0][0], 480)
        assert worker.engine.snapshot().totals.prompt_tokens_restored["memory"] == 480


async def test_adapters_on_a_device_give_the_tokens_of_peft(tmp_path: Path) -> None:
    """Rows of two adapters and of the base model are in the same passes, captured ones too."""
    peft = pytest.importorskip("peft")
    base = make_model(tmp_path / "base", "qwen3")
    for seed, name in enumerate(("pirate", "poet"), 1):
        make_adapter(tmp_path / name, base, seed=seed, r=4 * seed)
    given = {
        "model": str(base), "device": "cuda", "dtype": "float32", "kv_cache_tokens": 4096, "graph_rows": 4,
        "max_model_len": 256, "chunk_tokens": 64, "enable_lora": True,
        "lora_modules": (f"pirate={tmp_path / 'pirate'}", f"poet={tmp_path / 'poet'}"),
    }  # fmt: skip
    names = ("pirate", None, "poet", "pirate")
    async with open_worker(WorkerSettings.model_validate(given)) as worker:

        async def answer(number: int, name: str | None) -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=24)
            adapter = worker.adapters.get(name)
            request = Request(f"r{number}", tuple(PROMPTS[number]), sampling, adapter=adapter)
            outputs = [output async for output in worker.client.generate(request)]
            return [choice.token for output in outputs for choice in output.tokens]

        answers = await asyncio.gather(*(answer(number, name) for number, name in enumerate(names)))
    for prompt, adapter, got in zip(PROMPTS, names, answers, strict=True):
        oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            oracle = peft.PeftModel.from_pretrained(oracle, tmp_path / adapter).eval()
        assert by_transformers(oracle, prompt, got).tokens == got, adapter
    assert len({tuple(got[:8]) for got in answers}) == len(names)
