"""Fixtures for all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton_api import logs


@pytest.fixture(autouse=True)
def a_log_of_its_own() -> Iterator[None]:
    """A command that a test runs sets up this process's log: the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, *logs.QUIET)]
    handlers, levels = list(loggers[0].handlers), [logger.level for logger in loggers]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
