"""Workers are killed, stopped, restarted and abandoned at every moment; the service continues."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from baton_api import headers as header_names
from baton_api import metrics
from baton_api.prompt_report import Fallback, PromptReport
from tests.faults.cluster import LONG_PROMPT, POLL_S, TIMEOUT_S, Cluster, until

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

ABORTS = 1000


@dataclass(frozen=True, slots=True)
class Halfway:
    """A request whose long prompt the prefill worker was in the middle of when it last gave its load."""

    prompt: list[int]
    reply: asyncio.Task[httpx.Response]
    load: dict[str, Any]

    async def answer(self) -> dict[str, Any]:
        reply = await self.reply
        assert reply.status_code == 200, reply.text
        completion: dict[str, Any] = reply.json()
        return completion


async def halfway(cluster: Cluster, **more: Any) -> Halfway:
    """A prompt that was computed too fast to be seen on its way is followed by another one."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            prompt = cluster.prompt(LONG_PROMPT)
            reply = asyncio.create_task(cluster.post(prompt, **more))
            while not reply.done():
                load = await cluster.prefill.load()
                if 0 < load["queued_tokens"] < LONG_PROMPT * 2 // 3:
                    return Halfway(prompt, reply, load)
                await asyncio.sleep(POLL_S)
            assert (await reply).status_code == 200, (await reply).text


async def test_processes_nixl_pair_equals_one_worker(cluster: Cluster) -> None:
    prompt = cluster.prompt(LONG_PROMPT)
    answer = await cluster.ask(prompt)
    relay = await cluster.decode.relay_of(answer["id"])
    assert relay is not None
    assert relay["prompt_tokens"] == relay["computed_tokens"] == LONG_PROMPT
    assert relay["transport"].startswith("nixl/ucx")
    await cluster.same_as_reference(prompt, answer)
    await cluster.at_rest()


async def test_processes_prefill_killed_before_start_costs_only_time(cluster: Cluster) -> None:
    prompt = cluster.prompt(300)
    cluster.prefill.signal(signal.SIGSTOP)
    asking = asyncio.create_task(cluster.ask(prompt))

    async def fetching() -> bool:
        return (await cluster.decode.metrics())[metrics.WORKER_FETCHING.name] == 1

    await until(fetching, "the decode worker has asked")
    await cluster.prefill.kill()
    answer = await asking
    await cluster.same_as_reference(prompt, answer)
    assert await cluster.decode.relay_of(answer["id"]) is None
    await until(cluster.decode.at_rest, "the decode worker's blocks are all free or cached")


async def test_processes_prefill_killed_in_transfer_costs_only_time(
    cluster: Cluster,
) -> None:
    request = await halfway(cluster)
    await cluster.prefill.kill()
    await cluster.same_as_reference(request.prompt, await request.answer())
    await until(cluster.decode.at_rest, "the decode worker's blocks are all free or cached")


