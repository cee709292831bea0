"""Rows of output and error files: in the input's order, one line each, whatever the results look like."""

from __future__ import annotations

import json

import msgspec

from baton_api.errors import TransferFailed
from baton_batches.rendering import BatchUsage, rows
from baton_batches.values import LineResult

NUMBERED = [(number, json.dumps({"custom_id": f"n{number}", "x": 1}).encode()) for number in (1, 3, 4, 9)]


def rendered(*results: LineResult, expired: bool = False) -> list[tuple[int, dict[str, object]]]:
    lines = list(rows("batch_7", NUMBERED, iter(results), expired))
    assert all(row.endswith(b"\n") and row.count(b"\n") == 1 and b"\r" not in row for _, row in lines)
    return [(result.line, json.loads(row)) for result, row in lines]


def test_rows_have_openai_format_in_input_order() -> None:
    good = LineResult(1, 200, b'{"a":[1, 2]}', "req_1")
    refused = LineResult(3, 400, b'{"error":{}}', "req_3")
    lost = LineResult(9, 0, b'{"code":"worker_error","message":"m"}')
    assert rendered(good, refused, lost) == [
        (1, {"id": "batch_req_7_1", "custom_id": "n1", "error": None,
             "response": {"status_code": 200, "request_id": "req_1", "body": {"a": [1, 2]}}}),
        (3, {"id": "batch_req_7_3", "custom_id": "n3", "error": None,
             "response": {"status_code": 400, "request_id": "req_3", "body": {"error": {}}}}),
        (9, {"id": "batch_req_7_9", "custom_id": "n9", "response": None,
             "error": {"code": TransferFailed.code, "message": "m"}}),
    ]  # fmt: skip


def test_body_is_kept_byte_for_byte_without_line_ends() -> None:
    (_, row), (_, other) = rows(
        "batch_7",
        NUMBERED,
        iter([LineResult(1, 200, b'{"a":  1.50}'), LineResult(3, 200, b'{\r\n "a":\n "\\n" }')]),
        False,
    )
    assert b'"body":{"a":  1.50}}' in row
    assert json.loads(other)["response"]["body"] == {"a": "\n"}


def test_row_is_one_line_for_readers_that_split_at_unicode_separators() -> None:
    body = '{"a": "1\u20282\u20293\x854"}'
    ((_, row),) = rows("batch_7", NUMBERED[:1], iter([LineResult(1, 200, body.encode())]), False)
    assert len(row.decode().splitlines()) == 1
    assert json.loads(row)["response"]["body"] == json.loads(body)


def test_non_json_answer_becomes_a_string() -> None:
    [(_, row)] = rendered(LineResult(1, 502, b"<html>\n\xff"))
    assert row["response"]["body"] == "<html>\n\ufffd"  # type: ignore[index]


def test_expired_lines_are_rendered_as_expired() -> None:
    lines = rendered(LineResult(3, 200, b"{}"), expired=True)
    assert [number for number, _ in lines] == [1, 3, 4, 9]
    assert lines[0][1]["error"] == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    assert lines[0][1]["response"] is None
    assert rendered(LineResult(3, 200, b"{}"))[0][0] == 3


def test_usage_is_the_sum_of_the_answers() -> None:
    usage = BatchUsage()
    chat = {
        "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    response = {
        "input_tokens": 3, "output_tokens": 1, "total_tokens": 4,
        "input_tokens_details": {"cached_tokens": 1}, "output_tokens_details": None,
    }  # fmt: skip
    for body in ({"usage": chat}, {"usage": response}, {"usage": None}, {}, {"usage": 7}, {"usage": chat}):
        usage.add(msgspec.json.encode(body))
    usage.add(b"no json")
    assert usage.counts() == {
        "input_tokens": 23, "cached_tokens": 9,
        "output_tokens": 11, "reasoning_tokens": 4, "total_tokens": 34,
    }  # fmt: skip
