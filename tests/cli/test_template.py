"""Processes as forks of a template that has imported their modules."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from baton_api.announcements import Announcement, Refused
from baton_cli import child
from baton_cli import template as template_module
from baton_cli.template import WORKERS, Template
from tests.cli.service import START_S, await_true

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are for Linux")

REFUSED = ("router",)
REASON = "No workers are configured."


@pytest.fixture
async def template() -> AsyncIterator[Template]:
    started = Template(("baton_cli.options",))
    yield started
    started.close()


class Started:
    """A process, its log and its announcements."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.announcements: list[Announcement] = []

    async def run(self, *arguments: str, template: Template | None) -> child.Child:
        return await child.start(arguments, {}, self.announcements.append, self.log.append, template)


async def test_fork_has_log_announcements_and_status(template: Template) -> None:
    started = Started()
    process = await started.run(*REFUSED, template=template)
    async with asyncio.timeout(START_S):
        assert await process.ended() == 2
    assert any(REASON in line for line in started.log), started.log
    assert any(isinstance(one, Refused) for one in started.announcements)
    assert not psutil.pid_exists(process.pid)


async def test_fork_is_a_child_with_its_command_and_can_be_killed(template: Template) -> None:
    process = await Started().run("router", "--decode=http://127.0.0.1:9", "--port=0", template=template)
    seen, expected = psutil.Process(process.pid), ["baton_cli.main", "router", "--decode=http://127.0.0.1:9"]
    await asyncio.to_thread(await_true, lambda: seen.cmdline()[2:5] == expected, START_S, "its command")
    assert seen.ppid() == os.getpid() and os.getpgid(process.pid) == process.pid
    process.kill()
    async with asyncio.timeout(START_S):
        assert await process.ended() == -signal.SIGKILL


@pytest.mark.parametrize("ends", ["before", "while asked", "closed"])
async def test_template_that_ended_is_replaced_by_a_process(template: Template, ends: str) -> None:
    started = Started()
    os.kill(template.pid, signal.SIGSTOP if ends == "while asked" else signal.SIGKILL)
    if ends == "closed":
        template.close()
    starting = asyncio.create_task(started.run(*REFUSED, template=template))
    if ends == "while asked":
        await asyncio.sleep(0)
        os.kill(template.pid, signal.SIGKILL)
    async with asyncio.timeout(START_S):
        assert await (await starting).ended() == 2
    assert any(REASON in line for line in started.log), started.log


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("raise ImportError('no torch')", id="cannot be imported"),
        pytest.param(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            id="has a thread, whose locks a fork would keep",
        ),
    ],
)
async def test_template_that_cannot_fork_is_replaced(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "for_the_template.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started, template = Started(), Template(("for_the_template",))
    try:
        process = await started.run(*REFUSED, template=template)
        async with asyncio.timeout(START_S):
            assert await process.ended() == 2
    finally:
        template.close()
    assert any(REASON in line for line in started.log), started.log


def test_workers_are_not_forked_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "ACCELERATORS", ("/nothing", "/dev/null"))
    assert template_module.begin(WORKERS) is None


async def test_start_cancelled_while_asking_ends_the_template(template: Template) -> None:
    """Otherwise the next start would receive the process of this one."""
    os.kill(template.pid, signal.SIGSTOP)
    starting = asyncio.create_task(Started().run(*REFUSED, template=template))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(template.pid)
