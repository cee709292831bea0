"""Names of prompt chunks: equal for the parts that a worker's cache would share."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baton_api.limits import MESSAGES
from baton_router.cache.prompt_chunks import CHUNK_BYTES, PromptChunks
from baton_router.requests.inference_request import InferenceRequest

SYSTEM = {"role": "system", "content": "Be brief. " * 200}
USER = {"role": "user", "content": "What is the capital of France?"}
PARTS = [{"type": "text", "text": USER["content"]}]
ANSWER = {"role": "assistant", "content": "Paris. " * 150}


def prompt_of(path: str = "/v1/chat/completions", **fields: Any) -> PromptChunks:
    body = json.dumps({"model": "tiny", **fields}).encode()
    scope = {"query_string": b"", "raw_path": path.encode(), "path": path, "headers": []}
    return InferenceRequest(scope, body).prompt


def shared(one: PromptChunks, other: PromptChunks) -> int:
    """Bytes of the prefix that both name alike."""
    same = 0
    for place, (left, right) in enumerate(zip(one.names, other.names, strict=False)):
        if left != right:
            break
        same = one.sizes[place]
    return same


def size(*messages: dict[str, Any]) -> int:
    return sum(len(message["content"]) for message in messages)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_prompts_of_two_client_salts_share_nothing(path: str) -> None:
    """Workers keep their blocks apart, so the index must not expect one where the other is."""
    field = "messages" if "chat" in path else "input"
    prompts = [prompt_of(path, **{field: [SYSTEM, USER], **more}) for more in ({}, {"cache_salt": "a"})]
    again = prompt_of(path, **{field: [SYSTEM, USER], "cache_salt": "a"})
    assert shared(prompts[1], again) == again.bytes
    assert shared(prompts[0], prompts[1]) == 0


def test_next_turn_continues_the_chunks_of_the_conversation() -> None:
    first = prompt_of(messages=[SYSTEM, USER])
    second = prompt_of(messages=[SYSTEM, USER, ANSWER, USER])
    assert shared(first, second) == first.bytes == size(SYSTEM, USER)


def test_assistant_messages_are_marked() -> None:
    prompt = prompt_of(messages=[SYSTEM, USER, ANSWER, USER])
    ((begin, end),) = prompt.answers
    assert prompt.sizes[begin - 1] == size(SYSTEM, USER)
    assert prompt.sizes[end - 1] == size(SYSTEM, USER, ANSWER)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, ANSWER]}, size(SYSTEM)),
        ({"messages": [USER]}, {"messages": [{**USER, "role": "system"}]}, 0),
        (
            {"messages": [USER]},
            {"messages": [{**USER, "content": [{"type": "text", "text": USER["content"]}]}]},
            30,
        ),
        ({"messages": [USER], "temperature": 0}, {"messages": [USER], "temperature": 1, "n": 2}, 30),
        ({"messages": [USER], "tools": [{"a": 1}]}, {"messages": [USER]}, 0),
        ({"messages": [USER], "model": "other"}, {"messages": [USER]}, 0),
        ({"prompt": "x" * 2000}, {"prompt": "x" * 1800 + "y" * 200}, 3 * CHUNK_BYTES),
        ({"prompt": ["x" * 600, "z"]}, {"prompt": "x" * 600}, 600),
        ({"prompt": list(range(300))}, {"prompt": [*range(280), *range(20)]}, 2 * CHUNK_BYTES),
        ({"input": "x" * 600}, {"input": "x" * 512}, 512),
    ],
)
def test_prompts_share_their_equal_prefix(one: dict[str, Any], other: dict[str, Any], alike: int) -> None:
    assert shared(prompt_of(**one), prompt_of(**other)) == alike


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "no list"},
        {"messages": [1, 2]},
        {"messages": [{"role": 3, "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [3, None, {"text": 5}]}]},
        {"messages": []},
        {"prompt": {"a": 1}},
        {"prompt": [-1, 5]},
        {"prompt": [1.5]},
        {"prompt": []},
        {"model": 5, "messages": [USER]},
        {},
    ],
)
def test_invalid_prompt_has_no_chunks_and_is_left_to_the_worker(fields: dict[str, Any]) -> None:
    prompt = prompt_of(**fields)
    assert len(prompt.names) == len(prompt.sizes)
    assert prompt_of(**fields) == prompt


@pytest.mark.parametrize("seed", range(20))
def test_names_are_equal_exactly_where_prefixes_are(seed: int) -> None:
    rng = random.Random(seed)
    words = [
        {"role": rng.choice(["user", "assistant"]), "content": chr(97 + n) * rng.randrange(1500)}
        for n in range(4)
    ]
    seen: dict[int, str] = {}
    for _ in range(50):
        talk = [rng.choice(words) for _ in range(rng.randint(1, 6))]
        prompt = prompt_of(messages=talk)
        assert prompt.bytes == size(*talk)
        text = [(message["role"], message["content"]) for message in talk]
        place = 0
        for number, (_, content) in enumerate(text):
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                before = json.dumps([text[:number], text[number][0], content[: start + CHUNK_BYTES]])
                assert seen.setdefault(prompt.names[place], before) == before
                place += 1
        assert place == len(prompt.names)


@pytest.mark.parametrize("message", [{}, {"content": 1}, {"role": "assistant", "content": "x"}])
def test_law_chunks_are_bounded_by_bytes_and_messages(message: dict[str, Any]) -> None:
    """One step of the event loop names them all; one turn later the names are the same."""
    many = [message] * 19_000
    prompt = prompt_of(messages=many)
    assert len(prompt.names) <= MESSAGES.most + prompt.bytes // CHUNK_BYTES + 2
    longer = prompt_of(messages=[*many, USER])
    assert shared(prompt, longer) >= prompt.bytes - CHUNK_BYTES
