"""
`BatchJob`: a file of requests, answered by a service with what interactive requests leave over.

A Job runs it whose pod template cannot be changed, so what goes into the template cannot be either.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Anything, Label, Part, Rule, rules
from baton_operator.kinds.status import Conditions

Count = Annotated[int, Field(ge=0)]


def _fixed(field: str) -> Rule:
    """It is as it was, or was not given and is not."""
    same = f"(!has(self.{field}) || self.{field} == oldSelf.{field})"
    return Rule(
        f"has(self.{field}) == has(oldSelf.{field}) && {same}", f"{field} cannot be changed", f".{field}"
    )


@rules(
    Rule(
        "has(self.batchId) != has(self.inputFileId)",
        "a BatchJob has either batchId (a batch of the API) or inputFileId (a file, of which one is made)",
    ),
    Rule(
        "has(self.inputFileId) || !has(self.apiKeySecretRef)",
        "apiKeySecretRef is for inputFileId: a batch of the API has an owner already",
        ".apiKeySecretRef",
    ),
    Rule(
        "has(self.inputFileId) || !has(self.completionWindowSeconds)",
        "completionWindowSeconds is for inputFileId: a batch of the API has its completion_window",
        ".completionWindowSeconds",
    ),
    *map(
        _fixed,
        (
            *("serviceName", "batchId", "inputFileId", "endpoint", "apiKeySecretRef"),
            *("concurrency", "maxRetries", "queueName", "completionWindowSeconds"),
        ),
    ),
)
class BatchJobSpec(Part):
    """What is to be answered, and with how much haste."""

    service_name: Label
    """The InferenceService that answers; its spec.router.batches.execution has to be Jobs."""

    batch_id: Annotated[str, Field(max_length=64, pattern=r"^batch_[A-Za-z0-9]+$")] | None = None
    """A batch that was made by POST /v1/batches. Routers make such BatchJobs by themselves."""

    input_file_id: Annotated[str, Field(max_length=64, pattern=r"^file-[A-Za-z0-9]+$")] | None = None
    """A file that was uploaded by POST /v1/files, of which a batch is made."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = (
        "/v1/chat/completions"
    )
    """Where the requests of inputFileId go."""

    api_key_secret_ref: SecretReference | None = None
    """A Secret with the file `key`: the API key by which the batch is made of inputFileId."""

    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Most requests at once."""

    max_retries: Annotated[int, Field(ge=0, le=100)] = 6
    """How often its pod may fail; one that was evicted, preempted or told to end does not count."""

    completion_window_seconds: Annotated[int, Field(ge=60, le=2_592_000)] | None = None
    """Seconds that the batch made of inputFileId has, from when it is made, also while it rests; 24 hours if
    it is left out. Then it is expired: what was answered can be fetched, and the other requests are
    errors."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=60, le=31_536_000)] = 604_800
    """Seconds after the end until the Job is deleted, and a BatchJob that a router has made with it; the
    batch and its files stay."""

    suspend: bool = False
    """Whether it rests. What is answered stays answered, and the batch's time runs on."""

    queue_name: Label | None = None
    """A LocalQueue of Kueue that admits it."""

    pod_template: Anything | None = None
    """A PodTemplateSpec that is merged over what the operator makes; the runner's container is called
    main. What is changed here later holds for a Job that is made later: status says so."""


class BatchJobStatus(Part):
    """How far it is."""

    observed_generation: Count = 0
    """The metadata.generation that this is about."""

    batch_id: Annotated[str, Field(max_length=64)] = ""
    """The batch of the API."""

    phase: Annotated[str, Field(max_length=32)] = ""
    """The batch's status, as the API has it: validating, in_progress, finalizing, completed, failed, expired,
    cancelling or cancelled."""

    total: Count = 0
    """Requests in the file."""

    completed: Count = 0
    """Requests that were answered."""

    failed: Count = 0
    """Requests that failed."""

    progress: Annotated[str, Field(max_length=32)] = ""
    """Requests that are done and all, such as 40/100."""

    output_file_id: Annotated[str, Field(max_length=64)] = ""
    """The file of answers."""

    error_file_id: Annotated[str, Field(max_length=64)] = ""
    """The file of requests that failed."""

    conditions: Conditions = []
    """Complete: the batch is. Failed: it has come to another end, or nobody will run it any more; the reason
    says why. Suspended: it rests, by `suspend` or in its queue. UpToDate: its Job is by podTemplate as it
    is now."""
