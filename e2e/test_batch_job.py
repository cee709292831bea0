"""Batches that Jobs run: of a file by `kubectl apply`, and of the API by its SDK, both to their last line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from e2e.kubernetes import Kubernetes
from e2e.patience import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch

LINES = 200
TOKENS = 8
DONE_S = 300
ENDPOINT: Final = "/v1/chat/completions"

KEY = "an-asker"
"""Who shows it owns what comes of it, though this router lets everybody in."""

KEY_SECRET = "asker"


@pytest.fixture(scope="module")
def client(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a service whose batches are run by Jobs; its one router keeps them."""
    wanted = tiny_service(cluster, tmp_path_factory.mktemp("model"))
    wanted["spec"]["router"]["batches"] = {"execution": "Jobs"}
    cluster.apply(wanted)
    cluster.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEY_SECRET}, "stringData": {"key": KEY}}
    )
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    with (
        cluster.reach(NAME) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made,
    ):
        yield made


def test_a_file_is_answered_by_a_job_that_kubectl_applies(
    cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    watch = Stopwatch("a BatchJob of a file")
    cluster.apply(_batch_job("questions", uploaded))
    cluster.wait("batchjob/questions", "condition=Complete", DONE_S)
    watch.note(f"applied -> Complete, {LINES} lines")
    status = cluster.object("batchjob", "questions")["status"]
    assert (status["phase"], status["progress"]) == ("completed", f"{LINES}/{LINES}")
    assert (status["total"], status["completed"], status["failed"]) == (LINES, LINES, 0)
    _check(client, status["outputFileId"])
    job = _job(cluster, "questions")
    until("its pod is through", lambda: _job(cluster, "questions")["status"].get("succeeded") == 1, DONE_S)
    assert job["spec"]["completionMode"] == "Indexed"


def test_a_batch_of_the_api_becomes_an_indexed_job(
    cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    watch = Stopwatch("a batch of the API")
    batch = client.batches.create(
        input_file_id=uploaded, endpoint=ENDPOINT, completion_window="24h", metadata={"of": "the story"}
    )
    name = batch.id.replace("_", "-")
    until("there is a Job of its name", lambda: name in _names(cluster, "jobs"), DONE_S)
    watch.note("made -> its Job")
    job = _job(cluster, name)
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 1)
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("BatchJob", name)
    until("it is through", lambda: client.batches.retrieve(batch.id).status == "completed", DONE_S)
    watch.note(f"-> completed, {LINES} lines")
    ended = client.batches.retrieve(batch.id)
    counts = ended.request_counts
    assert counts is not None and ended.output_file_id is not None
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES, 0)
    _check(client, ended.output_file_id)
    cluster.wait(f"batchjob/{name}", "condition=Complete", DONE_S)


def test_one_that_rests_has_no_pod_and_goes_on_when_it_is_told_to(
    cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    cluster.apply(_batch_job("later", uploaded, suspend=True))
    cluster.wait("batchjob/later", "condition=Suspended", DONE_S)
    until("its Job rests", lambda: _is_so(_job(cluster, "later"), "Suspended"), DONE_S)
    assert not cluster.objects("pods", "baton.dev/batch-job=later")
    watch = Stopwatch("a BatchJob that rested")
    cluster.patch("batchjob/later", {"spec": {"suspend": False}})
    cluster.wait("batchjob/later", "condition=Complete", DONE_S)
    watch.note("goes on -> Complete")
    _check(client, cluster.object("batchjob", "later")["status"]["outputFileId"])


def _upload(client: openai.OpenAI, file: Path) -> str:
    with file.open("w") as lines:
        for number in range(LINES):
            body = {
                "model": NAME,
                "messages": [{"role": "user", "content": f"Tell me of the number {number}."}],
                "max_tokens": TOKENS,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            lines.write(json.dumps(line) + "\n")
    return client.files.create(file=file, purpose="batch").id


def _batch_job(name: str, uploaded: str, **spec: object) -> dict[str, Any]:
    """Of the file of whoever has the key."""
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": name},
        "spec": {
            "serviceName": NAME,
            "inputFileId": uploaded,
            "apiKeySecretRef": {"name": KEY_SECRET},
            **spec,
        },
    }


def _check(client: openai.OpenAI, output: str) -> None:
    """Each line has one answer, in the order in which they were asked."""
    answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"line-{number}" for number in range(LINES)]
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert all(one["response"]["body"]["choices"][0]["finish_reason"] for one in answers)


def _names(cluster: Kubernetes, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in cluster.objects(kind)}


def _job(cluster: Kubernetes, name: str) -> Any:
    return cluster.object("job", name)


def _is_so(there: Any, condition: str) -> bool:
    conditions = there.get("status", {}).get("conditions", ())
    return any(one["type"] == condition and one["status"] == "True" for one in conditions)
