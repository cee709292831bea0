"""How many batches there are and how far they are, in one question to the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import and_, func, select

from baton_router.batches.database import Database
from baton_router.batches.tables import batches
from baton_router.batches.values import Status

LATE = 0.9
"""Of the time of a batch: once that much has passed, as much of its lines should be done."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One moment of a ledger."""

    statuses: dict[Status, int] = field(default_factory=dict)
    """Batches by status; those without any are left out."""
    lines_left: int = 0
    """Of batches in progress."""
    runners: int = 0
    """Batches in progress whose lease somebody holds."""
    late: int = 0
    """Batches in progress that are behind."""


def summarize(database: Database, now: float) -> Summary:
    """`now` in seconds of the Unix epoch. Raises StorageUnavailable."""
    columns = batches.c
    done = columns.completed + columns.failed
    passed = columns.created_at + LATE * (columns.expires_at - columns.created_at)
    behind = and_(passed < now, done < LATE * columns.total)
    wanted = select(
        columns.status,
        func.count(),
        func.sum(columns.total - done),
        func.count().filter(columns.leased_until > now),
        func.count().filter(behind),
    ).group_by(columns.status)
    with database.reading() as connection:
        rows = {Status(status): tuple(map(int, rest)) for status, *rest in connection.execute(wanted)}
    _, left, runners, late = rows.get(Status.IN_PROGRESS, (0, 0, 0, 0))
    return Summary({status: counts[0] for status, counts in rows.items()}, left, runners, late)
