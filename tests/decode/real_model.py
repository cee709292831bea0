"""A worker with a real decoder in fp32, from a checkpoint that a test has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import create_model
from baton_engine.ops.choice import kept_formats, kv_dtype
from baton_engine.spec import Quantize
from tests.decode.pair import Side

CPU = torch.device("cpu")
BLOCKS = 400


def real_side(
    name: str,
    path: Path,
    chunk_tokens: int,
    *,
    quantize: Quantize = "off",
    kv_cache: Literal["auto", "fp8"] = "auto",
    device: torch.device = CPU,
    blocks: int = BLOCKS,
    **how: Any,
) -> Side:
    checkpoint = Checkpoint(path, path.name)
    spec = load_spec(checkpoint)
    quantize, formats = kept_formats(quantize, spec, device, torch.float32)
    weights = load_weights(checkpoint, spec, torch.float32, quantize=quantize, formats=formats)
    model = create_model(spec, weights, device, torch.float32)
    cache = KVCache(spec, blocks, kv_dtype(kv_cache, spec, device, torch.float32), device)
    return Side.make(name, model, cache, chunk_tokens=chunk_tokens, **how)