async def test_processes_prefill_killed_after_transfer_is_unnoticed(cluster: Cluster) -> None:
    prompt = cluster.prompt(500)
    body = cluster.body(prompt, max_tokens=200, stream=True)
    text = name = ""
    async with cluster.http.stream("POST", f"{cluster.router.url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if cluster.prefill.process is not None:
                    await cluster.prefill.kill()
                event = json.loads(line[6:])
                name, text = event["id"], text + event["choices"][0]["text"]
    expected = await cluster.expected(prompt, max_tokens=200)
    assert text == expected["choices"][0]["text"]
    assert await cluster.decode.relay_of(name) is not None
    await until(cluster.decode.at_rest, "the decode worker's blocks are all free or cached")


async def test_processes_restarted_prefill_worker_is_used_again(cluster: Cluster) -> None:
    await cluster.prefill.kill()
    prompt = cluster.prompt(400)
    await cluster.same_as_reference(prompt, await cluster.ask(prompt))
    await cluster.prefill.start()
    await cluster.healthy()
    prompt = cluster.prompt(400)
    await cluster.same_as_reference(prompt, await cluster.ask(prompt))
    await cluster.at_rest()


async def test_processes_decode_killed_in_stream_ends_with_an_error(
    cluster: Cluster,
) -> None:
    body = cluster.body(cluster.prompt(300), max_tokens=3500, stream=True)
    events: list[dict[str, Any]] = []
    with pytest.raises(httpx.RemoteProtocolError):
        async with cluster.http.stream("POST", f"{cluster.router.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                assert line != "data: [DONE]"
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if len(events) == 5:
                        await cluster.decode.kill()
    assert events[-1]["error"]["type"] == "server_error"
    assert all("error" not in event for event in events[:-1])
    await until(cluster.prefill.at_rest, "the prefill worker's blocks are all free or cached")


async def test_processes_decode_killed_in_transfer_frees_prefill(
    cluster: Cluster,
) -> None:
    request = await halfway(cluster, max_tokens=1000)
    await cluster.decode.kill()
    answer = await request.reply
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert int(answer.headers["retry-after"]) >= 1
    await until(cluster.prefill.at_rest, "the prefill worker's blocks are all free or cached")


async def test_processes_hung_prefill_is_avoided_until_it_wakes(
    cluster: Cluster,
) -> None:
    request = await halfway(cluster)
    cluster.prefill.signal(signal.SIGSTOP)
    try:
        await cluster.same_as_reference(request.prompt, await request.answer())
    finally:
        cluster.prefill.signal(signal.SIGCONT)
    await cluster.at_rest()
    await cluster.healthy()


async def test_processes_hung_then_killed_prefill_clears_quarantine(
    cluster: Cluster,
) -> None:
    request = await halfway(cluster)
    cluster.prefill.signal(signal.SIGSTOP)
    await cluster.same_as_reference(request.prompt, await request.answer())
    await cluster.prefill.kill()
    await until(cluster.decode.at_rest, "the decode worker's blocks are all free or cached")


async def test_processes_hung_decode_worker_continues_when_it_wakes(cluster: Cluster) -> None:
    request = await halfway(cluster)
    cluster.decode.signal(signal.SIGSTOP)
    try:
        await until(cluster.prefill.at_rest, "the prefill worker has let the silent one's blocks go")
    finally:
        cluster.decode.signal(signal.SIGCONT)
    await cluster.same_as_reference(request.prompt, await request.answer())
    await cluster.at_rest()


async def test_processes_local_prefill_reports_its_reason(cluster: Cluster) -> None:
    await cluster.prefill.kill()
    headers = {header_names.PREFILL: cluster.prefill.control}
    answer = await cluster.http.post(
        f"{cluster.decode.url}/v1/completions", json=cluster.body(cluster.prompt(300)), headers=headers
    )
    report = PromptReport.decode(answer.raise_for_status().headers[header_names.PROMPT])
    assert report is not None
    assert (report.remote, report.fallback) in ((False, Fallback.UNREACHABLE), (False, Fallback.LOST))


async def test_processes_disconnect_frees_memory_of_both_workers(cluster: Cluster) -> None:
    request = await halfway(cluster, max_tokens=1000, stream=True)
    assert request.load["free_blocks"] < request.load["total_blocks"]
    request.reply.cancel()
    await asyncio.wait([request.reply])
    await cluster.at_rest()
    for node in (cluster.prefill, cluster.decode):
        load = await node.load()
        assert load["free_blocks"] == load["total_blocks"]


async def test_processes_thousand_disconnects_leak_nothing(cluster: Cluster) -> None:
    moments = cluster.random

    async def give_up() -> None:
        body = cluster.body(cluster.prompt(moments.choice((5, 40, 300, 900))), max_tokens=64, stream=True)
        try:
            async with asyncio.timeout(moments.uniform(0.0, 0.4)):
                async with cluster.http.stream(
                    "POST", f"{cluster.router.url}/v1/completions", json=body
                ) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            pass

    waiting = iter(range(ABORTS))

    async def client() -> None:
        for _ in waiting:
            await give_up()

    await asyncio.gather(*(client() for _ in range(8)))
    await cluster.at_rest()
    prompt = cluster.prompt(LONG_PROMPT)
    await cluster.same_as_reference(prompt, await cluster.ask(prompt))
    counted = (metrics.WORKER_RUNNING, metrics.WORKER_QUEUED, metrics.WORKER_FETCHING, metrics.WORKER_HELD)

    async def counts_nothing() -> bool:
        """A worker may count its last request for a moment after the client has the answer."""
        both = [await node.metrics() for node in (cluster.prefill, cluster.decode)]
        return not any(values[metric.name] for values in both for metric in counted)

    await until(counts_nothing, "no worker counts a request")
