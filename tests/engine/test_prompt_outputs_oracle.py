"""Vectors and prompt logprobs are those of transformers: alone, in a batch, in chunks, on both decoders."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton_api.sampling import SamplingParams
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.native_decoder import native_decoder
from baton_engine.ops.native import library
from baton_engine.ops.plain import PlainOps
from baton_engine.requests import Output, Pooling, PromptLogprobs, Request
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.greedy import CPU
from tests.engine.models import ARCHITECTURES, VOCAB, make_model

LENGTHS = (45, 1, 16, 130, 7, 64, 33)
TOLERANCE = 1e-4
ROUNDED = {"cosine": 0.98, "logprob": 0.25}
"""Errors allowed for bfloat16, with 8 bits, in these models with large weights."""


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in LENGTHS]


def ask(model: Model, requests: Sequence[Request], chunk: int, dtype: torch.dtype) -> dict[str, Output]:
    """The last output of each, all of them submitted at once."""
    arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def collect(outputs: list[Output]) -> None:
        for output in outputs:
            arrived.put(output)

    cache = KVCache(model.spec, 64, dtype, CPU)
    limits = EngineLimits(max_model_len=512, chunk_tokens=chunk)
    engine = Engine(model, cache, limits, on_outputs=collect)
    engine.start()
    try:
        for request in requests:
            engine.submit(request)
        ended = [arrived.get(timeout=60) for _ in requests]
    finally:
        engine.stop()
    return {output.request_id: output for output in ended}


def requests_for(prompt: tuple[int, ...], number: int) -> list[Request]:
    """Both vectors and all logprobs of one prompt."""
    scoring = SamplingParams(prompt_logprobs=5, max_tokens=0)
    return [
        Request(f"mean {number}", prompt, SamplingParams(), pooling=Pooling.MEAN),
        Request(f"last {number}", prompt, SamplingParams(), pooling=Pooling.LAST),
        Request(f"score {number}", prompt, scoring),
    ]


def answers(model: Model, chunk: int, together: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    requests = [requests_for(prompt, number) for number, prompt in enumerate(prompts())]
    if together:
        outputs = ask(model, [one for group in requests for one in group], chunk, dtype)
    else:
        outputs = {}
        for group in requests:
            for one in group:
                outputs |= ask(model, [one], chunk, dtype)
    assert not any(output.error for output in outputs.values())
    return {name: output.prompt_output for name, output in outputs.items()}


@torch.inference_mode()
def expected(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    outputs: dict[str, Any] = {}
    for number, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        states = model.model(ids, use_cache=False).last_hidden_state[0]
        outputs[f"mean {number}"] = states.mean(0).numpy()
        outputs[f"last {number}"] = states[-1].numpy()
        scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        outputs[f"score {number}"] = scores.numpy()
    return outputs


def compare(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for number, prompt in enumerate(prompts()):
        for kind in ("mean", "last"):
            name = f"{kind} {number}"
            np.testing.assert_allclose(got[name], wanted[name], atol=TOLERANCE, rtol=0)
        scores, result = wanted[f"score {number}"], got[f"score {number}"]
        assert isinstance(result, PromptLogprobs)
        own = scores[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(result.logprobs, own, atol=TOLERANCE, rtol=0)
        best = -np.sort(-scores)[:, :5]
        np.testing.assert_allclose(result.top, best, atol=TOLERANCE, rtol=0)
        named = np.take_along_axis(scores, result.top_ids, 1)
        np.testing.assert_allclose(named, best, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=["llama", "qwen2 with sliding layers", "qwen3 with tied embeddings"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert request.param in ARCHITECTURES
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def plain(folder: Path) -> Model:
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    return Decoder(spec, load_weights(checkpoint, spec, torch.float32), PlainOps(spec), CPU)


def native_model(folder: Path, dtype: torch.dtype) -> Model:
    try:
        library.load(os.environ)
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    model = native_decoder(spec, load_weights(checkpoint, spec, dtype), dtype, threads=2)
    assert model is not None
    return model


@pytest.mark.parametrize(("chunk", "together"), [(512, False), (512, True), (20, True)])
def test_plain_operations_give_what_transformers_gives(folder: Path, chunk: int, together: bool) -> None:
    compare(answers(plain(folder), chunk, together), expected(folder))


@pytest.mark.parametrize(("chunk", "together"), [(512, False), (512, True), (20, True)])
def test_native_outputs_equal_transformers(folder: Path, chunk: int, together: bool) -> None:
    compare(answers(native_model(folder, torch.float32), chunk, together), expected(folder))


def test_native_bfloat16_outputs_are_within_rounding(folder: Path) -> None:
    got, wanted = answers(native_model(folder, torch.bfloat16), 20, True, torch.bfloat16), expected(folder)
    for name, vector in wanted.items():
        if name.startswith("score"):
            number = int(name.split()[1])
            own = vector[np.arange(len(vector)), prompts()[number][1:]]
            if len(own):
                assert np.abs(got[name].logprobs - own).mean() < ROUNDED["logprob"]
            continue
        cosine = got[name] @ vector / np.linalg.norm(got[name]) / np.linalg.norm(vector)
        assert cosine > ROUNDED["cosine"], name
