"""Loads at pods over HTTP, with workers that hang, refuse, and answer nonsense."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_operator.adapters import worker_api
from baton_operator.adapters.decision import AdapterPod, PodWork, WorkerTemplate
from baton_operator.adapters.worker_api import AdapterApi, AdapterApiError, PodLoads
from tests.operator.fake_vllm_lora import RANK_ERROR, FakeVllmLora, running
from tests.operator.real_cluster import until

LOAD = PodWork((), (("pirate", "/pirate"),))


class Loads:
    """PodLoads with a clock that the test moves."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self.api = AdapterApi(**limits)
        self.loads = PodLoads(self.api, lambda: self.now)

    def pod(self, worker: FakeVllmLora, name: str = "a") -> AdapterPod:
        host, _, port = worker.url.removeprefix("http://").partition(":")
        return AdapterPod(name, "decode", True, WorkerTemplate(port=int(port)), f"n/s/{name}", host)

    async def work(self, *pods: AdapterPod, work: PodWork = LOAD, timeout_s: float = 10.0) -> None:
        if tasks := self.loads.start(pods, {pod.key: work for pod in pods}):
            await asyncio.wait(tasks, timeout=timeout_s)

    async def __aenter__(self) -> Loads:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.api.close()


async def test_loads_are_read_back_from_the_pod() -> None:
    async with running(worker := FakeVllmLora()), Loads() as loads:
        pod = loads.pod(worker)
        await loads.work(pod)
        (read,) = await loads.loads.read([pod])
        assert read.models == {"pirate": "/pirate"} and not read.busy
        await loads.work(pod, work=PodWork(("pirate",), (("poet", "/poet"),)))
        assert worker.requests == ["load pirate /pirate", "unload pirate", "load poet /poet"]
        assert worker.loaded == {"poet": "/poet"} and not loads.loads.errors()


async def test_pod_that_hangs_holds_up_no_other() -> None:
    """Its task runs on; the others are loaded, and it gets no second task."""
    hanging, others = FakeVllmLora(), [FakeVllmLora() for _ in range(3)]
    hanging.hangs.clear()
    async with running(hanging, *others), Loads() as loads:
        pods = [loads.pod(one, str(number)) for number, one in enumerate((hanging, *others))]
        await loads.work(*pods, timeout_s=1.0)
        read = await loads.loads.read(pods)
        assert [one.busy for one in read] == [True, False, False, False]
        assert all(one.models for one in read[1:]) and loads.loads.is_running(pods)
        await loads.work(*pods)
        assert len(hanging.requests) == 1
        hanging.hangs.set()
        await until(lambda: not loads.loads.is_running(pods))
        assert hanging.loaded == {"pirate": "/pirate"}


async def test_failed_adapter_does_not_hold_up_another() -> None:
    async with running(worker := FakeVllmLora({"/wide": RANK_ERROR, "/poet": ""})), Loads() as loads:
        pod = loads.pod(worker)
        await loads.work(pod, work=PodWork((), (("wide", "/wide"), ("poet", "/poet"))))
        assert worker.loaded == {"poet": "/poet"}
        (error,) = loads.loads.errors().values()
        assert error == f"500: {RANK_ERROR}"


async def test_failed_load_is_repeated_after_pauses_that_double() -> None:
    async with running(worker := FakeVllmLora({})), Loads() as loads:
        pod, attempts_s = loads.pod(worker), []
        for second in range(20):
            loads.now = float(second)
            before = len(worker.requests)
            await loads.work(pod)
            attempts_s += [second] if len(worker.requests) > before else []
        assert attempts_s == [0, 1, 3, 7, 15]
        assert "No adapter found for /pirate" in loads.loads.errors()[pod.key, "pirate"]
        assert loads.loads.next_s([pod]) == pytest.approx(15 + 16 - 19)
        loads.loads.keep([], "n/s/")
        await loads.work(pod)
        assert len(worker.requests) == 6, "another run of the pod has no pause"


async def test_pod_that_refuses_connections_is_read_again_later() -> None:
    async with running(worker := FakeVllmLora()), Loads() as loads:
        pod = loads.pod(worker)
        port = int(worker.url.rpartition(":")[2])
        await worker.stop()
        (read,) = await loads.loads.read([pod])
        assert read.models is None and "Cannot reach" in read.error
        await worker.start(port=port)
        assert (await loads.loads.read([pod]))[0].error == read.error, "not asked during the pause"
        loads.now = worker_api.FIRST_S
        assert (await loads.loads.read([pod]))[0].models == {}


async def test_load_that_ends_too_late_is_an_error() -> None:
    async with running(worker := FakeVllmLora()), Loads(load_s=0.2) as loads:
        worker.hangs.clear()
        pod = loads.pod(worker)
        await loads.work(pod)
        assert "No answer" in loads.loads.errors()[pod.key, "pirate"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (0, b"<html>", "invalid list of models"),
        (0, b'{"data": 5}', "invalid list of models"),
        (0, b'{"data": ["tiny"]}', "invalid list of models"),
        (0, b"[" * (worker_api.ANSWER_LIMIT + 1), "more than 1048576 bytes"),
        (502, None, "502: The worker answered /v1/models without a reason."),
        (404, None, "404: The worker does not serve /v1/models."),
        (307, None, "307: "),
    ],
)
async def test_nonsense_is_an_error_with_words(status: int, body: bytes | None, words: str) -> None:
    async with running(worker := FakeVllmLora()), Loads() as loads:
        worker.status, worker.body = status, body
        with pytest.raises(AdapterApiError) as error:
            await loads.api.adapters(worker.url)
        assert words in str(error.value)


async def test_api_key_is_sent_from_the_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with running(worker := FakeVllmLora(key="secret")):
        async with Loads(key_file=str(key)) as loads:
            assert await loads.api.adapters(worker.url) == {}
        async with Loads() as loads:
            with pytest.raises(AdapterApiError, match="--worker-api-key-file"):
                await loads.api.adapters(worker.url)


async def test_load_that_the_pod_does_not_list_is_an_error() -> None:
    """Otherwise it would be loaded again and again without a pause."""
    async with running(worker := FakeVllmLora()), Loads() as loads:
        worker.body = b'{"data": []}'
        pod = loads.pod(worker)
        await loads.work(pod)
        assert "does not list it" in loads.loads.errors()[pod.key, "pirate"]
