"""For all tests: a log of its own for each, which process runs it, and a list of long ones without a mark."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from baton_api import logs

SLOW_S = 5.0
"""Seconds of processor time from which a test is marked `slow`: docs/contributing/tests.md has the rule."""

SHARING = ("tests/conformance", "tests/observing")
"""Folders whose files use the same servers: in several processes, each process would start them all."""

UNMARKED = "seconds of processor time without the mark slow"


@pytest.fixture(autouse=True)
def a_log_of_its_own() -> Iterator[None]:
    """A command that a test runs sets up this process's log: the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, *logs.QUIET)]
    handlers, levels = list(loggers[0].handlers), [logger.level for logger in loggers]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


SLOW_WEIGHT = 100
"""Tests without the mark that take as long as one with it."""


MOST_CORES = 4
"""Each process takes 2 GB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """
    `-n logical`: as many as cores. `-n auto`: one more, because tests wait a third of their time for sockets
    and other processes. This is too many for slow tests, which start servers.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_CORES) + int(config.option.numprocesses == "auto")


class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist declares no types
    """One process for all tests of a file, or of a folder that shares servers."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((folder for folder in SHARING if file.startswith(f"{folder}/")), file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long scopes first, so that none is the last one's: `--no-loadscope-reorder` keeps this order."""
    if hasattr(config, "workerinput"):
        weights: Counter[str] = Counter()
        for item in items:
            weights[scope_of(item.nodeid)] += SLOW_WEIGHT if item.get_closest_marker("slow") else 1
        items.sort(key=lambda item: -weights[scope_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests, millions of objects that stay, out of all garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    begun = processor_s()
    yield
    if (seconds := processor_s() - begun) > SLOW_S and item.get_closest_marker("slow") is None:
        item.user_properties.append((UNMARKED, round(seconds, 1)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests of `make test` that took too long. None fails: a busy machine's clock proves nothing."""
    passed: list[pytest.TestReport] = terminalreporter.getreports("passed")
    for report in passed:
        for name, seconds in report.user_properties:
            if name == UNMARKED:
                terminalreporter.write_line(f"{seconds} {UNMARKED}: {report.nodeid}")


def processor_s() -> float:
    """Of this process and of the child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
