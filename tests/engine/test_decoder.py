"""The decoder computes what transformers computes, for every architecture, chunking and batch."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.weights import WeightsSummary
from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainOps
from baton_engine.quantized import Matrix, floats
from baton_engine.spec import ModelSpec
from tests.engine.greedy import CPU, by_baton, by_transformers
from tests.engine.models import ARCHITECTURES, VOCAB, make_model

TOKENS = 64
TOLERANCE = 1e-4


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def plain(folder: Path) -> Decoder:
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    return Decoder(spec, load_weights(checkpoint, spec, torch.float32), PlainOps(spec), CPU)


def oracle(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


class CopyingOps(PlainOps):
    """Operations with weights in a layout of their own, which count the matrices that still exist."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._matrices: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        self._matrices.append(weakref.ref(floats(weight)))
        self.alive.append(sum(matrix() is not None for matrix in self._matrices))
        return super().prepare(floats(weight).clone(), bias)


def test_lazy_weights_are_released_layer_by_layer(tmp_path: Path) -> None:
    """A model with its own layout never needs twice the memory of its weights."""
    checkpoint = Checkpoint(make_model(tmp_path / "model", num_hidden_layers=6), "model")
    spec = load_spec(checkpoint)
    summary = WeightsSummary(load_weights(checkpoint, spec, torch.float32, lazy=True))
    ops = CopyingOps(spec)
    Decoder(spec, summary.weights, ops, CPU)
    assert len(ops.alive) == 1 + 6 * 4
    assert max(ops.alive) <= 1 + 2 * 4, "the head, and two layers of four matrices"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def test_greedy_tokens_and_logprobs_are_those_of_transformers(folder: Path) -> None:
    model, reference = plain(folder), oracle(folder)
    # One prompt that is longer than every window, one of a single token, one that ends with a block.
    prompts = [prompt(45, seed=1), prompt(1, seed=2), prompt(16, seed=3)]
    for chunk in (512, 7):
        answers = by_baton(model, prompts, TOKENS, chunk)
        for tokens, got in zip(prompts, answers, strict=True):
            wanted = by_transformers(reference, tokens, got.tokens)
            assert got.tokens == wanted.tokens
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
        assert len(set(answers[0].tokens)) > 8, "a model that repeats itself proves nothing"
