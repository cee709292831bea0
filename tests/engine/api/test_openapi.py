"""
The description of the API, checked by requests to a server: valid ones, and ones with a fault.

No answer may be a 5xx, or have a status, a type, a header or a shape that the description does not name.
`BATON_OPENAPI_EXAMPLES` sets the number of requests of each kind for each operation. With `BATON_OPENAPI_URL`
they are sent to a running server, such as a router before a pair:

    BATON_OPENAPI_EXAMPLES=300 BATON_OPENAPI_URL=http://127.0.0.1:8000 \\
        python -m pytest -s tests/engine/api/test_openapi.py -k description_allows
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, strategies
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from baton_api import openapi
from baton_api.openapi.document import OPERATIONS
from baton_engine.api.http import HttpServer
from tests.engine.api.api import MODEL, USER, Api, open_api

EXAMPLES = int(os.environ.get("BATON_OPENAPI_EXAMPLES", "6"))
URL = os.environ.get("BATON_OPENAPI_URL", "")
CONTEXT = 48
"""Short, so that requests that say nothing of their length end soon."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SERVED = [
    (operation, path)
    for operation in OPERATIONS
    for path in (operation.path, *operation.others)
    if "worker" in operation.served_by
]
WAYS = [
    pytest.param(
        operation.method,
        path,
        mode,
        id=f"{operation.method} {path} {mode.value}",
        marks=pytest.mark.slow if mode is GenerationMode.NEGATIVE else (),
    )
    for operation, path in SERVED
    for mode in GenerationMode
    # Without a body there is nothing to be wrong, and what has two names is the same under both.
    if mode is GenerationMode.POSITIVE or (operation.request and path == operation.path)
]
STREAMS = "text/event-stream"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A worker in a thread of its own; schemathesis speaks to it as any client would."""
    if URL:
        yield URL
        return
    ready: list[str] = []
    listens, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with (
            open_api(max_model_len=CONTEXT) as api,
            HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server,
        ):
            ready.append(f"http://{server.address}")
            listens.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert listens.wait(300)
    yield ready[0]
    done.set()
    thread.join()


@pytest.fixture(scope="module")
def described(url: str) -> Any:
    return httpx.get(f"{url}/openapi.json", trust_env=False).json()


@pytest.fixture(scope="module")
def schema(described: Any) -> Any:
    """Made once: its references and request bodies take longer to read than one operation's requests."""
    return schemathesis.openapi.from_dict(described)


@pytest.fixture(scope="module")
def sent(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Count requests by status; print the counts at the end with `-s`."""
    counted: Counter[str] = Counter()
    yield counted
    print(f"\n{counted.total()} requests: {dict(sorted(counted.items()))}")


@pytest.mark.parametrize(("method", "path", "mode"), WAYS)
def test_openapi_answers_match_the_description(
    url: str,
    described: Any,
    schema: Any,
    sent: Counter[str],
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    operation = schema[path][method.upper()]

    @hypothesis.seed(20_240_601)
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), chance=strategies.randoms())
    def try_it(case: Any, chance: random.Random) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = thinned(case.body, chance)
        response = case.call(base_url=url, timeout=60)
        sent[f"{mode.value} {response.status_code}"] += 1
        kind = response.headers.get("content-type", [""])[0]
        if kind.startswith(STREAMS):
            check_stream(described, path, response.text)
        else:
            case.validate_response(response, checks=CHECKS)

    try_it()


def thinned(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """With few of its fields: of many, one is beyond what this model can do, and that is all one learns."""
    few = {"model", "prompt", "messages", "input", "text", "input_ids", "tokens", "rid", "max_tokens"}
    few |= {"query", "documents", "text_1", "text_2"}
    return {name: value for name, value in body.items() if name in few or chance.random() < 0.15}


def check_stream(described: Any, path: str, text: str) -> None:
    """Each event is of the shape that the description gives, or an error."""
    shape = described["paths"][path]["post"]["responses"]["200"]["content"][STREAMS]["x-event"]
    components = {"components": described["components"]}
    event = Draft202012Validator(components | shape)
    error = Draft202012Validator(components | {"$ref": "#/components/schemas/Error"})
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data, text
    for line in data[:-1] if data[-1] == "[DONE]" else data:
        body = json.loads(line)
        (event if "type" in body or "error" not in body else error).validate(body)


# --- The description itself ---


@pytest.mark.parametrize("server", ["worker", "router"])
def test_openapi_description_is_valid(server: str) -> None:
    described = openapi.document(("a", "b"), server)
    schema = schemathesis.openapi.from_dict(described)
    schema.validate()
    assert len({operation["operationId"] for operation in operations_of(described)}) == sum(
        1 + len(operation.others) for operation in OPERATIONS if server in operation.served_by
    )
    for name, component in described["components"]["schemas"].items():
        Draft202012Validator.check_schema(component)
        assert f'"#/components/schemas/{name}"' in json.dumps(described), f"{name} is used by nobody"
    assert described["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["a", "b"]


def operations_of(described: Any) -> list[Any]:
    return [operation for methods in described["paths"].values() for operation in methods.values()]


def test_openapi_server_with_keys_declares_security() -> None:
    assert "security" not in openapi.document(("a",), "worker")
    assert openapi.document(("a",), "worker", keyed=True)["security"] == [{"key": []}]


async def test_openapi_described_paths_equal_served_paths(api: Api) -> None:
    described = (await api.http.get("/openapi.json")).json()["paths"]
    for path, methods in described.items():
        for method in methods:
            response = await api.http.request(method, path.replace("{model}", MODEL))
            assert response.status_code != 405
            if "{" not in path:
                assert response.status_code != 404, path
    # Paths for Baton's own processes, and paths that never succeed.
    undescribed = {
        "/load",
        "/kv/snapshot",
        "/debug/requests",
        "/openapi.json",
        "/v1/responses/{response_id}/cancel",
    }
    served = {path.replace("{name:path}", "{model}").replace("{id}", "{response_id}") for path in routes(api)}
    assert served - described.keys() == undescribed


def routes(api: Api) -> list[str]:
    edge: Any = api.app
    while not hasattr(edge, "routes"):
        edge = edge._app
    return [route.path for route in edge.routes]


Ask = Callable[[Api], Any]
ANSWERS: dict[str, Ask] = {
    "Chat": lambda api: api.chat(logprobs=True, top_logprobs=2),
    "Completion": lambda api: api.complete(logprobs=2, n=2),
    "Models": lambda api: api.http.get("/v1/models"),
    "Response": lambda api: api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"}),
    "Tokens": lambda api: api.http.post("/tokenize", json={"messages": USER, "return_token_strs": True}),
    "Text": lambda api: api.http.post("/detokenize", json={"tokens": [[1], []]}),
    "Generated": lambda api: api.http.post("/generate", json={"text": ["a", "b"], "sampling_params": {}}),
    "ServerInfo": lambda api: api.http.get("/server_info"),
    "Error": lambda api: api.chat(n=0),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_openapi_schema_rejects_an_answer_without_a_field(api: Api, name: str) -> None:
    """So that the check above can fail."""
    components = {"components": openapi.document((MODEL,), "worker")["components"]}
    validator = Draft202012Validator(components | {"$ref": f"#/components/schemas/{name}"})
    body = (await ANSWERS[name](api)).json()
    validator.validate(body)
    shape = components["components"]["schemas"][name]
    for member in shape.get("required", ()):
        lacking = {key: value for key, value in body.items() if key != member}
        assert not validator.is_valid(lacking), member
    assert not validator.is_valid("text")
