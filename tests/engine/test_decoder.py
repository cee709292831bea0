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
from baton_engine.model.quantized import Matrix, floats
from baton_engine.model.spec import ModelSpec
from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainOps
from tests.engine.greedy import CPU, by_baton, by_transformers
from tests.engine.models import ARCHITECTURES, VOCAB, make_model
from tests.engine.random_weights import random_weights, tiny_spec

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
    """Operations with weights in a layout of their own, which count the layers that still exist."""

    def __init__(self, spec: ModelSpec, layers: list[weakref.ref[Tensor]]) -> None:
        super().__init__(spec)
        self._layers = layers
        self.alive: list[int] = []

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        self.alive.append(sum(layer() is not None for layer in self._layers))
        return super().prepare(floats(weight).clone(), bias)


def test_weights_handed_over_are_released_layer_by_layer() -> None:
    """A model with its own layout never needs twice the memory of its weights."""
    spec = tiny_spec(layers=6)
    weights = random_weights(spec, torch.float32)
    ops = CopyingOps(spec, [weakref.ref(floats(layer.qkv)) for layer in weights.layers])
    weights = weights.handed_over()
    Decoder(spec, weights, ops, CPU)
    of_layers = ops.alive[1:]  # the head is first
    assert of_layers[0] == 6
    assert of_layers[-1] <= 2, "the last layer, and the one before it"
    assert list(weights.layers) == []


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
