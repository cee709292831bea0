"""A decode worker is killed in mid-stream, and another one says the rest: the client sees one answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton_api import anthropic, headers
from tests.engine.models import VOCAB, make_model
from tests.faults.cluster import CONTEXT, TIMEOUT_S, Node, until

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENS = 400
RESUMED = ": resumed"
"""The comment at the place where another worker continues."""


@dataclass(slots=True)
class Spared:
    """Two decode workers, a prefill worker, a router, and a reference worker."""

    router: Node
    decodes: list[Node]
    reference: Node
    http: httpx.AsyncClient
    random: random.Random

    def body(self, **fields: Any) -> dict[str, Any]:
        prompt = [self.random.randrange(3, VOCAB) for _ in range(120)]
        return {
            "model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "seed": 11,
            "stream": True, "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip

    async def expected(self, body: dict[str, Any], path: str = COMPLETIONS) -> list[dict[str, Any]]:
        answer = await self.http.post(self.reference.url + path, json=body)
        return events_of(answer.raise_for_status().text)

    async def ask(
        self, body: dict[str, Any], hurt: signal.Signals | None, after: int, path: str = COMPLETIONS
    ) -> str:
        """The stream as a client gets it, whose worker is hurt after so many events."""
        lines: list[str] = []
        async with self.http.stream("POST", self.router.url + path, json=body) as answer:
            assert answer.status_code == 200
            name = answer.headers[headers.WORKER]
            async for line in answer.aiter_lines():
                lines.append(line)
                if hurt is not None and sum(one.startswith("data:") for one in lines) == after:
                    (worker,) = (one for one in self.decodes if one.url.endswith(name))
                    if hurt is signal.SIGKILL:
                        await worker.kill()
                    else:
                        worker.signal(hurt)
                    hurt = None
        return "\n".join(lines)

    async def ask_resumed(
        self, body: dict[str, Any], hurt: signal.Signals, after: int, path: str = COMPLETIONS
    ) -> list[str]:
        """
        Streams whose worker was hurt, of which the last one was resumed.

        A worker may be faster than the reader of its stream: it is hurt when it has sent everything. Such a
        stream must be right too, and the request is sent again.
        """
        texts: list[str] = []
        async with asyncio.timeout(TIMEOUT_S):
            while not texts or RESUMED not in texts[-1]:
                await self.healthy()
                texts.append(await self.ask(body, hurt, after, path))
        return texts

    async def healthy(self) -> None:
        for node in self.decodes:
            if node.process is None:
                await node.start()
            else:
                node.signal(signal.SIGCONT)

        rows: list[dict[str, Any]] = []

        async def sees_all() -> bool:
            rows[:] = (await self.http.get(f"{self.router.url}/workers")).raise_for_status().json()["data"]
            return all(row["state"] == "ready" for row in rows)

        try:
            await until(sees_all, "the router sees all workers")
        except AssertionError as error:
            raise AssertionError("\n".join([f"{error}: {rows}", *self.router.lines[-20:]])) from None


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def content_of(events: list[dict[str, Any]]) -> tuple[str, str, dict[str, Any]]:
    """The text, why it ended, and what was counted."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    (finish,) = (choice["finish_reason"] for choice in choices if choice["finish_reason"])
    usage = {
        name: events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return text, finish, usage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Spared]:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    folder: Path = tmp_path_factory.mktemp("resumed")
    model = make_model(folder / "tiny", max_position_embeddings=CONTEXT)
    shared = (
        str(model),
        "--served-model-name=tiny",
        "--dtype=float32",
        "--threads=1",
        "--kv-cache-memory=64MiB",
        "--tool-call-parser=hermes",
    )
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, contextlib.AsyncExitStack() as stack:
        decodes = [Node(f"decode {number}", ("decode", *shared), http) for number in range(2)]
        prefill, reference = (
            Node("prefill", ("prefill", *shared), http),
            Node("alone", ("serve", *shared), http),
        )
        for node in (*decodes, prefill, reference):
            stack.push_async_callback(node.stop)
        await asyncio.gather(*(node.start() for node in (*decodes, prefill, reference)))
        flags = [f"--decode={node.url}" for node in decodes]
        router = Node(
            "router",
            ("router", f"--prefill={prefill.url}", *flags, "--local-prefill-max-tokens=0", "--idle-s=5"),
            http,
        )
        stack.push_async_callback(router.stop)
        await router.start()
        yield Spared(router, decodes, reference, http, random.Random(5))


