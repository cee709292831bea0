"""Run one process in the foreground: a worker, a router, the operator or a download."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_api import collector, logs
from baton_api.announcements import PINNED_REVISION, RESULT_FILE, Announcer, Listening, Ready, Refused
from baton_api.announcements import Bar as AnnouncedBar
from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_cli.display import Bar, Display
from baton_cli.options import read_settings
from baton_cli.supervisor import die_with_parent


def worker(role: str, given: Mapping[str, Any], announce_fd: int | None) -> None:
    """Run a worker until a signal stops it."""
    from baton_engine.settings import WorkerSettings

    announce = _begin(announce_fd)
    try:
        settings = read_settings(WorkerSettings, {**given, "role": role})
        logs.begin(settings.log_format, settings.name or role)
        with uncollected():
            match settings.role:
                case Role.PREFILL:
                    from baton_prefill.main import run
                case Role.DECODE:
                    from baton_decode.main import run
                case Role.BOTH:
                    from baton_engine.service import run
        display = Display(Console(stderr=True))
        with display.bars():
            progress = AnnouncedBar(announce) if announce_fd is not None else Bar(display, role)
            asyncio.run(run(settings, announce, progress))
    except SetupError as error:
        announce(Refused(reason=error.message))
        raise


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """
    Import without garbage collections, which take a sixth of the time of torch's import.

    Later collections are rare, and do not visit what was imported either.
    """
    gc.disable()
    try:
        yield
    finally:
        collector.run_rarely()
        gc.enable()


def fetch(uri: str, folder: str, revision: str, patterns: Sequence[str]) -> None:
    """Download the files of a model into a folder."""
    from baton_engine.model import fetching

    display = Display(Console(stderr=True))
    with display.bars():
        source = fetching.ModelSource(uri, revision, tuple(patterns))
        pinned = os.environ.get(PINNED_REVISION, "")
        download = fetching.fetch(source, Path(folder), Bar(display, "fetch"), pinned)
    if path := os.environ.get(RESULT_FILE):
        Path(path).write_text(download.revision)
    done = "Fetched" if download.fetched else "Already fetched:"
    print(f"{done} {uri} at {download.revision} in {folder}")


def router(given: Mapping[str, Any], announce_fd: int | None) -> None:
    """Run a router until a signal stops it."""
    from urllib.parse import urlsplit

    from baton_router import main
    from baton_router.settings import RouterSettings

    announce = _begin(announce_fd)

    def listening(url: str) -> None:
        address = urlsplit(url)
        announce(Listening(host=address.hostname or "", port=address.port or 0))
        announce(Ready())

    try:
        settings = read_settings(RouterSettings, given)
        logs.begin(settings.log_format, "router")
        if not settings.has_workers:
            raise SetupError(
                "No workers are configured. Set at least one --decode or --worker URL, such as --decode "
                "http://127.0.0.1:8000, or discover workers by --decode-dns or --kubernetes-selector."
            )
        main.run(settings, listening)
    except SetupError as error:
        announce(Refused(reason=error.message))
        raise


def operator(given: Mapping[str, Any], announce_fd: int | None) -> None:
    """Run the operator until a signal stops it."""
    from urllib.parse import urlsplit

    from baton_operator import main
    from baton_operator.settings import OperatorSettings

    announce = _begin(announce_fd)

    def listening(url: str) -> None:
        address = urlsplit(url)
        logging.getLogger("baton_operator").info("Health and metrics at %s.", url)
        announce(Listening(host=address.hostname or "", port=address.port or 0))

    try:
        settings = read_settings(OperatorSettings, given)
        logs.begin(settings.log_format, "operator")
        main.run(settings, listening)
    except SetupError as error:
        announce(Refused(reason=error.message))
        raise


def _begin(announce_fd: int | None) -> Announcer:
    """Set up signals and the connection to the supervisor."""
    if announce_fd is not None:
        die_with_parent()
        os.set_inheritable(announce_fd, False)  # keep the pipe out of child processes
    # Before a worker is ready there is nothing to drain, and loading blocks the event loop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return Announcer(announce_fd)
