"""
What processes write to their logs: one JSON object to a line, or a short line for a person at a terminal.

A line that belongs to a request says so: its id is told once, where the request comes in (`about`), and is in
every line that is written on its behalf from there on; threads that work for many requests name it with the
line (`of`). Prompts are in no line. What an exception of somebody else's library says might quote one, so of
those that belong to a request only the type and the place are written.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, TextIO, get_args

import msgspec

from baton_api.errors import BatonError, SetupError

Format = Literal["auto", "text", "json"]

QUIET = ("httpx", "uvicorn", "urllib3", "filelock")
"""Libraries that have a line for all that they do."""

_ABOUT: ContextVar[Mapping[str, str] | None] = ContextVar("about", default=None)

VARIABLE = "BATON_LOG_FORMAT"

_format: Format = "auto"
_FIELDS = "baton_fields"


def about(**fields: str) -> None:
    """From here on, in this task and those that it begins, lines belong to this: `request_id="req_1"`."""
    _ABOUT.set(fields)


@contextmanager
def during(**fields: str) -> Iterator[None]:
    """The same until this is left."""
    token = _ABOUT.set(fields)
    try:
        yield
    finally:
        _ABOUT.reset(token)


def of(request_id: str) -> dict[str, Mapping[str, str]]:
    """For `extra=`: one line belongs to this request."""
    return {_FIELDS: {"request_id": request_id}}


def read_format(text: str) -> Format:
    """Raises SetupError for what is none."""
    for format in get_args(Format):
        if text == format:
            return format  # type: ignore[no-any-return]
    raise SetupError(f"--log-format {text!r} is none of {', '.join(get_args(Format))}.")


def for_children() -> dict[str, str]:
    """The environment by which processes that this one starts write as it does."""
    return {VARIABLE: _format}


def begin(format: Format, process: str, stream: TextIO | None = None) -> None:
    """Write this process's log to `stream`, standard error if none; it is called `process` there."""
    global _format
    _format = format
    stream = stream or sys.stderr
    plain = format == "text" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Text() if plain else Json(process))
    handler.addFilter(_belongs)
    # No line tells where in the code it was written, by which thread: to look costs half of what a line does.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    for before in list(root.handlers):
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def called(process: str) -> None:
    """This process, which another one's `begin` was for, is called so: a child that was forked from it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Json):
            handler.setFormatter(Json(process))


def fields_of(record: logging.LogRecord) -> Mapping[str, str]:
    """What a line belongs to."""
    found: Mapping[str, str] | None = getattr(record, _FIELDS, None)
    return found or {}


def _belongs(record: logging.LogRecord) -> bool:
    """Note it when the line is written: it may be formatted elsewhere."""
    if not hasattr(record, _FIELDS) and (here := _ABOUT.get()):
        setattr(record, _FIELDS, here)
    return True


class Json(logging.Formatter):
    """An object with `time`, `level`, `process`, `logger`, `message`, what it belongs to, and `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": f"{_second(int(record.created))}.{int(record.created % 1 * 1000):03}+00:00",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            told["exception"] = _shown(record.exc_info[1], bool(fields_of(record)))
        try:
            return _ENCODER.encode(told).decode()
        except UnicodeEncodeError:  # half a character, of a name of a file or of what a client sent
            return json.dumps(told)


_ENCODER = msgspec.json.Encoder()


@lru_cache(4)
def _second(time: int) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class Text(logging.Formatter):
    """`[2026-11-21 19:00:00] message (request_id)`, and a warning says that it is one."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = f"[{self.formatTime(record, self.datefmt)}] {record.getMessage()}"
        added = [value for value in fields_of(record).values() if value not in line]
        if added:
            line += f" ({', '.join(added)})"
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + _shown(record.exc_info[1], bool(fields_of(record))).rstrip()
        return line


def _shown(error: BaseException, of_a_request: bool) -> str:
    if not of_a_request:
        return "".join(traceback.format_exception(error))
    told = traceback.format_list(traceback.extract_tb(error.__traceback__))
    said = str(error) if isinstance(error, BatonError) else "what it says is left out"
    told.append(f"{type(error).__qualname__}: {said}\n")
    return "".join(told)