@pytest_asyncio.fixture(loop_scope="module")
async def spared(running: Spared) -> Spared:
    await running.healthy()
    return running


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2},
    "penalised": {"temperature": 0.8, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "constrained": {"temperature": 1.0, "regex": "[a-z ]{300,380}END", "ignore_eos": False},
}


@pytest.mark.parametrize("request_kind", REQUESTS)
async def test_resumed_stream_killed_worker_continues_exactly(spared: Spared, request_kind: str) -> None:
    body = spared.body(**REQUESTS[request_kind])
    expected = content_of(await spared.expected(body))
    for text in await spared.ask_resumed(body, signal.SIGKILL, after=30):
        events = events_of(text)
        assert content_of(events) == expected
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


STEPS = 120
"""Numbers that a call must have as its argument: so many that it takes a while to say them."""

RUN = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"enum": list(range(9))}, "minItems": STEPS, "maxItems": STEPS}
    },
    "required": ["steps"],
    "additionalProperties": False,
}


async def test_resumed_stream_tool_call_continues_in_its_arguments(spared: Spared) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "Run."}], "max_tokens": 1000, "seed": 4,
        "tools": [{"type": "function", "function": {"name": "run", "parameters": RUN}}], "temperature": 1.0,
        "tool_choice": "required", "parallel_tool_calls": False, "stream": True,
    }  # fmt: skip
    expected = called(await spared.expected(body, CHAT))
    for text in await spared.ask_resumed(body, signal.SIGKILL, after=30, path=CHAT):
        name, arguments, finish, ids = called(events_of(text))
        assert (name, arguments, finish) == expected[:3]
        assert (name, finish, ids) == ("run", "tool_calls", 1)
        assert len(json.loads(arguments)["steps"]) == STEPS


def called(events: list[dict[str, Any]]) -> tuple[str, str, str, int]:
    """The one call's name and arguments, why the answer ended, and how many ids were sent."""
    name = arguments = finish = ""
    ids = 0
    for event in events:
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls") or ():
                ids += bool(call.get("id"))
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    return name, arguments, finish, ids


async def test_resumed_stream_message_continues_exactly(spared: Spared) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "Run."}], "max_tokens": 300, "seed": 4,
        "temperature": 1.0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    whole = await spared.http.post(spared.reference.url + anthropic.MESSAGES, json=body)
    expected = outcome_of(whole.raise_for_status().text)
    for text in await spared.ask_resumed(body, signal.SIGKILL, after=30, path=anthropic.MESSAGES):
        assert outcome_of(text) == expected


def outcome_of(stream: str) -> tuple[list[str], str, list[str]]:
    """The kinds of a message's events in order, without repetitions, its text, and why it ended."""
    lines = [line for line in stream.split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    deltas = [event["delta"] for event in events if "delta" in event]
    ends = [delta["stop_reason"] for delta in deltas if "stop_reason" in delta]
    kinds = [event["type"] for event in events]
    assert all(kinds.count(kind) == 1 for kind in set(kinds) - {"content_block_delta"})
    return list(dict.fromkeys(kinds)), "".join(delta.get("text", "") for delta in deltas), ends


async def test_resumed_stream_hung_worker_continues_elsewhere(spared: Spared) -> None:
    body = spared.body(temperature=1.1)
    expected = content_of(await spared.expected(body))
    for text in await spared.ask_resumed(body, signal.SIGSTOP, after=25):
        assert content_of(events_of(text)) == expected


async def test_many_streams_survive_the_death_of_their_worker(spared: Spared) -> None:
    bodies = [spared.body(temperature=1.0, max_tokens=200) for _ in range(12)]
    expected = [content_of(await spared.expected(body)) for body in bodies]
    texts: list[str] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not any(RESUMED in text for text in texts):  # as in `ask_resumed`
            await spared.healthy()
            hurts = [signal.SIGKILL, *[None] * (len(bodies) - 1)]
            asking = (spared.ask(body, hurt, after=20) for body, hurt in zip(bodies, hurts, strict=True))
            texts = await asyncio.gather(*asking)
            assert [content_of(events_of(text)) for text in texts] == expected


async def test_resumed_stream_undisturbed_has_no_resume_comments(spared: Spared) -> None:
    body = spared.body(temperature=0)
    text = await spared.ask(body, None, after=0)
    assert "baton-" not in text.replace('"baton-', "") and RESUMED not in text
    assert content_of(events_of(text)) == content_of(await spared.expected(body))
