"""The paths of the API, each with its request, response and statuses; schemas of files and batches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import __version__, anthropic, limits
from baton_api import headers as header_names
from baton_api.batch_jobs import DAY, OWN
from baton_api.inference_paths import RERANK_PATHS, SCORE_PATHS
from baton_api.openapi import requests, responses
from baton_api.openapi.values import (
    BOOLEAN,
    COUNT,
    OBJECT,
    TEXT,
    Schema,
    array,
    exactly,
    full,
    integer,
    mapping,
    nullable,
    one_of,
    optional,
    record,
    ref,
    text,
)

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
STATUSES = (
    *("validating", "failed", "in_progress", "finalizing"),
    *("completed", "expired", "cancelling", "cancelled"),
)
TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)
WINDOW: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$", "examples": ["24h"]}


def schemas() -> dict[str, Schema]:
    """Return all schemas of files and batches by name."""
    return _files() | _batches()


def _files() -> dict[str, Schema]:
    return {
        "FileUpload": record(
            {
                "file": {"type": "string", "format": "binary", "minLength": 1},
                "purpose": one_of(*PURPOSES),
                "expires_after[anchor]": exactly("created_at"),
                "expires_after[seconds]": integer(limits.EXPIRES_AFTER),
            },
            ["file", "purpose"],
        )
        | {"dependentRequired": _both("expires_after[anchor]", "expires_after[seconds]")},
        "File": full({
            "id": {"type": "string", "pattern": "^file-"},
            "object": exactly("file"),
            "bytes": COUNT,
            "created_at": COUNT,
            "expires_at": nullable(COUNT),
            "filename": TEXT | {"minLength": 1},
            "purpose": one_of(*PURPOSES, "batch_output"),
            "status": exactly("processed"),
        }),
        "Files": _list("File"),
        "FileDeleted": full({"id": TEXT, "object": exactly("file"), "deleted": BOOLEAN}),
    }  # fmt: skip


def _batches() -> dict[str, Schema]:
    metadata = mapping(text(limits.METADATA_VALUE), limits.METADATA)
    metadata["propertyNames"] = {"maxLength": limits.METADATA_KEY.most}
    expiry = record(
        {"anchor": exactly("created_at"), "seconds": integer(limits.EXPIRES_AFTER)}, ["anchor", "seconds"]
    )
    return {
        "BatchRequest": record(
            {
                "input_file_id": TEXT,
                "endpoint": one_of(*ENDPOINTS),
                "completion_window": exactly(DAY),
            }
            | optional(metadata=metadata, output_expires_after=expiry, **{OWN: WINDOW}),
            ["input_file_id", "endpoint", "completion_window"],
        ),
        "Batch": full({
            "id": {"type": "string", "pattern": "^batch_"},
            "object": exactly("batch"),
            "endpoint": one_of(*ENDPOINTS),
            "model": nullable(TEXT),
            "errors": nullable(full({"object": exactly("list"), "data": array(_line_error(), least=1)})),
            "input_file_id": TEXT,
            "completion_window": WINDOW,
            "status": one_of(*STATUSES),
            "output_file_id": nullable(TEXT),
            "error_file_id": nullable(TEXT),
            "created_at": COUNT,
            "expires_at": COUNT,
            **dict.fromkeys(TIMES, nullable(COUNT)),
            "request_counts": full({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "usage": nullable(OBJECT),
            "metadata": nullable(mapping(TEXT)),
        }),
        "Batches": _list("Batch"),
    }  # fmt: skip


def _list(name: str) -> Schema:
    ends = {"first_id": nullable(TEXT), "last_id": nullable(TEXT), "has_more": BOOLEAN}
    return full({"object": exactly("list"), "data": array(ref(name)), **ends})


def _line_error() -> Schema:
    return full({"code": TEXT, "message": TEXT, "param": nullable(TEXT), "line": nullable(COUNT)})


def _both(first: str, second: str) -> dict[str, list[str]]:
    return {first: [second], second: [first]}


ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    404: "The model, response, file, batch or path does not exist.",
    409: "The batch has already ended.",
    413: "The body is too large.",
    416: "The range is outside of the file.",
    429: "The key or tenant has reached a limit.",
    431: "The headers are too large.",
    499: "The request was aborted by its id.",
    500: "Internal error.",
    503: "The server is overloaded or not ready.",
    507: "The storage of files is full.",
}
ALWAYS = (401, 431, 500)
WITH_A_BODY = (*ALWAYS, 400, 404, 413, 503)
GENERATING = (*WITH_A_BODY, 499)
READS = (*ALWAYS, 400, 404, 503)
WRITES = (*READS, 413, 507)
"""Of files and batches."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path, and of its aliases in `others`."""

    method: str
    path: str
    summary: str
    answer: str = ""
    """Name of the schema. Empty: an empty body."""
    request: str = ""
    event: str = ""
    """Schema of the events of a stream, if the operation streams."""
    statuses: Sequence[int] = ALWAYS
    others: Sequence[str] = ()
    parameters: Sequence[Schema] = ()
    kind: str = "application/json"
    sent_as: str = "application/json"
    served_by: Sequence[str] = field(default=("worker", "router"))
    error: str = "Error"
    """Name of the schema of errors."""

    def described(self, path: str) -> Schema:
        """Return the operation object of OpenAPI."""
        success: Schema = {"description": "Done.", "headers": _headers()}
        if self.answer:
            success["content"] = {self.kind: {"schema": ref(self.answer)}}
        elif self.kind != "application/json":
            success["content"] = {self.kind: {"schema": TEXT}}
        if self.event:
            success["content"]["text/event-stream"] = {"schema": TEXT, "x-event": ref(self.event)}
        operation: Schema = {
            "operationId": f"{self.method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
            "summary": self.summary,
            "responses": {"200": success}
            | {str(status): _error(status, self.error) for status in sorted(self.statuses)},
        }
        if self.request:
            body = {self.sent_as: {"schema": ref(self.request)}}
            operation["requestBody"] = {"required": True, "content": body}
        if self.parameters:
            operation["parameters"] = list(self.parameters)
        return operation


