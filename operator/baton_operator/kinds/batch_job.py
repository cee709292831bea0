"""`BatchJob`: a file of requests, answered by a service with what interactive requests leave over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Anything, Label, Part, Rule, rules
from baton_operator.kinds.status import Conditions

Count = Annotated[int, Field(ge=0)]


@rules(
    Rule(
        "has(self.batchId) != has(self.inputFileId)",
        "a BatchJob has either batchId (a batch of the API) or inputFileId (a file, of which one is made)",
    ),
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule(
        "has(self.batchId) == has(oldSelf.batchId) && "
        "(!has(self.batchId) || self.batchId == oldSelf.batchId)",
        "batchId cannot be changed",
        ".batchId",
    ),
    Rule(
        "has(self.inputFileId) == has(oldSelf.inputFileId) && "
        "(!has(self.inputFileId) || self.inputFileId == oldSelf.inputFileId)",
        "inputFileId cannot be changed",
        ".inputFileId",
    ),
)
class BatchJobSpec(Part):
    """What is to be answered, and with how much haste."""

    service_name: Label
    """The InferenceService that answers."""

    batch_id: Annotated[str, Field(max_length=64, pattern=r"^batch_[A-Za-z0-9]+$")] | None = None
    """A batch that was made by POST /v1/batches."""

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
    """How often its pod may fail."""

    completion_window_seconds: Annotated[int, Field(ge=60, le=2_592_000)] = 86_400
    """Seconds after which what is not answered expires."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] = 604_800
    """Seconds after which the Job is deleted; the batch and its files stay."""

    suspend: bool = False
    """Whether it rests. What is answered stays answered."""

    queue_name: Label | None = None
    """A LocalQueue of Kueue that admits it."""

    pod_template: Anything | None = None
    """A PodTemplateSpec that is merged over what the operator makes; the runner's container is called
    main."""


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
    """Complete, Failed and Suspended."""
