"""L: overload, disconnect, faults of the pair."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from baton_api import metrics
from tests.conformance.conftest import smollm2
from tests.conformance.deployment import (
    ONE_WORKER,
    PAIR,
    START_S,
    TIMEOUT_S,
    Deployment,
    Deployments,
    await_true,
)
from tests.conformance.expected import check_error, check_error_object

LONG_RUN = 4000
RUNNING = metrics.WORKER_RUNNING.name
HELD_BLOCKS = ('baton_worker_kv_blocks{state="owned"}', 'baton_worker_kv_blocks{state="pinned"}')
CHAT = "/v1/chat/completions"

pair_only = pytest.mark.parametrize("way", [pytest.param(PAIR, marks=pytest.mark.nixl)], indirect=True)


def await_rest(served: Deployment) -> None:
    """Wait until no worker has a request or holds KV blocks of one."""

    def owned_blocks() -> float:
        return sum(
            value
            for url in served.workers().values()
            for key, value in served.metrics(url).items()
            if key in HELD_BLOCKS
        )

    await_true(lambda: served.busy() == 0, TIMEOUT_S, "no request is running")
    await_true(lambda: owned_blocks() == 0, TIMEOUT_S, "all KV blocks are free")


def test_L1_a_client_that_leaves_a_stream_stops_it(served: Deployment) -> None:
    await_rest(served)
    body = served.chat_body(max_tokens=LONG_RUN, ignore_eos=True, stream=True)
    with (
        httpx.Client(base_url=served.url, timeout=TIMEOUT_S, trust_env=False) as leaving,
        leaving.stream("POST", CHAT, json=body) as answer,
    ):
        chunks = 0
        lines = answer.iter_lines()  # held, so that only the end of the block closes the connection
        for line in lines:
            chunks += line.startswith("data: ")
            if chunks == 5:
                break
        assert chunks == 5 and served.total(RUNNING) >= 1
    await_rest(served)


def test_L2_a_client_that_leaves_a_whole_answer_stops_it(served: Deployment) -> None:
    await_rest(served)
    body = served.chat_body(max_tokens=LONG_RUN, ignore_eos=True)
    with (
        httpx.Client(
            base_url=served.url, timeout=httpx.Timeout(TIMEOUT_S, read=1.0), trust_env=False
        ) as http,
        pytest.raises(httpx.ReadTimeout),
    ):
        http.post(CHAT, json=body)
    await_rest(served)


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))


def test_L3_overload_is_refused_with_a_time_to_come_back(guarded: Deployment) -> None:
    # Long answers, and one client for all: three must not be done before the others have come.
    body = guarded.chat_body(max_tokens=600, ignore_eos=True)

    def ask(index: int) -> httpx.Response:
        return guarded.post(CHAT, {**body, "stream": index % 2 == 0})

    answers = at_once(50, ask)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert served and refused
    for answer in refused:
        assert answer.status_code in (429, 503), answer.text
        check_error_object(
            answer.json()["error"], kind="server_error" if answer.status_code == 503 else "requests"
        )
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    for kind in (0, 1):
        assert any(answer.status_code != 200 for answer in answers[kind::2])
    assert len({answer.headers["retry-after"] for answer in refused}) > 1, "all would come back at once"


def test_L3_the_sdks_retries_get_everybody_through(guarded: Deployment) -> None:
    with guarded.openai(max_retries=20) as patient:

        def ask(index: int) -> Any:
            if index % 2:
                return patient.chat.completions.create(
                    model=guarded.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
                ).choices
            stream = patient.chat.completions.create(
                model=guarded.model,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=4,
                stream=True,
            )
            return list(stream)

        assert all(at_once(50, ask))


@pair_only
def test_L4_without_a_decode_worker_requests_are_rejected(guarded: Deployment) -> None:
    workers = guarded.workers()
    with not_restarted(guarded):
        check_a_lost_stream(guarded)
        for stream in (False, True):
            answer = guarded.post_chat(max_tokens=4, stream=stream)
            check_error(answer, 503, kind="server_error")
            assert 1 <= int(answer.headers["retry-after"]) <= 120
        await_true(lambda: guarded.http.get("/ready").status_code == 503, TIMEOUT_S, "/ready says so")
        models = guarded.http.get("/v1/models")
        check_error(models, 503, kind="server_error")
        assert guarded.http.get("/health").status_code == 200
    check_comes_back(guarded, workers["decode"])


def check_a_lost_stream(guarded: Deployment) -> None:
    """An event that says so, and then no clean end: no client may take the part for the whole answer."""
    body = guarded.chat_body(max_tokens=3000, ignore_eos=True, stream=True)
    lines = []
    decode = guarded.children()["decode"]  # found before: the answer does not wait
    with (
        pytest.raises(httpx.RemoteProtocolError),
        guarded.http.stream("POST", CHAT, json=body) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                if len(lines) == 5:
                    decode.kill()
    check_error_object(json.loads(lines[-1])["error"], kind="server_error")
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@contextlib.contextmanager
def not_restarted(guarded: Deployment) -> Iterator[None]:
    """`baton up` is held, so that a worker that is killed stays away."""
    assert guarded.process
    guarded.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        guarded.process.send_signal(signal.SIGCONT)


@pair_only
def test_L4_without_a_prefill_worker_the_decode_worker_serves_on(guarded: Deployment) -> None:
    """Where peers refuse, the decode worker computes prompts itself until the prefill worker is back."""
    workers = guarded.workers()
    expected = guarded.post_chat(max_tokens=8, temperature=0).json()["choices"]
    with not_restarted(guarded):
        guarded.children()["prefill"].kill()
        for _ in range(5):
            answer = guarded.post_chat(max_tokens=8, temperature=0)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == expected
    check_comes_back(guarded, workers["prefill"])


def check_comes_back(guarded: Deployment, worker: str) -> None:
    """`baton up` starts a lost worker again, and then all is as it was."""

    def is_up() -> bool:
        try:
            return httpx.get(f"{worker}/ready", timeout=TIMEOUT_S, trust_env=False).is_success
        except httpx.TransportError:
            return False

    await_true(is_up, START_S, "the worker is started again")
    await_true(lambda: guarded.http.get("/ready").status_code == 200, TIMEOUT_S, "the router is ready")
    fresh = random.Random(time.monotonic_ns())

    def relayed() -> bool:
        prompt = fresh.choices(range(3, 300), k=100)
        before = guarded.moved()
        assert guarded.post_completion(prompt, max_tokens=2).status_code == 200
        return guarded.moved() > before

    await_true(relayed, TIMEOUT_S, "prompts come from the prefill worker again")


PROMPTS = 100


@pytest.mark.nixl
def test_L7_a_pair_says_what_one_worker_says(deployments: Deployments) -> None:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    one, pair = (smollm2(deployments, way) for way in (ONE_WORKER, PAIR))
    countries = ("France", "Japan", "Peru", "Kenya", "Norway", "Chile", "India", "Cuba", "Mali", "Laos")
    topics: tuple[str, ...] = (
        "capital",
        "largest city",
        "longest river",
        "highest mountain",
        "best known dish",
    )
    topics += ("flag", "currency", "national animal", "neighbours", "climate")
    questions = [
        f"What is the {thing} of {place}? Answer in one sentence." for place in countries for thing in topics
    ]
    assert len(set(questions)) == PROMPTS
    before = pair.moved()
    ours, theirs = answers(pair, questions), answers(one, questions)
    different = [question for question, a, b in zip(questions, ours, theirs, strict=True) if a != b]
    assert not different, different
    assert pair.moved() > before


def answers(served: Deployment, questions: Sequence[str]) -> list[tuple[Any, ...]]:
    """Texts, ends and usage, four at a time; cached tokens depend on what was asked before."""

    def ask(question: str) -> tuple[Any, ...]:
        completion = served.chat([{"role": "user", "content": question}], temperature=0, max_tokens=16)
        choice, usage = completion.choices[0], completion.usage
        assert usage
        return choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, questions))


@pytest.mark.nixl
def test_L5_several_prompts_and_choices_are_the_same_from_a_pair(deployments: Deployments) -> None:
    """Each prompt of a list is a prefill of its own, and so is nothing of a choice."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    prompts = ["The capital of France is", "Water boils at", "A relay race has"]
    answered = []
    for way in (ONE_WORKER, PAIR):
        served = smollm2(deployments, way)
        completion = served.complete(prompts, n=2, temperature=1, seed=11, max_tokens=8)
        assert completion.usage
        answered.append(
            (
                [(choice.index, choice.text) for choice in completion.choices],
                completion.usage.prompt_tokens,
                completion.usage.completion_tokens,
            )
        )
    assert answered[0] == answered[1]
    assert len({text for _, text in answered[0][0]}) > 3