def document(models: Sequence[str], server: str, *, keyed: bool = False) -> Schema:
    """Return the OpenAPI document of a `worker` or the `router` that serves `models`."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        if server in operation.served_by:
            for path in (operation.path, *operation.others):
                paths.setdefault(path, {})[operation.method] = operation.described(path)
    components = requests.schemas(models) | responses.schemas() | schemas()
    described: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": f"The APIs of OpenAI and Anthropic, and the operations of a Baton {server}.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": _used(paths, components)},
    }
    if keyed:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _used(paths: dict[str, Any], components: dict[str, Schema]) -> dict[str, Schema]:
    """Return the components that the paths reference, directly or through other components."""
    used: set[str] = set()
    texts = [json.dumps(paths)]
    while texts:
        for name in set(re.findall(r'"#/components/schemas/(\w+)"', texts.pop())) - used:
            used.add(name)
            texts.append(json.dumps(components[name]))
    return {name: schema for name, schema in components.items() if name in used}


def _headers() -> Schema:
    return {
        header_names.REQUEST_ID: {
            "description": "Names the request in logs.",
            "required": True,
            "schema": TEXT,
        }
    }


def _error(status: int, schema: str) -> Schema:
    headers = _headers()
    if status == 503:
        wait = COUNT | {"minimum": 1, "maximum": 120}
        headers["retry-after"] = {"description": "Seconds to wait.", "required": True, "schema": wait}
    return {
        "description": ERRORS[status],
        "headers": headers,
        "content": {"application/json": {"schema": ref(schema)}},
    }


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _operations() -> Iterator[Operation]:
    yield Operation("get", "/v1/models", "List models", "Models", statuses=(*ALWAYS, 503))
    yield Operation("get", "/v1/models/{model}", "Get a model", "Model", statuses=(*ALWAYS, 404, 503),
                    parameters=(_in_path("model"),))  # fmt: skip
    yield Operation("post", "/v1/chat/completions", "Create a chat completion", "Chat",
                    "ChatRequest", "ChatChunk", GENERATING)  # fmt: skip
    yield Operation("post", "/v1/completions", "Create a completion", "Completion",
                    "CompletionRequest", "CompletionChunk", GENERATING)  # fmt: skip
    yield Operation("post", "/v1/embeddings", "Create embeddings", "Embeddings", "EmbeddingRequest",
                    statuses=GENERATING)  # fmt: skip
    yield Operation("post", "/v1/responses", "Create a response", "Response",
                    "ResponseRequest", "ResponseEvent", GENERATING)  # fmt: skip
    response = (_in_path("response_id"),)
    stored = (*ALWAYS, 400, 404)
    yield Operation("get", "/v1/responses/{response_id}", "Get a stored response", "Response",
                    statuses=stored, parameters=response)  # fmt: skip
    yield Operation("delete", "/v1/responses/{response_id}", "Delete a response", "ResponseDeleted",
                    statuses=stored, parameters=response)  # fmt: skip
    page = (
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        _in_query("order", one_of("asc", "desc")),
        _in_query("after", TEXT),
    )
    yield Operation("get", "/v1/responses/{response_id}/input_items", "List the input items of a response",
                    "ResponseItems", statuses=stored, parameters=(*response, *page))  # fmt: skip
    yield Operation("post", "/generate", "Create a completion in SGLang's format", "Generated",
                    "GenerateRequest", "Generated", GENERATING)  # fmt: skip
    yield Operation("post", "/tokenize", "Tokenize a text or a conversation", "Tokens", "TokenizeRequest",
                    statuses=WITH_A_BODY, others=("/v1/tokenize",))  # fmt: skip
    yield Operation("post", "/detokenize", "Convert tokens to text", "Text", "DetokenizeRequest",
                    statuses=WITH_A_BODY, others=("/v1/detokenize",))  # fmt: skip
    yield Operation("post", "/abort_request", "Abort requests by id", "Aborted", "AbortRequest",
                    statuses=WITH_A_BODY)  # fmt: skip
    yield Operation("post", "/v1/load_lora_adapter", "Load a LoRA adapter", request="LoadAdapterRequest",
                    kind="text/plain", statuses=(*WITH_A_BODY, 404), served_by=("worker",))  # fmt: skip
    yield Operation("post", "/v1/unload_lora_adapter", "Unload a LoRA adapter",
                    request="UnloadAdapterRequest", kind="text/plain", statuses=(*WITH_A_BODY, 404),
                    served_by=("worker",))  # fmt: skip
    yield Operation("post", "/flush_cache", "Empty the prefix cache", "Flushed")
    yield Operation("get", "/health", "Liveness probe", statuses=(431, 500), others=("/ping",))
    yield Operation("get", "/ready", "Readiness probe", statuses=(431, 500, 503))
    yield Operation("get", "/health_generate", "Probe that generates a token", statuses=(*ALWAYS, 503))
    yield Operation("get", "/metrics", "Prometheus metrics", kind="text/plain", statuses=(*ALWAYS, 404))
    yield Operation("get", "/version", "Get the version", "Version")
    yield Operation("get", "/model_info", "Get the model and its tokenizer", "ModelInfo",
                    statuses=(*ALWAYS, 503), others=("/get_model_info",))  # fmt: skip
    yield Operation("get", "/server_info", "Get settings, without secrets, and metrics", "ServerInfo",
                    others=("/get_server_info",))  # fmt: skip


def _other_formats() -> Iterator[Operation]:
    """Endpoints of other APIs than OpenAI's."""
    for paths, summary, name in (
        (RERANK_PATHS, "Sort documents by a query", "Rerank"),
        (SCORE_PATHS, "Score pairs of texts", "Score"),
    ):
        yield Operation("post", paths[0], summary, f"{name}Answer", f"{name}Request",
                        statuses=GENERATING, others=paths[1:])  # fmt: skip
    yield Operation("post", anthropic.MESSAGES, "Create a message in Anthropic's format", "MessageAnswer",
                    "MessagesRequest", "MessageEvent", GENERATING, error="MessageError")  # fmt: skip
    yield Operation("post", anthropic.COUNT_TOKENS, "Count the tokens of a message's prompt", "MessageTokens",
                    "CountTokensRequest", statuses=WITH_A_BODY, error="MessageError")  # fmt: skip


