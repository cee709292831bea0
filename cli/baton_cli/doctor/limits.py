"""Checks of limits and software: memory, files, processes, kernels, packages, variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from baton_api import installing
from baton_api.setting_types import show_size
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

MIB, GIB = 1024**2, 1024**3

SHM_LEAST, SHM_WANTED = 32 * MIB, 256 * MIB
"""UCX keeps queues between processes there, a few MiB per pair. A container has 64 MiB by default."""

MEMORY_LEAST, MEMORY_WANTED = 512 * MIB, 2 * GIB

FILES_LEAST, FILES_WANTED = 1024, 8192
FILES_OF_A_STREAM = 2
OTHER_FILES = 100
"""Open files of a router besides its streams."""

PROCESSES_LEAST = 512
"""A worker has some dozens of threads."""


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


def memory(machine: Machine) -> Iterator[Finding]:
    if machine.memory is None:
        yield note("memory", "unknown", "This system does not say what is free.")
    elif machine.memory >= MEMORY_WANTED:
        yield good("memory", f"{show_size(machine.memory)} available")
    else:
        yield Finding(
            "memory",
            Level.ERROR if machine.memory < MEMORY_LEAST else Level.WARNING,
            f"{show_size(machine.memory)} available",
            limit=show_size(MEMORY_WANTED),
            why="A worker needs memory for its model and KV cache; the kernel kills it if there is too "
            "little.",
            remedy="Stop other programs, raise the container's limit, or lower --kv-cache-memory.",
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


def processes(machine: Machine) -> Iterator[Finding]:
    limit = machine.processes
    if limit is None or limit >= PROCESSES_LEAST:
        yield good("processes", "no limit" if limit is None else f"{limit} and threads")
        return
    yield Finding(
        "processes",
        Level.ERROR,
        f"{limit} and threads",
        limit=str(PROCESSES_LEAST),
        why="A worker that cannot start another thread crashes.",
        remedy="Raise it: ulimit -u, TasksMax= of a systemd unit, docker run --pids-limit, podPidsLimit of "
        "kubelet.",
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


def versions(machine: Machine) -> Iterator[Finding]:
    wrong = [one for one in machine.packages if not one.fits]
    if not wrong:
        yield good("packages", f"{len(machine.packages)} compatible")
    for one in wrong:
        yield Finding(
            "packages",
            Level.ERROR,
            f"{one.name} {one.version or 'is not installed'}",
            limit=f"{one.name}{one.wanted}",
            why="Baton does not support this version.",
            remedy=f"pip install '{one.name}{one.wanted}'",
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
