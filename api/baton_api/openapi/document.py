"""The paths, each with what is sent, what is answered, and with which statuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import __version__
from baton_api.openapi import answers, requests
from baton_api.openapi.values import COUNT, TEXT, Schema, one_of, ref

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "An API key is wanted, and none or an unknown one was sent.",
    404: "There is no such model, response or path.",
    413: "The body is too large.",
    431: "The head is too large.",
    499: "The request was aborted by its id.",
    500: "Something broke inside.",
    503: "There is no room, or nobody to serve it, for now.",
}
ALWAYS = (401, 431, 500)
WITH_A_BODY = (*ALWAYS, 400, 404, 413, 503)
GENERATING = (*WITH_A_BODY, 499)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path, and on `others`, which do the same."""

    method: str
    path: str
    summary: str
    answer: str = ""
    """The name of the schema; empty for an empty body."""
    request: str = ""
    event: str = ""
    """The schema of a stream's events, where there may be one."""
    statuses: Sequence[int] = ALWAYS
    others: Sequence[str] = ()
    parameters: Sequence[Schema] = ()
    kind: str = "application/json"
    served_by: Sequence[str] = field(default=("worker", "router"))

    def described(self, path: str) -> Schema:
        """As OpenAPI has it."""
        found: Schema = {"description": "Done.", "headers": _headers()}
        if self.answer:
            found["content"] = {self.kind: {"schema": ref(self.answer)}}
        elif self.kind != "application/json":
            found["content"] = {self.kind: {"schema": TEXT}}
        if self.event:
            found["content"]["text/event-stream"] = {"schema": TEXT, "x-event": ref(self.event)}
        operation: Schema = {
            "operationId": f"{self.method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
            "summary": self.summary,
            "responses": {"200": found} | {str(status): _error(status) for status in sorted(self.statuses)},
        }
        if self.request:
            body = {"application/json": {"schema": ref(self.request)}}
            operation["requestBody"] = {"required": True, "content": body}
        if self.parameters:
            operation["parameters"] = list(self.parameters)
        return operation


def document(models: Sequence[str], server: str, *, keyed: bool = False) -> Schema:
    """The whole description, of a `worker` or the `router`, that serves `models`."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        if server in operation.served_by:
            for path in (operation.path, *operation.others):
                paths.setdefault(path, {})[operation.method] = operation.described(path)
    described: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": f"The OpenAI API and the operations of a Baton {server}.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": requests.schemas(models) | answers.schemas()},
    }
    if keyed:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _headers() -> Schema:
    return {"x-request-id": {"description": "Names the request in logs.", "required": True, "schema": TEXT}}


def _error(status: int) -> Schema:
    headers = _headers()
    if status == 503:
        wait = COUNT | {"minimum": 1, "maximum": 120}
        headers["retry-after"] = {"description": "Seconds to wait.", "required": True, "schema": wait}
    return {
        "description": ERRORS[status],
        "headers": headers,
        "content": {"application/json": {"schema": ref("Error")}},
    }


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _operations() -> Iterator[Operation]:
    yield Operation("get", "/v1/models", "The models", "Models", statuses=(*ALWAYS, 503))
    yield Operation("get", "/v1/models/{model}", "One model", "Model", statuses=(*ALWAYS, 404, 503),
                    parameters=(_in_path("model"),))  # fmt: skip
    yield Operation("post", "/v1/chat/completions", "The next message of a conversation", "Chat",
                    "ChatRequest", "ChatChunk", GENERATING)  # fmt: skip
    yield Operation("post", "/v1/completions", "The continuation of a text", "Completion",
                    "CompletionRequest", "CompletionChunk", GENERATING)  # fmt: skip
    yield Operation("post", "/v1/embeddings", "Vectors of texts", "Embeddings", "EmbeddingRequest",
                    statuses=GENERATING)  # fmt: skip
    yield Operation("post", "/v1/responses", "The next items of a conversation", "Response",
                    "ResponseRequest", "ResponseEvent", GENERATING)  # fmt: skip
    one = (_in_path("response_id"),)
    kept = (*ALWAYS, 400, 404)
    yield Operation("get", "/v1/responses/{response_id}", "A response that is kept", "Response",
                    statuses=kept, parameters=one)  # fmt: skip
    yield Operation("delete", "/v1/responses/{response_id}", "Forget a response", "ResponseDeleted",
                    statuses=kept, parameters=one)  # fmt: skip
    page = (
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        _in_query("order", one_of("asc", "desc")),
        _in_query("after", TEXT),
    )
    yield Operation("get", "/v1/responses/{response_id}/input_items", "What a response answered",
                    "ResponseItems", statuses=kept, parameters=(*one, *page))  # fmt: skip
    yield Operation("post", "/generate", "A completion in SGLang's form", "Generated", "GenerateRequest",
                    "Generated", GENERATING)  # fmt: skip
    yield Operation("post", "/tokenize", "The tokens of a text or conversation", "Tokens", "TokenizeRequest",
                    statuses=WITH_A_BODY, others=("/v1/tokenize",))  # fmt: skip
    yield Operation("post", "/detokenize", "The text of tokens", "Text", "DetokenizeRequest",
                    statuses=WITH_A_BODY, others=("/v1/detokenize",))  # fmt: skip
    yield Operation("post", "/abort_request", "End requests by their ids", "Aborted", "AbortRequest",
                    statuses=WITH_A_BODY)  # fmt: skip
    yield Operation("post", "/flush_cache", "Empty the prefix cache", "Flushed")
    yield Operation("get", "/health", "Whether the process lives", statuses=(431, 500), others=("/ping",))
    yield Operation("get", "/ready", "Whether requests are welcome", statuses=(431, 500, 503))
    yield Operation("get", "/health_generate", "Whether a token can be generated", statuses=(*ALWAYS, 503))
    yield Operation("get", "/metrics", "Prometheus' figures", kind="text/plain", statuses=(431, 500))
    yield Operation("get", "/version", "The version", "Version")
    yield Operation("get", "/model_info", "The model and its tokenizer", "ModelInfo",
                    statuses=(*ALWAYS, 503), others=("/get_model_info",))  # fmt: skip
    yield Operation("get", "/server_info", "Settings without secrets, and figures", "ServerInfo",
                    others=("/get_server_info",))  # fmt: skip


OPERATIONS = tuple(_operations())