def _files_and_batches() -> Iterator[Operation]:
    """Files and batches."""
    router = ("router",)
    page = (_in_query("after", TEXT),)
    files = (
        *page,
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": limits.FILES_PAGE.most}),
        _in_query("order", one_of("asc", "desc")),
        _in_query("purpose", TEXT),
    )
    batches = (
        *page,
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": limits.BATCHES_PAGE.most}),
    )
    file, batch = (_in_path("file_id"),), (_in_path("batch_id"),)
    yield Operation("post", "/v1/files", "Upload a file", "File", "FileUpload",
                    sent_as="multipart/form-data", statuses=(*WRITES, 429), served_by=router)  # fmt: skip
    yield Operation("get", "/v1/files", "List files", "Files", statuses=READS,
                    parameters=files, served_by=router)  # fmt: skip
    yield Operation("get", "/v1/files/{file_id}", "Get a file", "File", statuses=READS, parameters=file,
                    served_by=router)  # fmt: skip
    yield Operation("delete", "/v1/files/{file_id}", "Delete a file", "FileDeleted", statuses=READS,
                    parameters=file, served_by=router)  # fmt: skip
    yield Operation("get", "/v1/files/{file_id}/content", "Download a file", statuses=(*READS, 416),
                    parameters=file, kind="application/octet-stream", served_by=router)  # fmt: skip
    yield Operation("post", "/v1/batches", "Create a batch", "Batch", "BatchRequest",
                    statuses=WRITES, served_by=router)  # fmt: skip
    yield Operation("get", "/v1/batches", "List batches", "Batches", statuses=READS,
                    parameters=batches, served_by=router)  # fmt: skip
    yield Operation("get", "/v1/batches/{batch_id}", "Get a batch", "Batch", statuses=READS, parameters=batch,
                    served_by=router)  # fmt: skip
    yield Operation("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch", "Batch",
                    statuses=(*READS, 409), parameters=batch, served_by=router)  # fmt: skip


OPERATIONS = (*_operations(), *_other_formats(), *_files_and_batches())
