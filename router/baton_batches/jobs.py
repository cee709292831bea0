"""
The assignment of batches to BatchJobs: one column of the batch's row, set once and cleared at the end.

A router creates a BatchJob for each batch without one. A batch that a BatchJob created from a file names that
BatchJob in its metadata, and waits for it. Calls wait for the database: make them in a thread.
"""

from __future__ import annotations

from sqlalchemy import or_, select, update

from baton_api import batch_jobs
from baton_api.errors import Unauthorized
from baton_batches.database import Database
from baton_batches.tables import batch_of, batches, change_batch, fetch_batch
from baton_batches.values import BatchRecord, BatchStatus


class BatchJobAssignments:
    """All batches' BatchJobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, id: str, job: str) -> BatchRecord:
        """
        The batch, run by this BatchJob from now on.

        Raises BatchNotFound, and Unauthorized if it is for another.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            meant = batch.job or (batch.metadata or {}).get(batch_jobs.METADATA, "").partition("/")[0]
            if meant and meant != job:
                raise Unauthorized(token=f"is of the BatchJob {job}, and {id} is for the BatchJob {meant}")
            return batch if batch.job or batch.status.ended else change_batch(connection, batch, job=job)

    def disown(self, id: str, job: str) -> None:
        """Detach the batch from a BatchJob that is deleted, or that knows that the batch has ended."""
        with self._database.writing() as connection:
            connection.execute(update(batches).where(batches.c.id == id, batches.c.job == job).values(job=""))

    def missing(self, limit: int = 100) -> list[BatchRecord]:
        """Batches with lines to run and no BatchJob that would, the oldest first."""
        meant = f'%"{batch_jobs.METADATA}"%'
        query = select(batches).where(
            batches.c.status == BatchStatus.IN_PROGRESS.value,
            batches.c.job == "",
            or_(batches.c.metadata.is_(None), batches.c.metadata.not_like(meant)),
        )
        with self._database.reading() as connection:
            return [batch_of(row) for row in connection.execute(query.order_by(batches.c.seq).limit(limit))]

    def assigned(self) -> list[BatchRecord]:
        """Batches with a BatchJob, whose status follows them."""
        query = select(batches).where(batches.c.job != "").order_by(batches.c.seq)
        with self._database.reading() as connection:
            return [batch_of(row) for row in connection.execute(query)]
