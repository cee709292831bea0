"""A batch and its results as rows: found, locked, changed, and read as the values that they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Table, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from baton_api.errors import BatchNotFound, StaleLease
from baton_batches.database import bindable
from baton_batches.schema import batches, results
from baton_batches.values import Batch, LineError, Result, Status

_errors = msgspec.json.Decoder(tuple[LineError, ...])
_texts = msgspec.json.Decoder(dict[str, str])
_names = msgspec.json.Decoder(list[str])
_counts = msgspec.json.Decoder(dict[str, int])


def fetch(connection: Connection, id: str, lock: bool = True) -> Batch:
    """The batch, and no one else writes it before this transaction ends. Raises BatchNotFound."""
    wanted = select(batches).where(batches.c.id == bindable(id))
    row = connection.execute(wanted.with_for_update() if lock else wanted).first()
    if row is None:
        raise BatchNotFound(id)
    return batch_of(row)


def held(connection: Connection, id: str, epoch: int) -> Batch:
    """The same for the holder of this epoch. Raises StaleLease."""
    batch = fetch(connection, id)
    if batch.epoch != epoch or batch.status.ended:
        raise StaleLease(id, epoch, batch.epoch, batch.status)
    return batch


def free(
    connection: Connection,
    now: float,
    statuses: Iterable[Status],
    limit: int,
    without: Collection[str],
    *more: ColumnElement[bool],
) -> list[Batch]:
    """
    Batches of these statuses that nobody holds, but for the ids in `without`.

    However many batches one owner has, the oldest of every other owner is among the first.
    """
    of_owner = func.row_number().over(partition_by=batches.c.owner, order_by=batches.c.seq)
    found = select(batches.c.seq, of_owner.label("place")).where(
        batches.c.status.in_([str(status) for status in statuses]),
        batches.c.leased_until <= now,
        batches.c.id.not_in(without),
        *more,
    )
    ranked = found.subquery()
    wanted = select(batches).join(ranked, ranked.c.seq == batches.c.seq)
    rows = connection.execute(wanted.order_by(ranked.c.place, batches.c.seq).limit(limit))
    return [batch_of(row) for row in rows]


def change(connection: Connection, batch: Batch, **values: Any) -> Batch:
    """The batch with these values in its row."""
    row = connection.execute(
        update(batches).where(batches.c.seq == batch.seq).values(values).returning(*batches.c)
    ).one()
    return batch_of(row)


def batch_of(row: Row[Any]) -> Batch:
    values = dict(row._mapping)
    values["status"] = Status(values["status"])
    values["metadata"] = values["metadata"] and _texts.decode(values["metadata"])
    values["errors"] = _errors.decode(values["errors"]) if values["errors"] else ()
    values["models"] = values["models"] and frozenset(_names.decode(values["models"]))
    values["usage"] = values["usage"] and _counts.decode(values["usage"])
    return Batch(**values)


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def keep(connection: Connection, seq: int, found: Iterable[Result]) -> Sequence[int]:
    """The HTTP statuses of those lines that had no result before."""
    rows = [
        {"batch": seq, "line": one.line, "status": one.status, "request_id": one.request_id, "body": one.body}
        for one in found
    ]
    if not rows:
        return ()
    return connection.scalars(insert_new(connection, results).returning(results.c.status), rows).all()


def insert_new(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An insertion that leaves out rows whose key is there already."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def finalizing(connection: Connection, batch: Batch, now: int) -> Batch:
    """With the last result the batch is ready to be rendered, by whoever takes it."""
    if batch.status is not Status.IN_PROGRESS or batch.done < batch.total:
        return batch
    return change(connection, batch, status=Status.FINALIZING, finalizing_at=now, runner="", leased_until=0.0)
