"""
A batch run by pods of its Job: the container that the operator defines, as a process.

The rest of the cluster is fixed: a killed process is followed by the next pod of the Job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton_api import batch_jobs
from baton_batches.runner_process import ExitStatus
from baton_operator.manifests import batches as manifests
from tests.batches import chaos
from tests.batches.batch_cluster import NAMESPACE, SERVICE
from tests.batches.pods import LINES, Story, story_of


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with story_of(tmp_path_factory.mktemp("story"), 1, {}) as opened:
        yield opened


@pytest.mark.slow
def test_successor_of_a_killed_pod_answers_each_line_once(story: Story) -> None:
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    job = story.batch_job(name)
    assert not story.routers[0].runners(), "the router starts none itself"
    first = story.pod(job, f"{name}-0-aaaaa")
    story.some_done(id, 20)
    first.kill()
    first.wait()
    assert story.service.batch(id)["status"] == "in_progress"
    story.release()
    # The lease of the dead has still to run out; the next pod waits for it.
    second = story.pod(job, f"{name}-0-bbbbb")
    # Two at once, as after a node that was taken for dead: one has the lease, the other waits.
    third = story.pod(job, f"{name}-0-ccccc")
    assert story.ended(second) == story.ended(third) == ExitStatus.DONE
    story.check(id)
    story.set_phase(name, "completed")


@pytest.mark.slow
def test_restarted_router_admits_the_same_pod_again(story: Story) -> None:
    """Its secret is another one then: what the pod had from it is of no use, Kubernetes' own token is."""
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    pod = story.pod(story.batch_job(name), f"{name}-0-aaaaa")
    story.some_done(id, 20)
    (router,) = story.routers
    router.program.kill()
    story.release()
    router.program.start()
    router.await_ready()
    assert story.ended(pod) == ExitStatus.DONE
    story.check(id)
    story.set_phase(name, "completed")


@pytest.mark.slow
def test_stopping_runner_records_its_results(story: Story) -> None:
    """As when the BatchJob is suspended, or its node drained."""
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    job = story.batch_job(name)
    first = story.pod(job, f"{name}-0-aaaaa")
    story.some_done(id, 20)
    first.terminate()
    assert story.ended(first) == manifests.TERMINATED
    story.release()
    assert story.ended(story.pod(job, f"{name}-0-bbbbb")) == ExitStatus.DONE
    story.check(id)


@pytest.mark.slow
def test_cancelled_batch_ends_its_pod(story: Story) -> None:
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    pod = story.pod(story.batch_job(name), f"{name}-0-aaaaa")
    story.some_done(id, 20)
    assert httpx.post(f"{story.url}/v1/batches/{id}/cancel", trust_env=False, timeout=60).is_success
    assert story.ended(pod) == ExitStatus.DONE
    assert chaos.ended(story.service, id)["status"] == "cancelled"
    story.set_phase(name, "cancelled")
    story.release()


@pytest.mark.slow
def test_file_becomes_one_batch_however_often_its_pod_starts(story: Story) -> None:
    source = story.folder / "mine.jsonl"
    chaos.write_lines(source, LINES)
    with source.open("rb") as content:
        sent = httpx.post(
            f"{story.url}/v1/files",
            data={"purpose": "batch"},
            files={"file": content},
            trust_env=False,
            timeout=60,
        )
    job = {
        "metadata": {"name": "mine", "namespace": NAMESPACE, "uid": "uid-2"},
        "spec": {"serviceName": SERVICE, "inputFileId": sent.json()["id"], "concurrency": 4},
    }
    story.cluster.put(job)
    before = {one["id"] for one in _batches(story)}
    first = story.pod(job, "mine-0-aaaaa")
    chaos.await_true(lambda: len(_batches(story)) > len(before), chaos.END_S, "there is a batch")
    first.kill()
    first.wait()
    assert story.ended(story.pod(job, "mine-0-bbbbb")) == ExitStatus.DONE
    (id,) = {one["id"] for one in _batches(story)} - before
    story.check(id)
    story.set_phase("mine", "completed")
    assert batch_jobs.name_of(id) not in story.cluster.jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pod", "message"),
    [
        ({"batchId": "batch_0"}, "gone-0-aaaaa", "batch_0"),
        ({"inputFileId": "file-0"}, "gone-0-aaaaa", "file-0"),
        ({"batchId": "ANOTHERS"}, "gone-0-aaaaa", "is for the BatchJob"),
    ],
    ids=["no such batch", "no such file", "the batch of another"],
)
def test_unrunnable_batch_ends_with_the_failing_exit_status(
    story: Story, spec: dict[str, Any], pod: str, message: str
) -> None:
    if spec.get("batchId") == "ANOTHERS":
        id = story.submit(1)
        story.batch_job(batch_jobs.name_of(id))
        story.set_phase(batch_jobs.name_of(id), "in_progress")
        spec = {"batchId": id}
    job = {
        "metadata": {"name": "gone", "namespace": NAMESPACE, "uid": "uid-3"},
        "spec": {"serviceName": SERVICE, **spec},
    }
    assert story.ended(story.pod(job, pod)) == manifests.PERMANENT_FAILURE == ExitStatus.REJECTED
    assert message in (story.folder / f"{pod}.log").read_text()


def _batches(story: Story) -> list[dict[str, Any]]:
    answer = httpx.get(f"{story.url}/v1/batches?limit=100", trust_env=False, timeout=60)
    shown: list[dict[str, Any]] = answer.json()["data"]
    return shown
