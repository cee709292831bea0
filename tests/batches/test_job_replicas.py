"""
Pods of Jobs and two routers on one Postgres: a pod continues its batch through either router.

As in a cluster, pods and clients know one address, and each of their connections is for the next router.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton_api import batch_jobs
from baton_batches.runner_process import ExitStatus
from tests.batches import chaos
from tests.batches.batch_cluster import JOBS, NAMESPACE, SERVICE
from tests.batches.pods import LINES, Story, story_of
from tests.batches.postgres import Postgres

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def story(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    environment = {"BATON_ROUTER_DATABASE": postgres.new_database()}
    with story_of(tmp_path_factory.mktemp("story"), 2, environment) as created:
        yield created


def test_batch_job_is_created_once_and_its_pod_serves_both(story: Story) -> None:
    before = set(story.cluster.jobs)
    id = story.submit()
    name = batch_jobs.name_of(id)
    job = story.batch_job(name)
    assert story.ended(story.pod(job, f"{name}-0-aaaaa")) == ExitStatus.DONE
    story.check(id)
    story.set_phase(name, "completed")
    assert set(story.cluster.jobs) - before == {name}
    assert len(story.address.taken) == 2, "both were asked"
    assert not [runner for router in story.routers for runner in router.runners()]
    for router in story.routers:
        shown = httpx.get(f"{router.url}/v1/batches/{id}", trust_env=False, timeout=60).json()
        assert shown["status"] == "completed"


def test_pod_of_a_dead_router_continues_with_the_other(story: Story) -> None:
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    pod = story.pod(story.batch_job(name), f"{name}-0-aaaaa")
    story.some_done(id, 20)
    router = story.routers[0]
    router.program.kill()
    story.release()
    try:
        assert story.ended(pod) == ExitStatus.DONE
        story.check(id)
        story.set_phase(name, "completed")
    finally:
        router.program.start()
        router.await_ready()


def test_successor_of_a_killed_pod_is_admitted_by_either_router(story: Story) -> None:
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    job = story.batch_job(name)
    killed = story.pod(job, f"{name}-0-aaaaa")
    story.some_done(id, 20)
    killed.kill()
    killed.wait()
    story.release()
    assert story.ended(story.pod(job, f"{name}-0-bbbbb")) == ExitStatus.DONE
    story.check(id)


def test_cancellation_by_one_router_ends_the_pod(story: Story) -> None:
    id = story.submit_held()
    name = batch_jobs.name_of(id)
    pod = story.pod(story.batch_job(name), f"{name}-0-aaaaa")
    story.some_done(id, 20)
    url = f"{story.routers[1].url}/v1/batches/{id}/cancel"
    assert httpx.post(url, trust_env=False, timeout=60).is_success
    assert story.ended(pod) == ExitStatus.DONE
    assert chaos.ended(story.service, id)["status"] == "cancelled"
    story.set_phase(name, "cancelled")
    story.release()


def test_file_becomes_one_batch_with_the_window_of_its_batch_job(story: Story) -> None:
    source = story.folder / "mine.jsonl"
    chaos.write_lines(source, LINES)
    file = story.service.upload(source, lambda sent, size: None)["id"]
    job: dict[str, Any] = {
        "metadata": {"name": "mine", "namespace": NAMESPACE, "uid": "uid-2"},
        "spec": {"serviceName": SERVICE, "inputFileId": file, "completionWindow": "1h"},
    }
    story.cluster.put(job)
    created = len([one for one in story.cluster.requests if one == f"POST {JOBS}"])
    for pod in ("mine-0-aaaaa", "mine-0-bbbbb"):
        assert story.ended(story.pod(job, pod)) == ExitStatus.DONE
    (batch,) = (one for one in story.service.batches(100) if one["input_file_id"] == file)
    assert batch["expires_at"] == batch["created_at"] + 3600
    story.check(batch["id"])
    story.set_phase("mine", "completed")
    assert len([one for one in story.cluster.requests if one == f"POST {JOBS}"]) == created
