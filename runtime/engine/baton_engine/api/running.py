"""The running requests, by the ids with which clients can abort them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from baton_api import limits
from baton_engine.api.fields import Fields, wrong_type


class Abortable(Protocol):
    """A request that can be aborted from outside."""

    def abort(self) -> None:
        """Abort the request: its handler raises RequestAborted."""
        ...


class Running:
    """Registry of running requests. Several requests may share a name. Use it on the event loop only."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Abortable]] = {}

    @contextlib.contextmanager
    def entered(self, names: Iterable[str], request: Abortable) -> Iterator[None]:
        """Register `request` under each of `names` for the duration of the context."""
        distinct = set(names)
        for name in distinct:
            self._by_name.setdefault(name, []).append(request)
        try:
            yield
        finally:
            for name in distinct:
                entries = self._by_name[name]
                entries.remove(request)
                if not entries:
                    del self._by_name[name]

    def abort(self, name: str) -> int:
        """Abort the requests with this name. Returns their number."""
        return self._end(self._by_name.get(name, ()))

    def abort_all(self) -> int:
        return self._end(request for entries in self._by_name.values() for request in entries)

    def _end(self, requests: Iterable[Abortable]) -> int:
        distinct = {id(request): request for request in requests}
        for request in distinct.values():
            request.abort()
        return len(distinct)


def read_names(fields: Fields) -> tuple[str, ...]:
    """Read the names that a request sets: `request_id` and `rid`, a string or a list."""
    given = fields.get("rid")
    if isinstance(given, list):
        names = [*(fields.array("rid", limits.ABORTS.most) or ())]
        for position, name in enumerate(names):
            param = fields.param(f"rid[{position}]")
            if not isinstance(name, str):
                raise wrong_type(param, "a string", name)
            Fields({param: name}).text(param, limits.REQUEST_ID.most)
    else:
        names = [fields.text("rid", limits.REQUEST_ID.most)]
    names.append(fields.text("request_id", limits.REQUEST_ID.most))
    return tuple(name for name in names if name)
