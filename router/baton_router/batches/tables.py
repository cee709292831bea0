"""The ledger's tables as SQLAlchemy Core knows them; how they came to be is in `migrations`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Integer, LargeBinary, MetaData, Table, Text

METADATA = MetaData()

files = Table(
    "files",
    METADATA,
    Column("seq", BigInteger, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("deleted_at", BigInteger),
)

promises = Table(
    "promises",
    METADATA,
    Column("object", Text, primary_key=True),
    Column("made_at", BigInteger, nullable=False),
)

batches = Table(
    "batches",
    METADATA,
    Column("seq", BigInteger, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file", Text, nullable=False),
    Column("input_object", Text, nullable=False),
    Column("input_bytes", BigInteger, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("metadata", Text),
    Column("output_seconds", BigInteger),
    Column("status", Text, nullable=False),
    Column("model", Text),
    Column("errors", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("total", BigInteger, nullable=False),
    Column("completed", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("usage", Text),
    Column("runner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("leased_until", Double, nullable=False),
    Column("job", Text, nullable=False),
    Column("models", Text),
)

results = Table(
    "results",
    METADATA,
    Column("batch", BigInteger, primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("status", Integer, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

kept_secrets = Table(
    "secrets",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
