"""
What agents send beyond the specifications: docs/guides/agents.md has a row for each request here.

The requests were recorded from the clients, or written after their sources, and shortened.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, Api, open_api

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "agents.md"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PIXELS = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
EPHEMERAL = {"type": "ephemeral"}
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
PATCH = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: "*** Begin Patch" LF "*** End Patch"\nLF: "\\n"\n',
}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def says(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def item(role: str, words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def call(arguments: str = '{"city": "Rome"}') -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


HI = {"role": "user", "content": "Hi"}
WEATHER = {"name": "weather", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "strict": False, "parameters": SCHEMA}
USED = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code-context": (MESSAGES, {
        "messages": [HI], "max_tokens": 32000,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id":"07f1"}'}}),
    "claude-code-count": (COUNT, {
        "messages": [HI], "tools": [WEATHER], "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    "claude-code-system": (MESSAGES, {
        "system": [text("x-anthropic-billing-header: cc_version=2.1.332;"),
                   text("You are an agent.", cache_control=EPHEMERAL)],
        "messages": [says("user", text("Hi")), says("system", text("# Environment"))]}),
    "claude-code-tools": (MESSAGES, {
        "messages": [HI, says("assistant", USED), says("user", {
            "type": "tool_result", "tool_use_id": "c1",
            "content": [{"type": "tool_reference", "tool_name": "weather"}]})],
        "tools": [WEATHER | {"defer_loading": True, "cache_control": EPHEMERAL}]}),
    "claude-code-changed-tools": (MESSAGES, {
        "messages": [HI, says("system", {"type": "tool_addition", "tool": {
            "type": "tool_reference", "name": "weather"}})], "tools": [WEATHER]}),
    "claude-code-search": (MESSAGES, {
        "messages": [HI], "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}),
    "claude-code-images": (MESSAGES, {
        "messages": [HI, says("assistant", USED),
                     says("user", {"type": "tool_result", "tool_use_id": "c1", "content": [IMAGE]})]}),
    "claude-code-history": (MESSAGES, {
        "messages": [HI, says(
            "assistant", {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}, text("Ho.")), HI]}),
    "claude-code-budget": (MESSAGES, {
        "messages": [HI], "max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}}),
    "codex-fields": (RESPONSES, {
        "input": [item("user", "Hi")], "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2", "client_metadata": {"turn_id": "01a2"}, "text": {"verbosity": "low"}}),
    "codex-tools": (RESPONSES, {
        "input": [item("user", "Hi")], "tools": [
            FLAT, {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "tool_search", "execution": "client", "description": "x", "parameters": SCHEMA},
            {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [FLAT]}]}),
    "codex-patch": (RESPONSES, {
        "input": [item("user", "Hi")],
        "tools": [{"type": "custom", "name": "apply_patch", "format": PATCH}]}),
    "codex-messages": (RESPONSES, {
        "input": [item("developer", "You are an agent."), item("developer", "Skills."),
                  item("user", "<environment_context>"), item("user", "Hi")]}),
    "codex-history": (RESPONSES, {
        "input": [
            item("user", "Hi"),
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
            CALLED | {"namespace": "mcp__docs"},
            {"type": "function_call_output", "call_id": "c1", "output": [
                {"type": "input_image", "image_url": "data:image/png;base64,aGk="}]},
            {"type": "compaction", "encrypted_content": "x"}, item("user", "So?")]}),
    "codex-cut-call": (RESPONSES, {
        "input": [item("user", "Hi"), CALLED | {"arguments": '{"city": "Ro', "status": "incomplete"},
                  {"type": "function_call_output", "call_id": "c1", "output": "invalid"}]}),
    "cursor-patch": (CHAT, {
        "messages": [HI], "user": "u", "tools": [
            FUNCTION, {"type": "custom", "name": "ApplyPatch", "description": "Edits.", "format": PATCH}]}),
    "cursor-empty-content": (CHAT, {
        "messages": [HI, {"role": "assistant", "content": [], "tool_calls": [call()]},
                     {"role": "tool", "tool_call_id": "c1", "content": [text("sun")]}], "tools": [FUNCTION]}),
    "cursor-input": (CHAT, {
        "input": [{"role": "system", "content": "Be brief."}, item("user", "Hi"), CALLED,
                  {"type": "function_call_output", "call_id": "c1", "output": "sun"}], "tools": [FLAT]}),
    "openhands-metadata": (CHAT, {
        "messages": [HI], "metadata": {
            "trace_version": "1.0.0", "tags": ["app:openhands", "type:agent"], "session_id": "2dff"}}),
    "openhands-messages": (CHAT, {
        "messages": [says("system", text("You are an agent.", cache_control=EPHEMERAL)), HI,
                     {"role": "assistant", "content": [text("Look.")], "tool_calls": [call()]},
                     {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": [
                         text("See:"), PIXELS]}], "tools": [FUNCTION]}),
    "langchain-images": (CHAT, {
        "messages": [HI, {"role": "assistant", "content": "", "tool_calls": [call()]},
                     {"role": "tool", "tool_call_id": "c1", "content": [PIXELS]}]}),
    "langchain-invalid-calls": (CHAT, {
        "messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call('{"city": ')]},
                     {"role": "tool", "tool_call_id": "c1", "content": "invalid"}, HI], "tools": [FUNCTION]}),
    "langchain-search": (RESPONSES, {
        "input": [HI], "tools": [{"type": "web_search"}, FLAT]}),
    "litellm-thinking": (CHAT, {
        "messages": [HI, {
            "role": "assistant", "content": "Ho.", "reasoning_content": "Hm.", "function_call": None,
            "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
            "provider_specific_fields": {"refusal": None}}, HI],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "reasoning_effort": "low"}),
    "editors-stops": (CHAT, {"messages": [HI], "stop": [f"<|fim_{place}|>" for place in range(14)]}),
    "ai-sdk-schemas": (RESPONSES, {
        "input": [HI], "tools": [FLAT | {"strict": None}], "text": {"format": {
            "type": "json_schema", "name": "response", "strict": False, "schema": SCHEMA}}}),
    "ai-sdk-anthropic": (MESSAGES, {
        "messages": [says("user", text("Hi"))], "tool_choice": {"type": "auto"},
        "tools": [WEATHER | {"eager_input_streaming": True}]}),
}  # fmt: skip
"""Path and body by the names of the guide's rows."""


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(settings=WorkerSettings(tool_call_parser="hermes")) as api:
        yield api


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_agent_request_is_served(api: Api, name: str, stream: bool) -> None:
    path, body = REQUESTS[name]
    script = '{"city": "Rome"}' if name == "ai-sdk-schemas" else "Good day."
    api.model.script = script
    more: dict[str, Any] = {"max_tokens": 64} if path == MESSAGES else {}
    more |= {} if path == COUNT else {"stream": stream}
    if stream and path == CHAT:
        more |= {"stream_options": {"include_usage": True}}
    query = "?beta=true" if path in (MESSAGES, COUNT) else ""
    answer = await api.http.post(path + query, json={"model": MODEL} | more | body)
    assert answer.status_code == 200, answer.text
    if path != COUNT and not stream:
        assert script in answer.text.replace('\\"', '"')


