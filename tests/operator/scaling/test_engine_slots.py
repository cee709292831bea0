"""Batch slots of engines that do not report them come from their arguments."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.scaling.engine_slots import decode_slots


@pytest.mark.parametrize(
    ("engine", "of_all", "of_decode", "slots"),
    [
        ("vLLM", [], [], None),
        ("vLLM", ["--max-num-seqs", "256"], [], 256),
        ("vLLM", ["--max-num-seqs=256"], ["--max-num-seqs", "64"], 64),
        ("vLLM", ["--max_num_seqs=32"], [], 32),
        ("vLLM", ["--max-num-seqs"], [], None),
        ("vLLM", ["--max-num-seqs", "many"], [], None),
        ("vLLM", ["--max-running-requests", "8"], [], None),
        ("SGLang", ["--max-running-requests", "8"], [], 8),
        ("Baton", ["--max-num-seqs", "8"], [], None),
    ],
)
def test_decode_slots_arguments_give_slots(
    engine: str, of_all: list[str], of_decode: list[str], slots: int | None
) -> None:
    spec: dict[str, Any] = {
        "model": {"uri": "hf://a/b"},
        "engine": {"type": engine, "args": of_all},
        "decode": {"args": of_decode},
    }
    assert decode_slots(InferenceServiceSpec.model_validate(spec)) == slots
