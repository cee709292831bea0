"""The log: what a line has, what it belongs to, and what is left out of it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from baton_api import logs
from baton_api.errors import InvalidRequest, SetupError

log = logging.getLogger("baton_test")
SECRET = "the prompt of the canary"


def begun(format: logs.Format = "auto") -> io.StringIO:
    stream = io.StringIO()
    logs.begin(format, "decode-0", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_without_a_terminal_are_json_objects() -> None:
    stream = begun()
    log.info('All is "well"\nand %d', 7)
    (line,) = lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "process": "decode-0",
        "logger": "baton_test",
        "message": 'All is "well"\nand 7',
    }


def test_line_with_an_undecodable_character_is_json() -> None:
    stream = begun()
    log.info("A file named %s.", "\udcff")
    log.info("Grüße, %s.", "世界")
    assert [line["message"] for line in lines(stream)] == ["A file named \udcff.", "Grüße, 世界."]


def test_renamed_process_appears_in_its_lines() -> None:
    stream = begun()
    logs.called("router-front-1")
    log.info("It serves.")
    assert lines(stream)[0]["process"] == "router-front-1"


def test_terminal_line_is_short_with_the_request_once() -> None:
    stream = begun("text")
    log.info("Nobody's.")
    log.warning("Refused.", extra=logs.of("req_1"))
    log.warning("req_2 was refused.", extra=logs.of("req_2"))
    printed = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert printed == ["Nobody's.", "WARNING: Refused. (req_1)", "WARNING: req_2 was refused."]


async def test_log_lines_belong_to_their_request_only() -> None:
    stream = begun()

    async def deeper(name: str) -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(log.info, "for %s", name)

    async def served(name: str) -> None:
        logs.about(request_id=name)
        await asyncio.create_task(deeper(name))

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(served(f"req_{number}"))
    log.info("for nobody")
    with logs.during(object="InferenceService models/chat"):
        log.info("for an object")
    *mine, outside, thing = lines(stream)
    assert {line["message"]: line["request_id"] for line in mine} == {
        f"for req_{number}": f"req_{number}" for number in range(5)
    }
    assert "request_id" not in outside and "object" not in outside
    assert thing["object"] == "InferenceService models/chat"


@pytest.mark.parametrize("format", ["json", "text"])
def test_request_exception_logs_type_and_place_without_text(format: logs.Format) -> None:
    stream = begun(format)
    for error in (ValueError(SECRET), InvalidRequest("The field 'n' is no number.")):
        try:
            raise error
        except Exception:
            log.exception("It broke.", extra=logs.of("req_1"))
    printed = stream.getvalue()
    assert SECRET not in printed and "ValueError" in printed and "test_logs.py" in printed
    assert "The field 'n' is no number." in printed, "our own errors say nothing but names and numbers"


def test_exception_outside_requests_is_logged_completely() -> None:
    stream = begun()
    try:
        raise ValueError("the disk is gone")
    except ValueError:
        log.exception("It broke.")
    assert "the disk is gone" in lines(stream)[0]["exception"]


def test_child_processes_use_the_format_of_their_parent() -> None:
    begun("json")
    assert logs.for_children() == {"BATON_LOG_FORMAT": "json"}
    assert logs.read_format("text") == "text"
    with pytest.raises(SetupError, match=r"Invalid --log-format 'yaml'\. Expected one of auto, text, json"):
        logs.read_format("yaml")
