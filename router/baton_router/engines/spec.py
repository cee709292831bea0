"""
What the router knows of one engine, in one value: how it is recognized, checked, driven and paired.

Each engine's module ends with its `SPEC`, and `registry` lists them. Nothing else asks which engine a worker
has, but for what only Baton's own workers can do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_router.cache.tiers import Tier
from baton_router.engines.checks import EngineChecks, WorkerApi
from baton_router.engines.engine_request import EngineDriver


def unchanged(path: str, body: bytes, salt: str) -> bytes:
    return body


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine."""

    title: str
    """Its name for people."""
    signatures: Sequence[tuple[str, Callable[[Mapping[str, Any]], bool]]]
    """Targets of GET, and whether the JSON object of the answer is one of this engine."""
    checks: Callable[[WorkerApi], EngineChecks]
    driver: Callable[[random.Random], EngineDriver]
    """Its argument draws the numbers of transfers."""
    tried: str = ""
    """The version whose protocol the router follows. Empty: its workers report none."""
    pairs: bool = True
    """Whether its workers form pairs."""
    no_connector: str = ""
    """What a worker lacks that reports no `Load.compatibility`, and the flag. Empty: all report it."""
    single_body: Callable[[str, bytes, str], bytes] = unchanged
    """
    The body of a request to a path that one worker gets from a gateway, with a tenant's cache salt (empty
    without one).

    Raises InvalidRequest if the client sets what only routers may set: the transfer of KV blocks.
    """
    cleared_tiers: tuple[Tier, ...] = ()
    """
    Tiers that its KV event `AllBlocksCleared` clears besides the accelerator's memory.

    Without effect while answers do not name the prompt's blocks, as SGLang's: nothing is expected of tiers.
    """
