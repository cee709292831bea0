"""
One database, SQLite or Postgres: its connections, transactions and errors, and the volume of SQLite's file.

The first transaction opens the first connection. A router therefore starts while its database is away, and
serves requests that need no ledger. A lost connection is detected and replaced; transactions that were in
progress on it end with an error that asks the client to retry.

Deleting takes space first: SQLite writes down what changes. A file beside the database therefore keeps some.
When the volume is full, a call that frees space gets the bytes of that file. Nothing is stored until the file
is whole again, so that what was freed is not taken by others.

Calls wait for the disk: make them in a thread.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.pool import ConnectionPoolEntry

from baton_api.errors import BatonError, SetupError, StorageFull, StorageUnavailable
from baton_batches.object_store import DISK_FULL_ERRORS
from baton_batches.tables import migrate

RESERVE = 8 * 1024 * 1024
"""Bytes of the reserve on a large volume."""


VOLUME_SHARE = 16
"""The reserve of a small volume is its size divided by this."""


MEASURED_S = 5.0
"""Seconds for which the measured size of the folder is valid, with what was added since."""


RESERVE_FILE = "reserve"


class StateVolume:
    """The volume of the folder `folder`. Thread-safe."""

    def __init__(
        self, folder: Path, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: bytes that the folder may have; None: as many as the volume has."""
        self._folder = folder
        self._file = folder / RESERVE_FILE
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._whole = False
        """Whether the reserve has its size."""
        self._used = 0
        self._measured_at = -MEASURED_S

    @property
    def reserve(self) -> int:
        """Bytes of the reserve. The folder must exist."""
        return min(RESERVE, self._total() // VOLUME_SHARE)

    def check(self, size: int = 0) -> None:
        """Call before `size` bytes are stored. Raises StorageFull. Does nothing while there is no folder."""
        if not self._folder.exists():
            return
        with self._lock:
            if self._limit is not None:
                now = self._clock()
                if now - self._measured_at >= MEASURED_S or self._used + size > self._limit:
                    self._measured_at, self._used = now, _folder_size(self._folder)
                if self._used + size > self._limit:
                    raise StorageFull("the folder of the router's state")
                self._used += size
            if not self._whole:
                self._fill()
            if not self._whole:
                raise StorageFull("the volume of the router's state")

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the reserve, and take it again at the end as far as there is space."""
        with self._lock:
            self._whole = False
            self._file.unlink(missing_ok=True)
            try:
                yield
            finally:
                self._fill()

    def _fill(self) -> None:
        wanted = size = self.reserve
        page = os.sysconf("SC_PAGE_SIZE")
        while size >= page:
            try:
                _allocate(self._file, size)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS:
                    break  # the volume cannot be written at all, which the next write reports
                size //= 2
            else:
                break
        self._whole = size == wanted

    def _total(self) -> int:
        """Bytes of the volume."""
        volume = os.statvfs(self._folder)
        total = volume.f_blocks * volume.f_frsize
        return total if self._limit is None else min(total, self._limit)


def has_space(folder: Path, size: int) -> bool:
    """Whether the volume of a folder has `size` bytes left."""
    try:
        volume = os.statvfs(folder)
    except OSError:
        return True
    return volume.f_bavail * volume.f_frsize >= size


def _allocate(file: Path, size: int) -> None:
    """Give the file `size` bytes of the volume. Raises OSError; the file is empty then."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            os.pwrite(descriptor, bytes(size), 0)
    except OSError:
        os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)


def _folder_size(folder: Path) -> int:
    """Bytes of all files below a folder, as the volume counts them."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been removed
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size


CONNECTIONS = 8
"""Most at a time; a router has fewer threads than that at work in its ledger."""

POSTGRES: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "options": "-c statement_timeout=30s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s",
}
"""Timeouts and keepalives by which a server that is gone, or hangs, is given up within half a minute."""

SQLITE_BYTES = 64 * 1024
"""Bytes without which SQLite cannot open the files beside a database."""

LOG_PAGES = 1000
"""Pages of SQLite's log after which it is moved into the database, by default."""

DISK_FULL = "53100"
"""Postgres' code."""

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's codes, which its driver reports by the base class of its errors."""


