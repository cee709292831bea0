"""N: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from tests.conformance.deployment import QUESTION, TIMEOUT_S, Deployment
from tests.conformance.scripted import ANSWER, THOUGHT

GREEDY: Any = {"temperature": 0}
"""The SDK has no such argument, because Anthropic's newest models reject it."""

FIELDS: Any = {"messages": QUESTION, "max_tokens": 32, "extra_body": GREEDY}
COUNT: Any = {
    "name": "count",
    "description": "Counts to a number.",
    "input_schema": {"type": "object", "properties": {"to": {"enum": [1, 2]}}, "required": ["to"]},
}


@contextmanager
def claude(served: Deployment, **more: Any) -> Iterator[anthropic.Anthropic]:
    options: dict[str, Any] = {"api_key": served.api_key, "max_retries": 0, "timeout": TIMEOUT_S} | more
    with anthropic.Anthropic(base_url=served.url, **options) as client:
        yield client


def test_N1_a_message_is_chats_answer(served: Deployment) -> None:
    chat = served.chat(temperature=0, max_tokens=32)
    with claude(served) as client:
        message = client.messages.create(model=served.model, **FIELDS)
        with client.messages.stream(model=served.model, **FIELDS) as stream:
            texts = list(stream.text_stream)
            streamed = stream.get_final_message()
        count = client.messages.count_tokens(model=served.model, messages=FIELDS["messages"])
    (block,) = message.content
    assert block.type == "text" and block.text == chat.choices[0].message.content
    assert "".join(texts) == block.text and len(texts) > 1
    assert [one.type for one in streamed.content] == ["text"]
    assert message.stop_reason == streamed.stop_reason == "max_tokens"
    usage = message.usage
    assert chat.usage is not None and usage.cache_read_input_tokens is not None
    assert (
        usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens == chat.usage.prompt_tokens
    )
    assert usage.output_tokens == 32


def test_N2_a_forced_tool_is_called_and_answered(served: Deployment) -> None:
    forced: Any = {"tools": [COUNT], "tool_choice": {"type": "any"}}
    with claude(served) as client:
        fields = {**FIELDS, "max_tokens": 200, **forced}
        message = client.messages.create(model=served.model, **fields)
        with client.messages.stream(model=served.model, **fields) as stream:
            streamed = stream.get_final_message()
        call = message.content[-1]
        assert message.stop_reason == streamed.stop_reason == "tool_use"
        assert call.type == "tool_use" and call.name == "count" and call.input["to"] in (1, 2)
        again = streamed.content[-1]
        assert again.type == "tool_use" and again.input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        messages: Any = [
            *QUESTION,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        after = client.messages.create(
            model=served.model, messages=messages, max_tokens=8, tools=[COUNT], extra_body=GREEDY
        )
    assert after.content[0].type == "text"


def test_N3_thoughts_are_blocks(thinker: Deployment) -> None:
    fields: Any = {**FIELDS, "max_tokens": 100}
    with claude(thinker) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 50}
        message = client.messages.create(model=thinker.model, **fields, thinking=thinking)
        with client.messages.stream(model=thinker.model, **fields, thinking=thinking) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        plain = client.messages.create(model=thinker.model, **fields, thinking={"type": "disabled"})
    for one in (message, streamed):
        thought, answer = (block.model_dump() for block in one.content)
        assert thought["type"] == "thinking" and thought["thinking"] == THOUGHT
        assert answer["type"] == "text" and answer["text"] == ANSWER
        assert one.stop_reason == "end_turn"
    assert "thinking" in kinds and "text" in kinds
    assert [block.type for block in plain.content] == ["text"]


def test_N4_a_stop_sequence_is_named(served: Deployment) -> None:
    with claude(served) as client:
        whole = client.messages.create(model=served.model, **FIELDS).content[0]
        assert whole.type == "text"
        stop = whole.text.split()[2]
        message = client.messages.create(model=served.model, **FIELDS, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_N5_errors_raise_the_sdks_classes(served: Deployment, guarded: Deployment) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}
    shown: Any = [{"role": "user", "content": [image]}]
    with claude(served) as client:
        with pytest.raises(anthropic.BadRequestError, match="text only") as unreadable:
            client.messages.create(model=served.model, messages=shown, max_tokens=8)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nope", **FIELDS)
    assert unreadable.value.request_id
    with claude(guarded, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model=guarded.model, **FIELDS)
    with claude(guarded) as client:
        assert client.messages.create(model=guarded.model, **FIELDS).stop_reason


def test_N6_the_stream_has_anthropics_events(served: Deployment) -> None:
    answer = served.post(
        "/v1/messages", {"model": served.model, "stream": True, "messages": QUESTION, "max_tokens": 8}
    )
    frames = [frame for frame in answer.text.split("\n\n") if frame and not frame.startswith(":")]
    assert "[DONE]" not in answer.text
    kinds = []
    for frame in frames:
        name, data = frame.split("\n")
        kinds.append(json.loads(data.removeprefix("data: "))["type"])
        assert name == f"event: {kinds[-1]}"
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
