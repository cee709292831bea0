"""Parts become items, and each item's events stand in OpenAI's order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from baton_engine.api.answer_shape import Choice
from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Thought, ToolCall
from baton_engine.api.responses.output import Events, ResponseItems, ResponseShape
from baton_engine.api.responses.request import OfferedTool
from baton_engine.api.transcript import Piece
from tests.engine.api.responses.typed import kinds, typed_events

MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
]
MESSAGE += ["output_item.done"]
THOUGHT = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
CUSTOM = [kind.replace("function_call_arguments", "custom_tool_call_input") for kind in CALL]


SHELL = OfferedTool(definition={"type": "custom", "name": "shell"}, source="tools[0]")


def written(
    parts: Sequence[Part], status: str = "completed"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items, and the events."""
    events = Events(wanted=True)
    output = ResponseItems(events, [SHELL], None)
    stream = b""
    for part in parts:
        output.push([part])
        stream += events.take()
    output.close(status)
    return output.items, typed_events(stream + events.take())


def summaries(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Of each item its type, what it says, and its status."""
    short: list[tuple[str, ...]] = []
    summary: tuple[str, ...]
    for item in items:
        match item["type"]:
            case "message" | "reasoning":
                (content,) = item["content"]
                summary = (content["text"],)
            case "function_call":
                summary = (item["call_id"], item["name"], item["arguments"])
            case _:
                summary = (item["call_id"], item["name"], item["input"])
        short.append((item["type"], *summary, item["status"]))
    return short


STORIES: dict[str, tuple[list[Part], list[tuple[str, ...]], list[str]]] = {
    "words": (
        [AnswerText("Hel"), AnswerText("lo")],
        [("message", "Hello", "completed")],
        MESSAGE,
    ),
    "thought and words": (
        [Thought("So"), Thought("."), AnswerText("Yes")],
        [("reasoning", "So.", "completed"), ("message", "Yes", "completed")],
        THOUGHT + MESSAGE,
    ),
    "two calls": (
        [
            ToolCall(0, "c0", "f"),
            Arguments(0, '{"a":'),
            Arguments(0, "1}"),
            ToolCall(1, "c1", "g"),
            Arguments(1, "{}"),
        ],
        [
            ("function_call", "c0", "f", '{"a":1}', "completed"),
            ("function_call", "c1", "g", "{}", "completed"),
        ],
        CALL + CALL,
    ),
    "a custom call": (
        [ToolCall(0, "c0", "shell"), Arguments(0, "ls")],
        [("custom_tool_call", "c0", "shell", "ls", "completed")],
        CUSTOM,
    ),
    "a call without arguments": (
        [ToolCall(0, "c0", "f")],
        [("function_call", "c0", "f", "", "completed")],
        ["output_item.added", "function_call_arguments.done", "output_item.done"],
    ),
    "all of them": (
        [
            Thought("Hm"),
            AnswerText("\n\n"),
            AnswerText("Wait"),
            AnswerText("\n"),
            ToolCall(0, "c0", "f"),
            Arguments(0, "{}"),
            AnswerText("\n"),
        ],
        [
            ("reasoning", "Hm", "completed"),
            ("message", "\n\nWait\n", "completed"),
            ("function_call", "c0", "f", "{}", "completed"),
        ],
        THOUGHT + MESSAGE + CALL,
    ),
    "white space alone between items": (
        [Thought("Hm"), AnswerText("\n"), AnswerText("\n"), ToolCall(0, "c0", "f"), Arguments(0, "{}")],
        [("reasoning", "Hm", "completed"), ("function_call", "c0", "f", "{}", "completed")],
        THOUGHT + CALL,
    ),
    "white space alone": ([AnswerText(" "), AnswerText("\n")], [("message", " \n", "completed")], MESSAGE),
    "nothing": (
        [],
        [("message", "", "completed")],
        [kind for kind in MESSAGE if "delta" not in kind],
    ),
}


@pytest.mark.parametrize(("parts", "items", "order"), STORIES.values(), ids=STORIES.keys())
def test_response_items_case_gives_items_and_events(
    parts: list[Part], items: list[tuple[str, ...]], order: list[str]
) -> None:
    output_items, events = written(parts)
    assert summaries(output_items) == items
    assert kinds(events) == order


def test_response_items_cut_item_is_incomplete() -> None:
    items, events = written([Thought("Hm"), AnswerText("Ye")], "incomplete")
    assert [item["status"] for item in items] == ["completed", "incomplete"]
    assert [event["item"]["status"] for event in events if event["type"].endswith("item.done")] == [
        "completed",
        "incomplete",
    ]


def test_thought_that_is_cut_gets_no_message() -> None:
    items, _ = written([Thought("Hm")], "incomplete")
    assert summaries(items) == [("reasoning", "Hm", "incomplete")]


def test_items_have_ids_of_their_own_which_their_events_name() -> None:
    items, events = written(STORIES["all of them"][0])
    assert [item["id"].partition("_")[0] for item in items] == ["rs", "msg", "fc"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
        if event["type"] == "response.output_item.added":
            assert event["item"]["id"] == items[event["output_index"]]["id"]
            assert event["item"]["status"] == "in_progress"


def test_response_items_not_streamed_writes_no_events() -> None:
    events = Events(wanted=False)
    output = ResponseItems(events, [], None)
    output.push([AnswerText("Hello")])
    output.close("completed")
    assert summaries(output.items) == [("message", "Hello", "completed")]
    assert events.take() == b""


def test_parts_of_tokens_that_come_together_are_one_event() -> None:
    """As of a chat: those of a frontend, which reads tokens that have come meanwhile as one output."""
    events = Events(wanted=True)
    shape = ResponseShape(
        model="m",
        echo={"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        events_of=events,
        output=ResponseItems(events, [], None),
        logprobs=None,
        keep=lambda body: None,
    )
    parts: list[Part] = [Thought("So"), Thought("."), AnswerText("Hel"), AnswerText("lo")]
    stream = typed_events(shape.events(Mock(Choice), Piece("So.Hello", parts=parts), Mock()))
    assert [event["delta"] for event in stream if "delta" in event] == ["So.", "Hello"]


@pytest.mark.parametrize("seed", range(30))
def test_response_items_random_parts_events_add_up_to_items(seed: int) -> None:
    rng = random.Random(seed)
    parts: list[Part] = []
    calls = itertools.count()
    for _ in range(rng.randrange(1, 8)):
        text = "".join(rng.choices('ab \n"é🎉', k=rng.randrange(1, 9)))
        match rng.randrange(3):
            case 0:
                parts.append(Thought(text))
            case 1:
                parts.append(AnswerText(text))
            case _:
                number = next(calls)
                parts += [ToolCall(number, f"c{number}", rng.choice(["f", "shell"])), Arguments(number, text)]
    items, _ = written(parts)
    split, events = written([piece for part in parts for piece in pieces(part, rng)])
    assert summaries(split) == summaries(items)
    deltas: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"] == split[event["output_index"]]
            *_, text, _ = summaries([event["item"]])[0]
            assert deltas.get(event["output_index"], "") == text


def pieces(part: Part, rng: random.Random) -> list[Part]:
    if isinstance(part, ToolCall):
        return [part]
    cuts = sorted(rng.sample(range(len(part.text) + 1), min(3, len(part.text))))
    texts = [part.text[start:end] for start, end in itertools.pairwise([0, *cuts, len(part.text)])]
    match part:
        case Arguments(index):
            return [Arguments(index, text) for text in texts]
        case Thought():
            return [Thought(text) for text in texts]
        case AnswerText():
            return [AnswerText(text) for text in texts]
