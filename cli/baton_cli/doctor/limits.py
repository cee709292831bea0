"""Checks of limits and software: shared memory, open files, kernels, variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from baton_api import installing
from baton_api.setting_types import show_size
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

MIB = 1024**2

SHM_LEAST, SHM_WANTED = 32 * MIB, 256 * MIB
"""UCX keeps queues between processes there, a few MiB per pair. A container has 64 MiB by default."""

FILES_LEAST, FILES_WANTED = 1024, 8192
FILES_OF_A_STREAM = 2
OTHER_FILES = 100
"""Open files of a router besides its streams."""


def shared_memory(machine: Machine) -> Iterator[Finding]:
    if machine.shm is None:
        yield Finding(
            "shared memory",
            Level.ERROR,
            "no /dev/shm",
            limit=f"{show_size(SHM_WANTED)} free",
            why="Workers on one machine cannot transfer KV blocks through memory.",
            remedy="Mount it: mount -t tmpfs tmpfs /dev/shm; in a pod, an emptyDir of medium Memory.",
        )
        return
    measured = f"{show_size(machine.shm.free)} of {show_size(machine.shm.total)} free in /dev/shm"
    if machine.shm.free >= SHM_WANTED:
        yield good("shared memory", measured)
        return
    yield Finding(
        "shared memory",
        Level.ERROR if machine.shm.free < SHM_LEAST else Level.WARNING,
        measured,
        limit=f"{show_size(SHM_WANTED)} free",
        why="UCX keeps the queues between processes on one machine there.",
        remedy="Enlarge it: mount -o remount,size=1G /dev/shm; docker run --shm-size=1g; in a pod, an "
        "emptyDir of medium Memory (spec.decode.sharedMemorySize of an InferenceService).",
    )


def open_files(machine: Machine) -> Iterator[Finding]:
    limit = machine.open_files
    if limit is None or limit >= FILES_WANTED:
        yield good("open files", "no limit" if limit is None else f"{limit} per process")
        return
    yield Finding(
        "open files",
        Level.ERROR if limit < FILES_LEAST else Level.WARNING,
        f"{limit} per process",
        limit=str(FILES_WANTED),
        why=f"A router needs two per stream: the limit is "
        f"{max(0, (limit - OTHER_FILES) // FILES_OF_A_STREAM)} streams.",
        remedy=f"Raise the hard limit: ulimit -Hn {2 * FILES_WANTED}, LimitNOFILE= of a systemd unit, or "
        f"docker run --ulimit nofile={2 * FILES_WANTED}.",
    )


def kernels(machine: Machine) -> Iterator[Finding]:
    if not machine.kernels.installed:
        yield note(
            "kernels", "not installed", "This machine can run routers and the operator, but no worker."
        )
    elif not machine.kernels.trouble:
        yield good("kernels", machine.kernels.means)
    else:
        yield Finding(
            "kernels",
            Level.WARNING,
            machine.kernels.trouble,
            limit="a C compiler, and a library that passes its self-test",
            why="On a CPU, PyTorch computes instead, at about half the speed. On a GPU the kernels are not "
            "needed.",
            remedy=f"apt install gcc, or {installing.command('kernels')}. Check CC and BATON_KERNELS if they "
            "are set.",
        )


def variables(machine: Machine) -> Iterator[Finding]:
    """Find variables with the prefix of Baton that no process reads, such as misspelled ones."""
    ours = [name for name in machine.environment if name.startswith("BATON_")]
    unread = sorted(name for name in ours if name not in machine.known_variables)
    if not unread:
        yield good("variables", f"{len(ours)} set")
    for name in unread:
        close = difflib.get_close_matches(name, machine.known_variables, n=1)
        yield Finding(
            "variables",
            Level.WARNING,
            f"{name} is set",
            limit="a variable of Baton",
            why="Baton does not read it, so it has no effect.",
            remedy=f"Did you mean {close[0]}?"
            if close
            else "Unset it. docs/reference/settings.md lists all variables.",
        )
