"""What holds for every test, and which of them run in one process where several share the work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_api import logs

HERE = Path(__file__).parent

WHOLE = ("conformance", "observing")
"""Folders whose tests share one service."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together (`--dist loadgroup`): what they share is started once."""
    for item in items:
        folder, *rest = item.path.relative_to(HERE).parts
        group = folder if folder in WHOLE else "/".join((folder, *rest))
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def a_log_of_its_own() -> Iterator[None]:
    """A command that a test runs sets up this process's log: the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, *logs.QUIET)]
    handlers, levels = list(loggers[0].handlers), [logger.level for logger in loggers]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
