"""How calls stand in messages and in deltas."""

from __future__ import annotations

from dataclasses import replace

from baton_engine.api.chat.answer import CallDeltas, finish_reason, message_calls
from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, ToolCall
from tests.engine.api.parsing.tools.answers import BOX

PARTS: list[Part] = [
    AnswerText("Hm."),
    ToolCall(0, "call_1", "weather"),
    Arguments(0, '{"city": '),
    Arguments(0, '"Rome"}'),
    ToolCall(1, "call_2", "write"),
    Arguments(1, "a b"),
    ToolCall(2, "call_3", "now"),
]
LEGACY = replace(BOX, legacy=True, parallel=False)


def test_message_calls_are_whole_without_an_index() -> None:
    assert message_calls(PARTS, BOX) == {
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            },
            {"id": "call_2", "type": "custom", "custom": {"name": "write", "input": "a b"}},
            {"id": "call_3", "type": "function", "function": {"name": "now", "arguments": ""}},
        ]
    }


def test_message_calls_without_calls_are_empty() -> None:
    assert message_calls([AnswerText("Hm.")], BOX) == {}


def test_deltas_have_id_type_and_name_once_and_the_index_always() -> None:
    deltas = CallDeltas(BOX)
    assert [deltas.delta(part) for part in PARTS if isinstance(part, ToolCall | Arguments)] == [
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_2", "type": "custom", "custom": {"name": "write", "input": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "custom": {"input": "a b"}}]},
        {
            "tool_calls": [
                {"index": 2, "id": "call_3", "type": "function", "function": {"name": "now", "arguments": ""}}
            ]
        },
    ]


def test_functions_are_answered_with_one_function_call() -> None:
    parts = PARTS[1:4]
    deltas = CallDeltas(LEGACY)
    assert message_calls(parts, LEGACY) == {
        "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}
    }
    assert [deltas.delta(part) for part in parts if isinstance(part, ToolCall | Arguments)] == [
        {"function_call": {"name": "weather", "arguments": ""}},
        {"function_call": {"arguments": '{"city": '}},
        {"function_call": {"arguments": '"Rome"}'}},
    ]


def test_finish_reason_follows_the_call_style() -> None:
    assert (finish_reason(BOX), finish_reason(LEGACY)) == ("tool_calls", "function_call")
