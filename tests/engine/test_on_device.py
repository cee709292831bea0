"""Whole engines on the accelerator here: graphs, kernels and overlap give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from baton_engine import LLM
from tests.engine.greedy import by_transformers
from tests.engine.models import VOCAB, make_model

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
