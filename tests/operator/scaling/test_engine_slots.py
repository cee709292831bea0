"""Batch slots of engines that do not report them come from their arguments."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.scaling.engine_slots import (
    SGLANG_DEFAULT,
    SGLANG_SPECULATIVE_DEFAULT,
    VLLM_CPU_DEFAULT,
    VLLM_DEFAULT,
    DecodeSlots,
    decode_slots,
)

NAMED: list[tuple[str, list[str], list[str], int]] = [
    ("vLLM", ["--max-num-seqs", "256"], [], 256),
    ("vLLM", ["--max-num-seqs=256"], ["--max-num-seqs", "64"], 64),
    ("vLLM", ["--max_num_seqs=32"], [], 32),
    ("SGLang", ["--max-running-requests", "8"], [], 8),
]
BY_DEFAULT: list[tuple[str, list[str], list[str], int]] = [
    ("vLLM", [], [], VLLM_CPU_DEFAULT),
    ("vLLM", ["--max-num-seqs"], [], VLLM_CPU_DEFAULT),
    ("vLLM", ["--max-num-seqs", "many"], [], VLLM_CPU_DEFAULT),
    ("vLLM", ["--max-running-requests", "8"], [], VLLM_CPU_DEFAULT),
    ("SGLang", [], [], SGLANG_DEFAULT),
    ("SGLang", ["--speculative-algorithm", "EAGLE"], [], SGLANG_SPECULATIVE_DEFAULT),
]


def spec_of(engine: str, of_all: list[str], of_decode: list[str], **decode: Any) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate(
        {
            "model": {"uri": "hf://a/b"},
            "engine": {"type": engine, "args": of_all},
            "decode": {"args": of_decode, **decode},
        }
    )


@pytest.mark.parametrize(("engine", "of_all", "of_decode", "slots"), NAMED)
def test_decode_slots_are_those_of_an_argument(
    engine: str, of_all: list[str], of_decode: list[str], slots: int
) -> None:
    assert decode_slots(spec_of(engine, of_all, of_decode)) == DecodeSlots(slots, exact=True)


@pytest.mark.parametrize(("engine", "of_all", "of_decode", "slots"), BY_DEFAULT)
def test_decode_slots_without_an_argument_are_at_least_the_default(
    engine: str, of_all: list[str], of_decode: list[str], slots: int
) -> None:
    assert decode_slots(spec_of(engine, of_all, of_decode)) == DecodeSlots(slots, exact=False)


def test_decode_slots_of_vllm_depend_on_the_device() -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert decode_slots(spec_of("vLLM", [], [], **gpu)) == DecodeSlots(VLLM_DEFAULT, exact=False)


@pytest.mark.parametrize("engine", ["Baton", "Custom"])
def test_decode_slots_of_other_engines_are_not_looked_up(engine: str) -> None:
    assert decode_slots(spec_of(engine, ["--max-num-seqs", "8"], [])) is None
