"""
The engines, each by its `EngineSpec`, and finding out which one a worker has.

An engine is found out by asking for what only it serves, in the order of `EngineKind`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

from baton_api.workers import EngineKind
from baton_http.upstream import Reply
from baton_router.engines.checks import OK, WorkerApi
from baton_router.engines.engine_request import FAILED
from baton_router.engines.spec import EngineSpec

ENGINES: dict[EngineKind, EngineSpec] = {
    kind: import_module(f"baton_router.engines.{kind}").SPEC for kind in EngineKind
}
"""By kind: the module of that name has it."""

TARGETS = tuple(dict.fromkeys(target for spec in ENGINES.values() for target, _ in spec.signatures))

_objects = msgspec.json.Decoder(dict[str, Any])


async def detect(api: WorkerApi) -> EngineKind | None:
    """
    The engine of a worker; None while it answers nothing by which it is recognized, such as while it starts.

    Raises UpstreamLost and INVALID_REPLY_ERRORS.
    """
    answers: dict[str, dict[str, Any]] = {}
    for kind, spec in ENGINES.items():
        for target, recognizes in spec.signatures:
            if target not in answers:
                reply = await api.get(target)
                # Ready before the next request, a worker that is starting would be taken for another engine.
                if reply.status >= FAILED:
                    return None
                answers[target] = _object(reply)
            if recognizes(answers[target]):
                return kind
    return None


def _object(reply: Reply) -> dict[str, Any]:
    """The JSON object of a reply; empty without one."""
    try:
        return _objects.decode(reply.body) if reply.status == OK else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
