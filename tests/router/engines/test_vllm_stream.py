"""vLLM's events on their way, cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_api.errors import ModelNotFound
from baton_router.engines.bodies import openai_error, read_options, with_members
from baton_router.engines.vllm import BODIES
from baton_router.engines.vllm_stream import StreamOptions, VllmStream

HEAD = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":17,"model":"a/\\"b\\""'


def event(content: str, ids: str, finish: str = "null") -> str:
    choice = f'"index":0,"delta":{{"content":"{content}"}},"finish_reason":{finish},"token_ids":{ids}'
    return f'{HEAD},"choices":[{{{choice}}}]}}\n\n'


ROLE = (
    f'{HEAD},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"finish_reason":null}}],'
    '"prompt_token_ids":[5,6,7],"prompt_text":null}\n\n'
)
TRICKY = '\\",\\"token_ids\\":[1,2]'
STREAM = (
    ROLE
    + event("Hi", "[11]")
    + event("", "[12]")
    + event(f"é {TRICKY}", "[13,14]")
    + event("", "[15]", '"stop"')
    + f'{HEAD},"choices":[],"usage":{{"prompt_tokens":3,"total_tokens":8,"completion_tokens":5}}}}\n\n'
    + "data: [DONE]\n\n"
).encode()
PLAIN = (
    STREAM.replace(b"[11]", b"null")
    .replace(b"[12]", b"null")
    .replace(b'"token_ids":[13,14]', b'"token_ids":null')
    .replace(b"[15]", b"null")
    .replace(b"[5,6,7]", b"null")
)
WITHOUT_USAGE = b"".join(one + b"\n\n" for one in PLAIN.split(b"\n\n")[:-1] if b'"usage"' not in one)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no defect
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_events_pass_as_vllm_sends_them_without_the_router(cuts: list[int]) -> None:
    ends = [*sorted(set(cuts)), len(STREAM)]
    stream = VllmStream(StreamOptions())
    pieces = [STREAM[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    passed = b"".join(map(stream.push, pieces)) + stream.finish()
    assert passed == WITHOUT_USAGE
    assert stream.complete and stream.tokens == 5
    assert stream.prompt_tokens == [5, 6, 7]


def test_requested_usage_and_ids_pass() -> None:
    assert VllmStream(StreamOptions(usage=True, token_ids=True)).push(STREAM) == STREAM


def test_state_ends_with_the_last_token_whose_text_passed() -> None:
    stream = VllmStream(StreamOptions())
    stream.push((ROLE + event("Hi", "[11]") + event("", "[12]")).encode())
    assert stream.state is not None
    assert stream.state.answer == (11,)
    assert not stream.state.ending


def test_resumed_events_continue_under_the_first_head() -> None:
    first = VllmStream(StreamOptions(usage=True))
    first.push((ROLE + event("Hi", "[11]")).encode())
    second = VllmStream(StreamOptions(usage=True), first.state)
    other = STREAM.replace(b"chatcmpl-1", b"chatcmpl-2").replace(b":17", b":99")
    usage = b'"prompt_tokens":3,"total_tokens":8,"completion_tokens":5'
    passed = second.push(other.replace(usage, b'"prompt_tokens":4,"total_tokens":9,"completion_tokens":5'))
    assert b"chatcmpl-2" not in passed and b":99" not in passed
    assert b'"role"' not in passed
    assert b'"prompt_tokens":3,"total_tokens":9,"completion_tokens":6' in passed
    assert second.generated == 5 and second.tokens == 6


def test_finished_stream_without_its_end_has_an_ending() -> None:
    stream = VllmStream(StreamOptions(usage=True))
    stream.push((ROLE + event("Hi", "[11]", '"stop"')).encode())
    assert stream.state is not None
    assert b'"completion_tokens":1' in stream.state.ending
    assert stream.state.ending.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "ending", ["data: [DONE]\n\n", event("", "[]", '"abort"') + "data: [DONE]\n\n"], ids=["bare", "aborted"]
)
def test_answer_that_the_worker_gives_up_is_not_complete(ending: str) -> None:
    stream = VllmStream(StreamOptions())
    passed = stream.push((ROLE + event("Hi", "[11]") + ending).encode())
    assert b"abort" not in passed and b"DONE" not in passed and not stream.complete
    assert stream.state is not None and stream.state.answer == (11,) and not stream.state.ending


@pytest.mark.parametrize(("code", "resumable"), [(500, True), (400, False)])
def test_error_event_is_held_back(code: int, resumable: bool) -> None:
    stream = VllmStream(StreamOptions())
    failure = (
        f'data: {{"error":{{"message":"Dead","type":"x","param":null,"code":{code}}}}}\n\ndata: [DONE]\n\n'
    )
    passed = stream.push((ROLE + event("Hi", "[11]") + failure).encode())
    assert b"error" not in passed and not stream.complete
    assert (stream.state is not None) is resumable


@pytest.mark.parametrize(
    ("body", "pairs", "resumable"),
    [
        (b'{"messages": []}', True, True),
        (b'{"messages": [], "n": 2}', False, False),
        (b'{"prompt": ["a", "b"]}', False, False),
        (b'{"prompt": [1, 2]}', True, True),
        (b'{"prompt": "a", "echo": true}', False, False),
        (b'{"messages": [], "stop": "x"}', True, False),
        (b'{"messages": [], "response_format": {"type": "text"}}', True, True),
        (b'{"messages": [], "response_format": {"type": "json_object"}}', True, False),
        (b'{"messages": [], "tool_choice": "auto"}', True, True),
        (b'{"messages": [], "tool_choice": "required"}', True, False),
    ],
)
def test_options_decide_what_can_be_paired_and_resumed(body: bytes, pairs: bool, resumable: bool) -> None:
    options = read_options(body, BODIES)
    assert options is not None
    assert (options.pairs, options.resumable) == (pairs, resumable)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"a":1}'),
        (b' {"b": 2} \n', b' {"b": 2,"a":1}'),
        (b'{"b": "}"}', b'{"b": "}","a":1}'),
    ],
)
def test_members_are_added_at_the_end(body: bytes, expected: bytes) -> None:
    assert with_members(body, {"a": 1}) == expected
    assert with_members(body, {}) == body


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "message"),
    [
        (404, b'{"error":{"message":"The model `x` does not exist.","code":404}}', "invalid_request_error",
         ModelNotFound.code, "The model `x` does not exist."),
        (422, b'{"detail":"Not Found"}', "invalid_request_error", None, "Not Found"),
        (500, b"oops", "server_error", None, "oops"),
        (429, b'{"message":"slow"}', "rate_limit_error", None, "slow"),
        (400, b'{"error":"plain"}', "invalid_request_error", None, "plain"),
    ],
)  # fmt: skip
def test_errors_get_openai_s_shape(
    status: int, body: bytes, kind: str, code: str | None, message: str
) -> None:
    error = json.loads(openai_error(status, body))["error"]
    assert error == {"message": message, "type": kind, "param": None, "code": code}