class Database:
    """Transactions. Threads may share it; processes may share what is behind it."""

    def __init__(self, url: str, log_bytes: Callable[[], int] | None = None, busy_s: float = 5.0) -> None:
        """
        `url` is `sqlite:///<path>` or `postgresql://...`; `busy_s` bounds a wait for
        SQLite's one writer. `log_bytes` returns how long SQLite's log should be at most, which is not longer
        than usual; it is called once the folder exists.

        Raises SetupError if it is neither.
        """
        self.place, self._engine = _engine(url, log_bytes, busy_s)
        self._folder = Path(self._engine.url.database or "").parent
        self.dialect = self._engine.dialect.name
        self._opening = threading.Lock()
        self._open = False
        self._closed = False
        event.listen(self._engine, "checkin", self._checked_in)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state. Raises StorageUnavailable."""
        with self._translated(), self._ready(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction, kept whole or not at all. Raises StorageUnavailable and StorageFull."""
        with self._translated(), self._ready(), self._writer().begin() as connection:
            yield connection

    def shrink(self) -> None:
        """Move SQLite's log into the database, if that is possible, so that the log takes no space."""
        if self.dialect != "sqlite":
            return
        with suppress(exc.SQLAlchemyError, sqlite3.Error):
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()

    def close(self) -> None:
        """Close all connections; one that a thread still uses is closed when its transaction ends."""
        self._closed = True
        self._engine.dispose()

    def _checked_in(self, _: object, record: ConnectionPoolEntry) -> None:
        # SQLAlchemy returns it to a pool that was closed already.
        if self._closed:
            record.invalidate()

    def _writer(self) -> Engine:
        return self._engine.execution_options(writes=True)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Create or migrate the schema before the first transaction."""
        if not self._open:
            with self._opening:
                if not self._open:
                    self._make_folder()
                    with self._writer().begin() as connection:
                        migrate(connection)
                    self._open = True
        yield

    def _make_folder(self) -> None:
        if self.dialect == "sqlite":
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise StorageUnavailable(
                    f"The folder {self._folder} of {self.place} cannot be made: {error.strerror}."
                ) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError) or (
                _sqlite_code(error.orig) in DAMAGED
            ):
                raise self._meaning(error.orig) from error
            raise
        except exc.TimeoutError as error:  # no connection of the pool came free
            raise StorageUnavailable("The database of files and batches is overloaded.") from error

    def _meaning(self, error: object) -> BatonError:
        code = _sqlite_code(error)
        if code in DAMAGED:
            return StorageUnavailable(
                f"{self.place} is damaged: {error}. Stop the router, and restore the file from a backup or "
                "move it away; with an empty one, all files and batches are gone."
            )
        if code == sqlite3.SQLITE_FULL or getattr(error, "sqlstate", None) == DISK_FULL:
            return StorageFull(self.place)
        unopened = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
        if unopened and not has_space(self._folder, SQLITE_BYTES):
            return StorageFull(self.place)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StorageUnavailable(f"{self.place} is locked by another process; try again.")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            return StorageUnavailable(f"{self.place} cannot be written: see that its folder can be.")
        return StorageUnavailable(f"{self.place} does not answer; try again.")


def _sqlite_code(error: object) -> int:
    """SQLite's primary result code; 0 for another database."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _engine(url: str, log_bytes: Callable[[], int] | None, busy_s: float) -> tuple[str, Engine]:
    """Return the display name of the database, without its password, and its engine."""
    try:
        parsed = sqlalchemy.make_url(url)
    except exc.ArgumentError as error:
        raise SetupError(
            "The database's URL cannot be read; one looks like postgresql://user@host/name."
        ) from error
    if parsed.drivername == "sqlite" and parsed.database:
        return f"the database {Path(parsed.database).name}", _sqlite(parsed, log_bytes, busy_s)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        parsed = parsed.set(drivername="postgresql+psycopg")
        engine = create_engine(
            parsed,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=10,
            pool_pre_ping=True,
            connect_args=POSTGRES,
        )
        return f"the database at {parsed.host or 'a local socket'}", engine
    raise SetupError(
        f"The database's URL begins with {parsed.drivername!r}; known are postgresql:// and sqlite:///."
    )


def _sqlite(url: sqlalchemy.URL, log_bytes: Callable[[], int] | None, busy_s: float) -> Engine:
    # Without isolation level the driver begins nothing by itself, and the transactions are exactly ours.
    arguments = {"timeout": busy_s, "check_same_thread": False, "isolation_level": None}
    engine = create_engine(url, pool_size=CONNECTIONS, max_overflow=0, connect_args=arguments)

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _: object) -> None:
        _write_ahead(connection, busy_s)
        connection.execute("PRAGMA synchronous = FULL")  # acknowledged writes survive a loss of power
        if log_bytes is not None:
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            pages = max(1, min(LOG_PAGES, log_bytes() // page))
            connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        # A writer that begins as a reader may find, once it writes, that another was faster, and fail.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _write_ahead(connection: sqlite3.Connection, busy_s: float) -> None:
    """
    Have readers and a writer not wait for each other.

    SQLite itself does not wait while two first users of an empty file both want this: one hears
    SQLITE_BUSY at once, whatever its timeout is.
    """
    until = time.monotonic() + busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.01)
