"""`/health_generate`: one token of a prompt that nobody has asked before, through all that requests pass."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid

from baton_api.errors import NotReady
from baton_engine.requests import RemotePrefill, Request, SamplingParams
from baton_engine.server.served import Served

PATIENCE_S = 20.0
"""Seconds that the token may take."""


async def generate_one(served: Served, remote: RemotePrefill | None = None) -> None:
    """
    Generate one token. With `remote`, its worker must have computed the prompt.

    Raises NotReady if that took too long or went another way, and what the engine raises.
    """
    relayed = False
    request = _request(served, remote)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            contextlib.aclosing(served.engine.generate(request)) as outputs,
        ):
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                relayed = relayed or output.relay is not None
    except TimeoutError as error:
        raise NotReady(f"No token was generated within {PATIENCE_S:.0f} s.") from error
    if remote is not None and not relayed:
        raise NotReady("The prefill worker did not bring the prompt; it was computed by the decode worker.")


def _request(served: Served, remote: RemotePrefill | None) -> Request:
    """Long enough that a decode worker does not rather compute it itself; too new to be in a cache."""
    size = served.engine.snapshot().block_size
    wanted = served.settings.local_prefill_tokens + size + 1 if remote is not None else size + 1
    length = max(1, min(wanted, served.max_model_len - 1))
    prompt = tuple(secrets.randbelow(served.vocabulary.size) for _ in range(length))
    name = f"health-{uuid.uuid4().hex}"
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=1), salt=name, remote=remote)
