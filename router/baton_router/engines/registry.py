"""The engines by kind."""

from __future__ import annotations

import random

from baton_api.engines import EngineKind
from baton_router.engines.baton import BatonEngine
from baton_router.engines.engine_request import EngineDriver
from baton_router.engines.openai import OpenAiEngine
from baton_router.engines.sglang import SglangEngine
from baton_router.engines.vllm import VllmEngine


def all_engines(rng: random.Random) -> dict[EngineKind, EngineDriver]:
    """The engines; `rng` draws the session numbers of SGLang's pairs."""
    engines: tuple[EngineDriver, ...] = (BatonEngine(), VllmEngine(), SglangEngine(rng), OpenAiEngine())
    return {engine.kind: engine for engine in engines}
