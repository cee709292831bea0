"""
The ledger of files: a row means that the file exists; its bytes are in the object store.

Before its bytes are written, an object's key is recorded as a pending upload. The file's row replaces the
record once all bytes are stored. An aborted upload leaves its record, and its bytes are removed a day later.
A deleted or expired file disappears at once; its bytes are removed when no batch needs them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, text, update

from baton_api.errors import FileNotFound, QuotaExceeded
from baton_batches.database import Database
from baton_batches.tables import batches, bindable, fetch_page, files, pending_uploads
from baton_batches.values import ENDED, StoredFile

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
"""Purposes that an upload may have."""
OUTPUT = "batch_output"

UPLOAD_LIMIT_S = 86_400
"""Seconds after which an upload counts as abandoned; none takes that long."""

TOMBSTONE_S = 86_400
"""Seconds for which a deleted file's row is kept, so that a client can page past it."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file whose bytes are stored."""

    owner: str
    purpose: str
    filename: str
    bytes: int
    sha256: str
    object: str
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class FileQuota:
    """Storage limits of one key; 0: unlimited."""

    files: int = 0
    bytes: int = 0


def new_id(prefix: str) -> str:
    """An id with 128 random bits."""
    return f"{prefix}{secrets.token_hex(16)}"


class FileLedger:
    """Its calls block on the database: make them in a thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin_upload(self, object: str, now: int) -> None:
        """Record a key before its bytes are written."""
        with self._database.writing() as connection:
            connection.execute(insert(pending_uploads).values(object=object, made_at=now))

    def forget_upload(self, object: str) -> None:
        """Remove the record of an upload that left no bytes."""
        with self._database.writing() as connection:
            connection.execute(delete(pending_uploads).where(pending_uploads.c.object == object))

    def abandoned_uploads(self, now: int, limit: int = 100) -> list[str]:
        """Keys of uploads that will not end: remove their bytes, then the record."""
        query = (
            select(pending_uploads.c.object)
            .where(pending_uploads.c.made_at < now - UPLOAD_LIMIT_S)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def add(self, file: NewFile, now: int, quota: FileQuota = FileQuota()) -> StoredFile:
        """Raises QuotaExceeded."""
        with self._database.writing() as connection:
            if quota.files or quota.bytes:
                _check(connection, file, now, quota)
            return add(connection, file, now)

    def held(self, owner: str, now: int) -> tuple[int, int]:
        """Count and bytes of an owner's files."""
        with self._database.reading() as connection:
            return _held(connection, owner, now)

    def get(self, owner: str, id: str, now: int, param: str = "id") -> StoredFile:
        """Raises FileNotFound with `param` as the invalid field."""
        with self._database.reading() as connection:
            row = connection.execute(
                select(files).where(_seen(owner, now), files.c.id == bindable(id))
            ).first()
        if row is None:
            raise FileNotFound(id, param)
        return _file(row)

    def page(
        self,
        owner: str,
        now: int,
        *,
        limit: int,
        after: str = "",
        purpose: str = "",
        newest_first: bool = True,
    ) -> tuple[list[StoredFile], bool]:
        """A page, and whether more follow. Raises InvalidRequest for an unknown `after`."""
        query = select(files).where(_seen(owner, now))
        if purpose:
            query = query.where(files.c.purpose == bindable(purpose))
        with self._database.reading() as connection:
            rows, more = fetch_page(connection, files, owner, query, limit, after, newest_first)
        return [_file(row) for row in rows], more

    def delete(self, owner: str, id: str, now: int) -> None:
        """Raises FileNotFound, also the second time."""
        with self._database.writing() as connection:
            updated = connection.execute(
                update(files).where(_seen(owner, now), files.c.id == bindable(id)).values(deleted_at=now)
            )
        if updated.rowcount == 0:
            raise FileNotFound(id)

    def purge(self, now: int, limit: int = 100) -> int:
        """
        Turn files that are deleted or expired, and that no active batch needs, into abandoned uploads.

        Returns their count; their bytes are removed like those of other abandoned uploads.
        """
        going_on = select(batches.c.input_object).where(
            batches.c.status.not_in([str(object_key) for object_key in ENDED])
        )
        gone = or_(files.c.deleted_at.is_not(None), files.c.expires_at <= now)
        unused = files.c.object.not_in(going_on)
        query = select(files.c.seq, files.c.object).where(gone, files.c.object != "", unused)
        with self._database.writing() as connection:
            # Once the rows are locked no new batch can want them, but one may have come just before.
            locked = {object: seq for seq, object in connection.execute(query.limit(limit).with_for_update())}
            again = going_on.where(batches.c.input_object.in_(locked))
            for object in connection.scalars(again).all():
                del locked[object]
            if locked:
                connection.execute(
                    insert(pending_uploads), [{"object": object_key, "made_at": 0} for object_key in locked]
                )
                connection.execute(
                    update(files)
                    .where(files.c.seq.in_(locked.values()))
                    .values(object="", deleted_at=func.coalesce(files.c.deleted_at, now))
                )
            old = and_(files.c.object == "", files.c.deleted_at < now - TOMBSTONE_S)
            connection.execute(delete(files).where(old))
            return len(locked)


def add(connection: Connection, file: NewFile, now: int) -> StoredFile:
    """Insert a file's row in place of its pending upload, in the caller's transaction."""
    connection.execute(delete(pending_uploads).where(pending_uploads.c.object == file.object))
    values: dict[str, Any] = {
        "id": new_id("file-"),
        "owner": file.owner,
        "purpose": file.purpose,
        "filename": file.filename,
        "bytes": file.bytes,
        "sha256": file.sha256,
        "object": file.object,
        "created_at": now,
        "expires_at": file.expires_at,
    }
    seq = connection.execute(insert(files).values(values).returning(files.c.seq)).scalar_one()
    return StoredFile(seq=seq, deleted_at=None, **values)


def _check(connection: Connection, file: NewFile, now: int, quota: FileQuota) -> None:
    if connection.dialect.name == "postgresql":  # SQLite's one writer is alone anyway
        lock = text("SELECT pg_advisory_xact_lock(hashtext(:owner))")
        connection.execute(lock, {"owner": f"files of {file.owner}"})
    count, size = _held(connection, file.owner, now)
    if quota.files and count + 1 > quota.files:
        raise QuotaExceeded("files", count, quota.files)
    if quota.bytes and size + file.bytes > quota.bytes:
        raise QuotaExceeded("bytes of files", size, quota.bytes)


def _held(connection: Connection, owner: str, now: int) -> tuple[int, int]:
    sums = select(func.count(), func.coalesce(func.sum(files.c.bytes), 0)).where(_seen(owner, now))
    count, size = connection.execute(sums).one()
    return int(count), int(size)


def _seen(owner: str, now: int) -> ColumnElement[bool]:
    lives = or_(files.c.expires_at.is_(None), files.c.expires_at > now)
    return and_(files.c.owner == owner, files.c.deleted_at.is_(None), lives)


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._mapping)
