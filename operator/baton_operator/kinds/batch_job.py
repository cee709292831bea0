"""
`BatchJob`: a file of requests that a service processes with spare capacity.

A Kubernetes Job runs it. The pod template of a Job is immutable, and so are the fields that enter it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import (
    Anything,
    Conditions,
    Count,
    Duration,
    Label,
    Part,
    Rule,
    between,
    rules,
)


def _immutable(field: str) -> Rule:
    same = f"(!has(self.{field}) || self.{field} == oldSelf.{field})"
    return Rule(
        f"has(self.{field}) == has(oldSelf.{field}) && {same}", f"{field} cannot be changed", f".{field}"
    )


@rules(
    Rule(
        "has(self.batchId) != has(self.inputFileId)",
        "set either batchId (a batch that exists in the API) or inputFileId (a file to create a batch from)",
    ),
    Rule(
        "has(self.inputFileId) || !has(self.apiKeySecretRef)",
        "apiKeySecretRef needs inputFileId: a batch with batchId already has an owner",
        ".apiKeySecretRef",
    ),
    Rule(
        "has(self.inputFileId) || !has(self.completionWindow)",
        "completionWindow needs inputFileId: a batch with batchId has its own completion_window",
        ".completionWindow",
    ),
    *map(
        _immutable,
        (
            *("serviceName", "batchId", "inputFileId", "endpoint", "apiKeySecretRef"),
            *("completionWindow", "concurrency", "parallelism", "maxRetries", "queueName"),
        ),
    ),
)
class BatchJobSpec(Part):
    """Requests to process, and how fast."""

    service_name: Label
    """Name of the InferenceService in the same namespace that processes the requests. Its
    spec.router.batches.execution must be Jobs. Immutable."""

    batch_id: Annotated[str, Field(max_length=64, pattern=r"^batch_[A-Za-z0-9]+$")] | None = None
    """ID of a batch created by POST /v1/batches. Routers create such BatchJobs themselves. Excludes
    inputFileId. Immutable."""

    input_file_id: Annotated[str, Field(max_length=64, pattern=r"^file-[A-Za-z0-9]+$")] | None = None
    """ID of a file uploaded by POST /v1/files. The operator creates a batch from it. Excludes batchId.
    Immutable."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = (
        "/v1/chat/completions"
    )
    """API endpoint for the requests of inputFileId. Immutable."""

    api_key_secret_ref: SecretReference | None = None
    """Secret whose key `key` holds the API key that creates the batch from inputFileId. Immutable."""

    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Maximum requests in flight, of all pods together. Immutable."""

    parallelism: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of the Job's pods. They share the requests. More than one is useful if one processor core cannot
    send requests as fast as the service answers them. Immutable."""

    max_retries: Annotated[int, Field(ge=0, le=100)] = 6
    """Maximum failures of each of the Job's pods before the BatchJob fails. Evictions and preemptions do not
    count. Immutable."""

    completion_window: Annotated[Duration, between("1m", "720h")] | None = None
    """Maximum duration of the batch created from inputFileId, from its creation, including time suspended.
    After it the batch expires: finished answers can be downloaded, the other requests are reported as errors.
    Default: 24h. Immutable."""

    ttl_after_finished: Annotated[Duration, between("1m", "8760h")] = Duration("168h")
    """Time after the end until the Job is deleted, together with a BatchJob that a router created. The batch
    and its files remain."""

    suspend: bool = False
    """Stops processing: the Job's pod is deleted. Finished answers are kept, and the completion window keeps
    running."""

    queue_name: Label | None = None
    """Name of a Kueue LocalQueue that admits the Job. Immutable."""

    pod_template: Anything | None = None
    """PodTemplateSpec that is merged over the one that the operator generates. The container is named main. A
    later change affects only new Jobs; the condition UpToDate reports that."""


class BatchJobStatus(Part):
    """Progress of the batch."""

    observed_generation: Count = 0
    """Value of metadata.generation that the operator last processed."""

    batch_id: Annotated[str, Field(max_length=64)] = ""
    """ID of the batch in the API."""

    phase: Annotated[str, Field(max_length=32)] = ""
    """Status of the batch in the API: validating, in_progress, finalizing, completed, failed, expired,
    cancelling or cancelled."""

    total: Count = 0
    """Requests in the file."""

    completed: Count = 0
    """Requests that were answered."""

    failed: Count = 0
    """Requests that failed."""

    output_file_id: Annotated[str, Field(max_length=64)] = ""
    """ID of the file with the answers."""

    error_file_id: Annotated[str, Field(max_length=64)] = ""
    """ID of the file with the failed requests."""

    conditions: Conditions = []
    """Complete: all requests are processed. Failed: the batch ended otherwise, or no pod will process it any
    more; reason says why. Suspended: spec.suspend or the queue stops it. UpToDate: the Job uses the current
    podTemplate."""
