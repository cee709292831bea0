"""A worker with a real decoder in fp32, from a checkpoint that a test has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import create_model
from tests.decode.pair import Side

CPU = torch.device("cpu")
BLOCKS = 400


def real_side(name: str, folder: Path, chunk_tokens: int, **how: Any) -> Side:
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    model = create_model(spec, load_weights(checkpoint, spec, torch.float32), CPU, torch.float32)
    cache = KVCache(spec, BLOCKS, torch.float32, CPU)
    return Side.make(name, model, cache, chunk_tokens=chunk_tokens, **how)
