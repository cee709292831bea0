"""The built-in model answers as transformers does with the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_engine.api.template.rendering import TemplateInput
from baton_engine.api.template.templates import templates_of
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.ops.plain import PlainOps
from tests.engine.greedy import CPU, by_baton, by_transformers

TOKENS = 64
TOLERANCE = 1e-4

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "List 3 countries and their capitals."}],
    [
        {"role": "system", "content": "You are a helpful AI assistant"},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "What about Japan?\n\n1. Name it in one sentence."},
    ],
]
COMPLETION = "The capital of France is"


def render(tokenizer: Tokenizer, chat: list[dict[str, Any]]) -> str:
    return templates_of(tokenizer).render(TemplateInput(messages=chat))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return load_tokenizer(smollm2, load_spec(smollm2))


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    smollm2: Checkpoint, tokenizer: Tokenizer
) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    reference = AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent,
        gguf_file=smollm2.path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    spec = load_spec(smollm2)
    model = Decoder(spec, load_weights(smollm2, spec, torch.float32), PlainOps(spec), CPU)
    prompts = [tokenizer.encode(render(tokenizer, chat), False) for chat in CHATS]
    prompts.append(tokenizer.encode(COMPLETION))
    answers = by_baton(model, prompts, TOKENS, chunk=24)
    for prompt, got in zip(prompts, answers, strict=True):
        wanted = by_transformers(reference, prompt, got.tokens)
        assert got.tokens == wanted.tokens
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
    assert "Paris" in tokenizer.decode(answers[2].tokens)


def test_smollm2_chat_template_is_the_files_own(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, CHATS[0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nList 3 countries and their capitals.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer.token_text(end) for end in tokenizer.eos_ids] == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello 123 world", ["Hello", " ", "1", "2", "3", " world"]),
        # Digits stand apart before anything else is cut, so the line breaks before one stay together.
        ("a\n\n1. b", ["a", "\n\n", "1", ".", " b"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_text_is_cut_as_the_model_was_trained(tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    ids = tokenizer.encode(text)
    assert [tokenizer.token_text(token) for token in ids] == pieces
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
