"""Where a service keeps files and batches, and who runs the lines of batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Part, Rule, Subdomain, rules


@rules(
    Rule("has(self.claimName) != has(self.uri)", "files has either claimName or uri"),
    Rule(
        "has(self.uri) || (!has(self.endpoint) && !has(self.credentialsSecretRef))",
        "endpoint and credentialsSecretRef are for files with uri",
    ),
)
class FileStore(Part):
    """Where the contents of files lie, for all routers."""

    claim_name: Subdomain | None = None
    """A PersistentVolumeClaim that all routers can write to (ReadWriteMany if they are several)."""

    uri: Annotated[str, Field(max_length=1024, pattern=r"^s3://[^/]+(/.*)?$")] | None = None
    """A bucket, and a folder in it: s3://BUCKET/PREFIX."""

    endpoint: Annotated[str, Field(max_length=1024, pattern=r"^https?://[^/]+")] | None = None
    """URL of an S3 server that is not Amazon's."""

    credentials_secret_ref: SecretReference | None = None
    """A Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and whatever else is to be in the routers'
    environment."""


@rules(
    Rule(
        "has(self.databaseSecretRef) == has(self.files)",
        "batches that outlive a router need both, databaseSecretRef and files",
    ),
)
class BatchSettings(Part):
    """Files and batches. Without a database they are each router's own, and end with its pod."""

    execution: Literal["Subprocess", "Jobs"] = "Subprocess"
    """Who runs the lines of batches: processes that a router starts beside itself, or a Job for each batch,
    which takes a BatchJob."""

    database_secret_ref: SecretReference | None = None
    """A Secret with the key `url`: the Postgres that keeps files and batches for all routers,
    postgresql://USER:PASSWORD@HOST/NAME. With the key `runners` it may have the secret by which routers know
    runners; it is made of the URL otherwise."""

    files: FileStore | None = None
    """Where the contents of files lie."""
