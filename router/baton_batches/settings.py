"""Settings of files and batches; they are fields of the router's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_api import limits
from baton_api.sizes import Bytes


class BatchSettings(BaseSettings):
    """Where files and batches are kept, and how much of them."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    state: str = ""
    """Folder of what outlives the router: the database of files and batches and, unless `--files-store` says
    otherwise, the files. Empty: `baton/router-<port>` in $XDG_STATE_HOME or ~/.local/state; with `--port 0`,
    which nobody finds again, a folder that is removed at the end."""

    database: SecretStr = SecretStr("")
    """URL of the database of files and batches, `postgresql://user:password@host/name`, for several routers
    that share their batches; they need a common `--files-store` too. Set it by environment. Empty: SQLite in
    the state folder."""

    files_store: str = ""
    """Where the contents of files lie: a folder, or `s3://bucket/prefix` with credentials as for other tools
    of AWS. Empty: the state folder. Give a bucket a rule that removes incomplete uploads."""

    files_endpoint: str = ""
    """URL of an S3 server that is not Amazon's, such as http://minio:9000."""

    file_limit: Bytes = Field(default=512 * 1024**2, ge=1)
    """Most bytes of one uploaded file; more are refused with 413."""

    files_per_key: int = Field(default=10_000, ge=0)
    """Most files that one API key keeps, counted when one is uploaded; 0: no bound."""

    file_bytes_per_key: Bytes = Field(default=100 * 1024**3, ge=0)
    """Most bytes of files that one API key keeps; 0: no bound."""

    batch_file_limit: Bytes = Field(default=200 * 1024**2, ge=1)
    """Most bytes of a batch's input file."""

    batch_lines: int = Field(default=50_000, ge=1)
    """Most requests of one batch."""

    batch_line_limit: Bytes = Field(default=limits.BODY.most, ge=1024)
    """Most bytes of one line of a batch's input file."""

    batches_kept_s: int = Field(default=30 * 86_400, ge=0)
    """Seconds after the end of its window for which an ended batch can be looked at. Its files have their own
    time: 30 days after they were made, if nothing else was asked for."""

    batch_poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the batches of a database that other routers write to as well."""

    batch_execution: Literal["subprocess", "external", "off"] = "subprocess"
    """Who runs the lines of batches: processes that this router starts, somebody else, such as Jobs that an
    operator starts in Kubernetes, or nobody: then batches are taken and wait."""

    batch_jobs: str = ""
    """Name of the InferenceService whose router this is, in a pod of Kubernetes with `--batch-execution
    external`: for each batch a BatchJob is made, and its pods are let in. The router's account must be
    allowed to create batchjobs of baton.dev and to patch their status, in its namespace, and nothing else.
    Empty: whoever runs batches brings a token of `--batch-secret`."""

    batch_jobs_uid: str = ""
    """The uid of that InferenceService: with it, Kubernetes deletes its BatchJobs when it is deleted."""

    batch_parallel: int = Field(default=2, ge=1)
    """Most batches that this router runs at a time. The others wait; owners take turns."""

    batch_window: int = Field(default=0, ge=0)
    """Most lines of one batch that are under way at a time. The runner sends as many as help, up to this. 0:
    64 for each decode worker, and at least 512."""

    batch_window_beside: int = Field(default=16, ge=1)
    """The same for each decode worker while others send requests too, or have within the last ten seconds: a
    worker that has a line goes on with it, however urgent what comes next is."""

    batch_line_s: float = Field(default=3600.0, gt=0)
    """Seconds that one try at a line of a batch may take, the wait for its turn included; a line may have
    three."""

    batch_lease_s: float = Field(default=15.0, ge=1)
    """Seconds after which a runner of a batch that is not heard of may be replaced."""

    batch_secret: SecretStr = SecretStr("")
    """Signs the tokens of runners; routers that share a database share it too if their runners are started by
    somebody else. Empty: the routers create one at random and keep it in --database; without a database they
    derive it from --ticket-secret. Set it by environment."""
