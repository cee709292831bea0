"""
Logs of all processes: one JSON object per line, or a short text line on a terminal.

A line of a request has the request's id. `about` sets the id where the request arrives, for all its later
lines. Threads that work for many requests set it per line with `of`. No line has the text of a prompt.
Exceptions of other libraries might quote one, so lines of requests have only their type and traceback.
"""

from __future__ import annotations

import json
import logging
import re
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
from baton_api.json_text import on_one_line

Format = Literal["auto", "text", "json"]

QUIET = ("httpx", "uvicorn", "urllib3", "filelock")
"""Libraries with too many lines."""

_ABOUT: ContextVar[Mapping[str, str] | None] = ContextVar("about", default=None)

VARIABLE = "BATON_LOG_FORMAT"

_format: Format = "auto"
_FIELDS = "baton_fields"


def about(**fields: str) -> None:
    """Add fields to all later lines of this task and of the tasks that it starts."""
    _ABOUT.set(fields)


@contextmanager
def during(**fields: str) -> Iterator[None]:
    """Add fields to all lines within the context."""
    token = _ABOUT.set(fields)
    try:
        yield
    finally:
        _ABOUT.reset(token)


def of(request_id: str) -> dict[str, Mapping[str, str]]:
    """Return the value of `extra=` for one line of a request."""
    return {_FIELDS: {"request_id": request_id}}


def is_warning(line: str) -> bool:
    """
    Return whether a line of either format is a warning or an error.

    >>> is_warning("[2026-11-21 19:00:00] WARNING: no keys"), is_warning("[2026-11-21 19:00:00] WARNINGs: 0")
    (True, False)
    """
    return _WARNING.match(line) is not None


_WARNING = re.compile(
    r'\[[^\]]*\] (WARNING|ERROR|CRITICAL): |\{"time":"[^"]*","level":"(warning|error|critical)"'
)


def read_format(text: str) -> Format:
    """Parse a format. Raises SetupError if it is unknown."""
    for format in get_args(Format):
        if text == format:
            return format  # type: ignore[no-any-return]
    raise SetupError(f"Invalid --log-format {text!r}. Expected one of {', '.join(get_args(Format))}.")


def for_children() -> dict[str, str]:
    """Return the environment that gives child processes the same format."""
    return {VARIABLE: _format}


def begin(format: Format, process: str, stream: TextIO | None = None) -> None:
    """Write the log of this process to `stream` (default: standard error), under the name `process`."""
    global _format
    _format = format
    stream = stream or sys.stderr
    plain = format == "text" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Text() if plain else Json(process))
    handler.addFilter(_belongs)
    # Without the source line and the thread, whose lookup takes half of the time of a line.
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
    """Change the name of this process, a fork of one that called `begin`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Json):
            handler.setFormatter(Json(process))


def fields_of(record: logging.LogRecord) -> Mapping[str, str]:
    """Return the fields of a line."""
    fields: Mapping[str, str] | None = getattr(record, _FIELDS, None)
    return fields or {}


def _belongs(record: logging.LogRecord) -> bool:
    """Store the fields in the record, which another thread may format."""
    if not hasattr(record, _FIELDS) and (here := _ABOUT.get()):
        setattr(record, _FIELDS, here)
    return True


class Json(logging.Formatter):
    """An object with `time`, `level`, `process`, `logger`, `message`, the fields, and `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{_second(int(record.created))}.{int(record.created % 1 * 1000):03}+00:00",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _shown(record.exc_info[1], bool(fields_of(record)))
        try:
            return on_one_line(_ENCODER.encode(line)).decode()
        except UnicodeEncodeError:  # a lone surrogate of a file name or of a client
            return json.dumps(line)


_ENCODER = msgspec.json.Encoder()


@lru_cache(4)
def _second(time: int) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class Text(logging.Formatter):
    """`[2026-11-21 19:00:00] message (request_id)`; warnings and errors begin with their level."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.levelno >= logging.WARNING and not message.startswith(record.levelname):
            message = f"{record.levelname}: {message}"
        line = f"[{self.formatTime(record, self.datefmt)}] {message}"
        added = [value for value in fields_of(record).values() if value not in line]
        if added:
            line += f" ({', '.join(added)})"
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + _shown(record.exc_info[1], bool(fields_of(record))).rstrip()
        return line


def _shown(error: BaseException, of_a_request: bool) -> str:
    if not of_a_request:
        return "".join(traceback.format_exception(error))
    lines = traceback.format_list(traceback.extract_tb(error.__traceback__))
    message = str(error) if isinstance(error, BatonError) else "the message is omitted"
    lines.append(f"{type(error).__qualname__}: {message}\n")
    return "".join(lines)