async def test_agent_reference_to_an_item_is_resolved_or_rejected_with_the_way_out(api: Api) -> None:
    api.model.script = "Good day."
    first = (await api.http.post(RESPONSES, json={"model": MODEL, "input": [HI]})).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    by_id, whole, unknown = [
        await api.http.post(RESPONSES, json={"model": MODEL, "input": [HI, item, HI]})
        for item in (reference, first["output"][0], {"type": "item_reference", "id": "msg_1"})
    ]
    assert by_id.status_code == 200, by_id.text
    assert by_id.json()["usage"]["input_tokens"] == whole.json()["usage"]["input_tokens"]
    error = unknown.json()["error"]
    assert (unknown.status_code, error["param"]) == (400, "input[1].id")
    assert "'msg_1' not found" in error["message"] and "store: false" in error["message"]


async def test_agent_input_of_cursor_names_its_place(api: Api) -> None:
    items = [HI, {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": 7}]
    answer = await api.http.post(CHAT, json={"model": MODEL, "input": items})
    assert answer.json()["error"]["param"] == "input[1].arguments"


def test_agents_guide_has_a_row_for_each_request() -> None:
    rows = re.findall(r"\| `([a-z-]+)` \|", GUIDE.read_text(encoding="utf-8"))
    assert rows == [*REQUESTS, "ai-sdk-references"]
