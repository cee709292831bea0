"""Batches that run in Jobs: created from a file by `kubectl apply`, and through the API by its SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch

LINES = 200
TOKENS = 8
DONE_S = 300
ENDPOINT: Final = "/v1/chat/completions"

KEY = "batch-owner"
"""Owner of the files and batches. This router also accepts requests without a key."""

KEY_SECRET = "batch-owner"


@pytest.fixture(scope="module")
def client(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a service that runs batches in Jobs. Its only router stores them."""
    manifest = tiny_service(cluster, tmp_path_factory.mktemp("model"))
    manifest["spec"]["router"]["batches"] = {"execution": "Jobs"}
    cluster.apply(manifest)
    cluster.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEY_SECRET}, "stringData": {"key": KEY}}
    )
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    with (
        cluster.reach(NAME) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def test_batch_job_for_a_file_completes_all_lines(
    cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    watch = Stopwatch("a BatchJob of a file")
    cluster.apply(_batch_job("questions", uploaded))
    cluster.wait("batchjob/questions", "condition=Complete", DONE_S)
    watch.note(f"applied -> Complete, {LINES} lines")
    status = cluster.object("batchjob", "questions")["status"]
    assert status["phase"] == "completed"
    assert (status["total"], status["completed"], status["failed"]) == (LINES, LINES, 0)
    _check(client, status["outputFileId"])
    job = _job(cluster, "questions")
    until("its pod has succeeded", lambda: _job(cluster, "questions")["status"].get("succeeded") == 1, DONE_S)
    assert job["spec"]["completionMode"] == "Indexed"


def test_api_batch_becomes_an_indexed_job(cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    watch = Stopwatch("a batch of the API")
    batch = client.batches.create(
        input_file_id=uploaded, endpoint=ENDPOINT, completion_window="24h", metadata={"test": "e2e"}
    )
    name = batch.id.replace("_", "-")
    until("a Job with its name exists", lambda: name in _names(cluster, "jobs"), DONE_S)
    watch.note("created -> its Job")
    job = _job(cluster, name)
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 1)
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("BatchJob", name)
    until("it is completed", lambda: client.batches.retrieve(batch.id).status == "completed", DONE_S)
    watch.note(f"-> completed, {LINES} lines")
    ended = client.batches.retrieve(batch.id)
    counts = ended.request_counts
    assert counts is not None and ended.output_file_id is not None
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES, 0)
    _check(client, ended.output_file_id)
    cluster.wait(f"batchjob/{name}", "condition=Complete", DONE_S)


def test_suspended_batch_job_has_no_pod_until_it_resumes(
    cluster: Kubernetes, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded = _upload(client, tmp_path / "questions.jsonl")
    cluster.apply(_batch_job("later", uploaded, suspend=True))
    cluster.wait("batchjob/later", "condition=Suspended", DONE_S)
    until("its Job is suspended", lambda: _has_condition(_job(cluster, "later"), "Suspended"), DONE_S)
    assert not cluster.objects("pods", "baton.dev/batch-job=later")
    watch = Stopwatch("a suspended BatchJob")
    cluster.patch("batchjob/later", {"spec": {"suspend": False}})
    cluster.wait("batchjob/later", "condition=Complete", DONE_S)
    watch.note("resumed -> Complete")
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
    """Return a BatchJob for a file of the key's owner."""
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
    """Check that each line has one answer, in the order of the input."""
    answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"line-{number}" for number in range(LINES)]
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert all(one["response"]["body"]["choices"][0]["finish_reason"] for one in answers)


def _names(cluster: Kubernetes, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in cluster.objects(kind)}


def _job(cluster: Kubernetes, name: str) -> Any:
    return cluster.object("job", name)


def _has_condition(manifest: Any, condition: str) -> bool:
    conditions = manifest.get("status", {}).get("conditions", ())
    return any(one["type"] == condition and one["status"] == "True" for one in conditions)
