"""Batch slots of engines that do not report them come from their arguments."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines import sglang, trtllm, vllm
from baton_operator.scaling.sizing import DecodeSlots, decode_slots

NAMED: list[tuple[str, list[str], list[str], int]] = [
    ("vLLM", ["--max-num-seqs", "256"], [], 256),
    ("vLLM", ["--max-num-seqs=256"], ["--max-num-seqs", "64"], 64),
    ("vLLM", ["--max_num_seqs=32"], [], 32),
    ("SGLang", ["--max-running-requests", "8"], [], 8),
    ("TensorRT-LLM", ["--max_batch_size=8"], [], 8),
]
BY_DEFAULT: list[tuple[str, list[str], list[str], int]] = [
    ("vLLM", [], [], vllm.CPU_DEFAULT_SLOTS),
    ("vLLM", ["--max-num-seqs"], [], vllm.CPU_DEFAULT_SLOTS),
    ("vLLM", ["--max-num-seqs", "many"], [], vllm.CPU_DEFAULT_SLOTS),
    ("vLLM", ["--max-running-requests", "8"], [], vllm.CPU_DEFAULT_SLOTS),
    ("SGLang", [], [], sglang.DEFAULT_SLOTS),
    ("TensorRT-LLM", [], [], trtllm.DEFAULT_SLOTS),
    ("SGLang", ["--speculative-algorithm", "EAGLE"], [], sglang.SPECULATIVE_DEFAULT_SLOTS),
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
    assert decode_slots(spec_of("vLLM", [], [], **gpu)) == DecodeSlots(vllm.DEFAULT_SLOTS, exact=False)


@pytest.mark.parametrize("engine", ["Baton", "Custom"])
def test_decode_slots_of_other_engines_are_not_looked_up(engine: str) -> None:
    assert decode_slots(spec_of(engine, ["--max-num-seqs", "8"], [])) is None
