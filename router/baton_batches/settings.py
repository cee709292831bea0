"""Settings of files and batches. They are part of the router's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_api import limits
from baton_api.setting_types import Bytes


class BatchSettings(BaseSettings):
    """Storage, limits and execution of files and batches."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    GROUPS: ClassVar[Mapping[str, str]] = {
        "state": "Files",
        "batch_file_limit": "Batches",
    }
    """The first setting of each group in the help, and the title of the group."""

    # --- Files ---

    state: str = ""
    """Folder for data that outlives the router: the database of files and batches and, without --files-store,
    the files. Empty: `baton/router-PORT` in $XDG_STATE_HOME or ~/.local/state; with --port 0 a
    temporary folder."""

    state_limit: Bytes | None = Field(default=None, ge=1024 * 1024)
    """Maximum size of the --state folder, for volumes that a process must not fill. Uploads and batches
    beyond it are rejected with 507. Empty: the size of its volume. A 16th of it, at most 8 MiB, is
    reserved, so that files can be deleted and batches cancelled when it is full."""

    database: SecretStr = SecretStr("")
    """URL of a database of files and batches that several routers share:
    `postgresql://user:password@host/name`. They need a common --files-store too. Set it by the
    environment variable. Empty: SQLite in the --state folder."""

    files_store: str = ""
    """Location of file contents: a folder, or `s3://bucket/prefix` with the usual AWS credentials. Give the
    bucket a rule that removes incomplete uploads. Empty: the --state folder."""

    files_endpoint: str = ""
    """URL of an S3 server other than AWS, such as http://minio:9000."""

    file_limit: Bytes = Field(default=512 * 1024**2, ge=1)
    """Maximum size of an uploaded file. Larger files are rejected with 413."""

    files_per_key: int = Field(default=10_000, ge=0)
    """Maximum number of files per API key, checked at upload. 0: unlimited."""

    file_bytes_per_key: Bytes = Field(default=100 * 1024**3, ge=0)
    """Maximum total size of files per API key. 0: unlimited."""

    # --- Batches ---

    batch_file_limit: Bytes = Field(default=200 * 1024**2, ge=1)
    """Maximum size of a batch's input file."""

    batch_lines: int = Field(default=50_000, ge=1)
    """Maximum number of requests per batch."""

    batch_line_limit: Bytes = Field(default=limits.BODY.most, ge=1024)
    """Maximum size of one line of a batch's input file."""

    batches_kept_s: int = Field(default=30 * 86_400, ge=0)
    """Time for which an ended batch can be retrieved, from the end of its completion window. Its files expire
    separately: by default 30 days after their creation."""

    batch_poll_s: float = Field(default=1.0, gt=0)
    """Interval between reads of a database that other routers also write to."""

    batch_execution: Literal["subprocess", "external", "off"] = "subprocess"
    """Runner of batches. subprocess: processes started by this router. external: other processes, such as
    Kubernetes Jobs. off: batches are accepted and wait."""

    batch_jobs: str = ""
    """Name of the router's InferenceService, in Kubernetes with --batch-execution external. The router
    creates a BatchJob per batch and accepts its pods. The ServiceAccount needs create on batchjobs of
    baton.dev and patch on their status in its namespace. Empty: runners authenticate by a token signed
    with --batch-secret."""

    batch_jobs_uid: str = ""
    """UID of that InferenceService. Kubernetes then deletes its BatchJobs together with it."""

    batch_parallel: int = Field(default=2, ge=1)
    """Maximum number of runners that this router starts at once. Other batches wait; owners take turns."""

    batch_runners: int = Field(default=1, ge=1)
    """Maximum number of runners of one batch. They share its lines and its limit of lines in flight. With
    --batch-jobs: the parallelism of new BatchJobs."""

    batch_window: int = Field(default=0, ge=0)
    """Maximum number of lines of one batch in flight. The runner sends as many as increase the throughput, up
    to this limit. 0: 64 per decode worker, at least 512."""

    batch_window_when_busy: int = Field(default=16, ge=1)
    """The same limit per decode worker while other clients send requests, or did within the last ten seconds.
    Workers do not interrupt a line for a more urgent request."""

    batch_line_s: float = Field(default=3600.0, gt=0)
    """Maximum time of one attempt at a line, including its queue time. A line has three attempts."""

    batch_lease_s: float = Field(default=15.0, ge=1)
    """Time without a sign of life after which a batch is taken from its runner."""

    batch_secret: SecretStr = SecretStr("")
    """Secret that signs runners' tokens. Routers that share a database and have external runners must share
    it. Set it by the environment variable. Empty: a random secret in --database, or without a database
    one derived from --ticket-secret."""
