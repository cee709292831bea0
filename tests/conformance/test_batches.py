"""J: batches, which a router keeps and has run."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch

from baton_api import metrics
from baton_api.errors import CONTEXT_LENGTH_EXCEEDED, ModelNotFound
from tests.conformance import deployment
from tests.conformance.conftest import ALWAYS_RELAYED, smollm2
from tests.conformance.deployment import PAIR, QUESTION, TIMEOUT_S, Deployment, Deployments, await_true
from tests.conformance.expected import check_error
from tests.engine.models import make_model

pytestmark = pytest.mark.nixl

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
TERMINAL = ("completed", "failed", "expired", "cancelled")
IN_ORDER = ("validating", "in_progress", "finalizing", "completed")


@pytest.fixture
def served(deployments: Deployments) -> Deployment:
    """A tiny model behind a router: what it says does not matter here."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")

    def begin(way: str) -> Deployment:
        folder = deployments.folder("tiny", lambda folder: make_model(folder, max_position_embeddings=4096))
        flags = ["--dtype=float32", "--kv-cache-memory=16MiB", ALWAYS_RELAYED]
        return deployment.start(way, str(folder), "batched", *flags)

    return deployments.get("batched", PAIR, begin)


@pytest.fixture
def instructed(deployments: Deployments) -> Deployment:
    """The built-in instruct model behind a router."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    return smollm2(deployments, PAIR)


def line(served: Deployment, number: int, **more: Any) -> dict[str, Any]:
    body = {"model": served.model, "messages": QUESTION, "max_tokens": 4, "temperature": 0} | more.pop(
        "body", {}
    )
    return {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body} | more


def long_lines(served: Deployment, count: int) -> list[dict[str, Any]]:
    """Lines of a batch that is not done before it is cancelled, however late that is."""
    long = {"max_tokens": 2000, "ignore_eos": True}
    return [line(served, number, body=long) for number in range(1, count + 1)]


def uploaded(served: Deployment, *lines: Any) -> str:
    text = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)
    return served.client.files.create(file=io.BytesIO(text), purpose="batch").id


def created(served: Deployment, *lines: Any) -> Batch:
    batch = served.client.batches.create(
        input_file_id=uploaded(served, *lines), endpoint=CHAT, completion_window="24h"
    )
    assert batch.status == "validating"
    return batch


def ended(served: Deployment, batch: Batch, seconds: float = TIMEOUT_S) -> Batch:
    return list(watched(served, batch, seconds))[-1]


def watched(served: Deployment, batch: Batch, seconds: float) -> Iterator[Batch]:
    """The batch, every fifth of a second, until it has ended."""
    deadline = time.monotonic() + seconds
    yield batch
    while batch.status not in TERMINAL:
        assert time.monotonic() < deadline, f"after {seconds:g} s: {batch}"
        time.sleep(0.2)
        batch = served.client.batches.retrieve(batch.id)
        yield batch


def rows(served: Deployment, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(row) for row in served.client.files.content(file).read().splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_J1_the_tutorials_batch(instructed: Deployment, tmp_path: Path) -> None:
    client = instructed.client
    questions = ("Tell me a joke about programming", "What is Python?")
    requests = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/chat/completions",
            "body": {
                "model": instructed.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 50,
            },
        }
        for number, question in enumerate(questions, start=1)
    ]
    input_file_path = tmp_path / "batch_requests.jsonl"
    with open(input_file_path, "w") as file:
        for request in requests:
            file.write(json.dumps(request) + "\n")
    with open(input_file_path, "rb") as upload:
        file_response = client.files.create(file=upload, purpose="batch")
    batch_response = client.batches.create(
        input_file_id=file_response.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    assert batch_response.status == "validating"
    batch_response = ended(instructed, batch_response)
    assert batch_response.status == "completed"
    assert counts(batch_response) == (2, 2, 0)
    assert batch_response.output_file_id is not None and batch_response.error_file_id is None
    results = rows(instructed, batch_response.output_file_id)
    assert [result["custom_id"] for result in results] == ["request-1", "request-2"]
    for result in results:
        assert result["error"] is None and result["response"]["status_code"] == 200
        assert isinstance(result["response"]["body"]["choices"], list)
        assert result["response"]["body"]["choices"][0]["message"]["content"]
    assert client.files.delete(batch_response.output_file_id).deleted
    assert client.files.delete(file_response.id).deleted


def test_J3_what_is_seen_of_a_batch_while_it_runs(served: Deployment) -> None:
    batch = created(served, *(line(served, number, body={"max_tokens": 64}) for number in range(20)))
    seen = list(watched(served, batch, TIMEOUT_S))
    order = [IN_ORDER.index(one.status) for one in seen]
    assert order == sorted(order)
    done = [sum(counts(one)[1:]) for one in seen]
    assert done == sorted(done)
    last = seen[-1]
    assert counts(last) == (20, 20, 0)
    stamps = [last.created_at, last.in_progress_at, last.finalizing_at, last.completed_at]
    assert stamps == sorted(stamp for stamp in stamps if stamp is not None)
    assert last.expires_at == last.created_at + 86_400
    assert last.usage is not None and last.usage.output_tokens > 20
    assert len(rows(served, last.output_file_id)) == 20


def test_J4_a_cancelled_batch_keeps_what_was_done(served: Deployment) -> None:
    batch = created(served, line(served, 0), *long_lines(served, 500))
    await_true(lambda: counts(served.client.batches.retrieve(batch.id))[1] > 0, TIMEOUT_S, "one is completed")
    cancelling = served.client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at
    last = ended(served, cancelling)
    assert last.status == "cancelled" and last.cancelled_at
    assert 0 < counts(last)[1] < counts(last)[0]
    assert len(rows(served, last.output_file_id)) == counts(last)[1]
    await_true(lambda: served.total(metrics.WORKER_RUNNING.name) == 0, TIMEOUT_S, "no request runs any more")
    assert served.client.files.delete(batch.input_file_id).deleted


def test_J5_what_cannot_be_cancelled(served: Deployment) -> None:
    batch = ended(served, created(served, line(served, 1)))
    assert batch.status == "completed"
    with pytest.raises(openai.ConflictError, match="completed"):
        served.client.batches.cancel(batch.id)
    check_error(served.http.post("/v1/batches/batch_none/cancel"), 404, "id")
    check_error(served.http.get("/v1/batches/batch_none"), 404, "id")
    twice = created(served, *long_lines(served, 50))
    for _ in range(2):
        assert served.client.batches.cancel(twice.id).status in ("cancelling", "cancelled")
    assert ended(served, twice).status == "cancelled"


def test_J6_one_bad_line_of_three(served: Deployment) -> None:
    lines = [line(served, 1), line(served, 2, body={"temperature": 9}), line(served, 3)]
    batch = ended(served, created(served, *lines))
    assert (batch.status, counts(batch)) == ("completed", (3, 2, 1))
    (error,) = rows(served, batch.error_file_id)
    assert error["custom_id"] == "request-2" and error["error"] is None
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert [row["custom_id"] for row in rows(served, batch.output_file_id)] == ["request-1", "request-3"]


def test_J7_lines_that_cannot_be_served_are_errors_of_their_own(served: Deployment) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    bad = [{"stream": True}, {"model": "nope"}, {"messages": long}]
    lines = [line(served, number, body=body) for number, body in enumerate(bad)]
    batch = ended(served, created(served, *lines, line(served, 9)))
    assert (batch.status, counts(batch)) == ("completed", (4, 1, 3))
    errors = rows(served, batch.error_file_id)
    assert [row["response"]["status_code"] for row in errors] == [400, 404, 400]
    details = [row["response"]["body"]["error"] for row in errors]
    assert details[0]["param"] == "stream"
    assert (details[1]["param"], details[1]["code"]) == ("model", ModelNotFound.code)
    assert details[2]["code"] == CONTEXT_LENGTH_EXCEEDED


def no_batches(served: Deployment) -> dict[str, list[Any]]:
    nameless = {key: value for key, value in line(served, 1).items() if key != "custom_id"}
    return {
        "no json": [line(served, 1), b"{\n"],
        "duplicate": [line(served, 1), line(served, 1)],
        "no custom_id": [line(served, 2), nameless],
        "another method": [line(served, 1), line(served, 2, method="GET")],
        "another endpoint": [line(served, 1), line(served, 2, url="/v1/completions")],
    }


def test_J8_a_file_that_is_no_batch(served: Deployment) -> None:
    for name, lines in no_batches(served).items():
        batch = ended(served, created(served, *lines))
        assert batch.status == "failed" and batch.failed_at, name
        assert batch.errors is not None and batch.errors.data
        first = batch.errors.data[0]
        assert first.code and first.message and first.line == 2, name
        assert batch.output_file_id is None
    check_error(served.http.post("/v1/files", files={"file": b""}, data={"purpose": "batch"}), 400, "file")


def test_J9_a_batch_that_cannot_be(served: Deployment) -> None:
    file = uploaded(served, line(served, 1))
    other = served.client.files.create(file=io.BytesIO(b"x"), purpose="user_data").id
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": other}, 400, "input_file_id"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"endpoint": "/v1/foo"}, 400, "endpoint"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
    ]
    for fields, status, param in bad:
        check_error(served.post("/v1/batches", good | fields), status, param)
