"""
Lists of workers from sources, merged, and the changes between two lists.

A source always reports its complete list, so that a missed change is repaired by the next list. Lists of
several sources are merged independently of their order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton_api.workers import EngineKind, Role


class ListedStatus(enum.IntEnum):
    """A worker's status by its source; of two, the greater one counts."""

    SERVING = 0
    UNREADY = 1
    """It exists, but cannot serve now."""
    TERMINATING = 2
    """It will stop and takes no new requests."""


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker of a list."""

    host: str
    port: int
    role: Role
    """DECODE or PREFILL; role both is listed as DECODE."""
    revision: str = ""
    """Its revision; workers of different revisions are never a pair."""
    discovery_status: ListedStatus = ListedStatus.SERVING
    secure: bool = False
    """Whether TLS is used."""
    engine: EngineKind | None = None
    """Its engine; None if unknown."""

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def same(self, other: ListedWorker) -> bool:
        """Whether both are one worker. An address may be reused by a pod of another role or revision."""
        own, others = ((one.name, one.role, one.revision, one.secure, one.engine) for one in (self, other))
        return own == others


@dataclass(frozen=True, slots=True)
class ListChanges:
    """From one list to the next. A worker that became another one is removed and added."""

    added: tuple[ListedWorker, ...] = ()
    status_changed: tuple[ListedWorker, ...] = ()
    """Workers with another status."""
    removed: tuple[str, ...] = ()
    """By name; apply before `added`, which may reuse the names."""

    def __bool__(self) -> bool:
        return bool(self.added or self.status_changed or self.removed)


def merge_lists(listed: Iterable[ListedWorker]) -> dict[str, ListedWorker]:
    """Workers by name; conflicting entries are merged independently of their order."""
    workers: dict[str, ListedWorker] = {}
    for worker in listed:
        other = workers.get(worker.name)
        workers[worker.name] = worker if other is None else _merge_entries(worker, other)
    return workers


def list_changes(present: Mapping[str, ListedWorker], desired: Mapping[str, ListedWorker]) -> ListChanges:
    """The changes from `present` to `desired`, both by name."""
    added, status_changed, removed = [], [], []
    for name, wanted in sorted(desired.items()):
        current = present.get(name)
        if current is None or not current.same(wanted):
            added.append(wanted)
        elif current != wanted:
            status_changed.append(wanted)
    for name, current in sorted(present.items()):
        left = desired.get(name)
        if left is None or not current.same(left):
            removed.append(name)
    return ListChanges(tuple(added), tuple(status_changed), tuple(removed))


def _merge_entries(one: ListedWorker, other: ListedWorker) -> ListedWorker:
    return ListedWorker(
        one.host,
        one.port,
        min(one.role, other.role),
        max(one.revision, other.revision),
        max(one.discovery_status, other.discovery_status),
        one.secure or other.secure,
        max(filter(None, (one.engine, other.engine)), default=None),
    )
