"""
The workers that somebody lists, and what has changed since they were last listed.

A source of workers (flags, DNS, Kubernetes) says at any time who there is, all of them at once, and never
what has changed: whoever missed a change is right again with the next list. What several sources say is
one list too, whatever the order in which they said it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton_api.workers import Role


class ListedStatus(enum.IntEnum):
    """What is said of a worker beside its address; of two that differ the greater one counts."""

    SERVING = 0
    UNREADY = 1
    """It is there and cannot serve now."""
    TERMINATING = 2
    """It is about to end: nothing new for it."""


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker."""

    host: str
    port: int
    role: Role
    """DECODE or PREFILL: what requests are sent there for. A worker of role both is listed as DECODE."""
    revision: str = ""
    """The generation that it belongs to; workers of different ones are never a pair."""
    standing: ListedStatus = ListedStatus.SERVING
    secure: bool = False
    """Whether it is spoken to by TLS."""

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def same(self, other: ListedWorker) -> bool:
        """Whether both are one worker. An address may be given to a pod of another role or generation."""
        own, others = ((one.name, one.role, one.revision, one.secure) for one in (self, other))
        return own == others


@dataclass(frozen=True, slots=True)
class ListChanges:
    """From one list to the next. A worker that became another one has gone and has come."""

    added: tuple[ListedWorker, ...] = ()
    status_changed: tuple[ListedWorker, ...] = ()
    """Those that stand otherwise now."""
    removed: tuple[str, ...] = ()
    """By name; to be seen to before those who came, who may have the same ones."""

    def __bool__(self) -> bool:
        return bool(self.added or self.status_changed or self.removed)


def merge_lists(listed: Iterable[ListedWorker]) -> dict[str, ListedWorker]:
    """By name, each once: what is said twice of an address is made one, in whatever order it came."""
    workers: dict[str, ListedWorker] = {}
    for one in listed:
        other = workers.get(one.name)
        workers[one.name] = one if other is None else _merge_entries(one, other)
    return workers


def list_changes(present: Mapping[str, ListedWorker], desired: Mapping[str, ListedWorker]) -> ListChanges:
    """What makes `present` become `desired`; both are by name."""
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
        max(one.standing, other.standing),
        one.secure or other.secure,
    )
