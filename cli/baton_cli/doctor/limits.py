"""Memory, files and processes: what the system lets a process have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from baton_api.setting_types import show_size
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

MIB, GIB = 1024**2, 1024**3

SHM_LEAST, SHM_WANTED = 32 * MIB, 256 * MIB
"""UCX keeps its queues between processes there, some MiB a pair. A container has 64 MiB by default."""

MEMORY_LEAST, MEMORY_WANTED = 512 * MIB, 2 * GIB

FILES_LEAST, FILES_WANTED = 1024, 8192
FILES_OF_A_STREAM = 2
OTHER_FILES = 100
"""That a router has open besides its streams."""

PROCESSES_LEAST = 512
"""A worker has some dozens of threads."""


def shared_memory(machine: Machine) -> Iterator[Finding]:
    if machine.shm is None:
        yield Finding(
            "shared memory",
            Level.ERROR,
            "no /dev/shm",
            f"{show_size(SHM_WANTED)} free",
            "Workers of one machine cannot hand over KV blocks by memory.",
            "Mount one: mount -t tmpfs tmpfs /dev/shm; in a pod, an emptyDir of medium Memory.",
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
        f"{show_size(SHM_WANTED)} free",
        "UCX keeps its queues between the processes of one machine there.",
        "Make it larger: mount -o remount,size=1G /dev/shm; docker run --shm-size=1g; in a pod, an emptyDir "
        "of medium Memory (spec.decode.resources.sharedMemory of an InferenceService).",
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
            show_size(MEMORY_WANTED),
            "A worker holds its model and a KV cache, and is killed if there is no room for them.",
            "End other programs, raise the container's limit, or say less with --kv-cache-memory.",
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
        str(FILES_WANTED),
        f"A router needs two for each stream: it holds {max(0, (limit - OTHER_FILES) // FILES_OF_A_STREAM)}.",
        f"Raise the hard limit: ulimit -Hn {2 * FILES_WANTED}, LimitNOFILE= of a systemd unit, or docker run "
        f"--ulimit nofile={2 * FILES_WANTED}.",
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
        str(PROCESSES_LEAST),
        "A worker that cannot start another thread ends in the middle of its work.",
        "Raise it: ulimit -u, TasksMax= of a systemd unit, docker run --pids-limit, podPidsLimit of kubelet.",
    )


def kernels(machine: Machine) -> Iterator[Finding]:
    if not machine.kernels.installed:
        yield note("kernels", "not installed", "This machine can route and operate, but not be a worker.")
    elif not machine.kernels.trouble:
        yield good("kernels", machine.kernels.means)
    else:
        yield Finding(
            "kernels",
            Level.WARNING,
            machine.kernels.trouble,
            "a C compiler whose library passes its own test",
            "On a CPU, torch serves instead, at about half the speed. On an accelerator it does not matter.",
            "apt install gcc, or pip install 'baton[kernels]'; CC and BATON_KERNELS may say otherwise.",
        )


def versions(machine: Machine) -> Iterator[Finding]:
    wrong = [one for one in machine.packages if not one.fits]
    if not wrong:
        yield good("packages", f"{len(machine.packages)} that fit")
    for one in wrong:
        yield Finding(
            "packages",
            Level.ERROR,
            f"{one.name} {one.version or 'is not installed'}",
            f"{one.name}{one.wanted}",
            "Baton was not made for this version.",
            f"pip install '{one.name}{one.wanted}'",
        )


def variables(machine: Machine) -> Iterator[Finding]:
    """A variable that nobody reads is a setting that somebody believes in."""
    ours = [name for name in machine.environment if name.startswith("BATON_")]
    unread = sorted(name for name in ours if name not in machine.known)
    if not unread:
        yield good("variables", f"{len(ours)} of Baton's are set")
    for name in unread:
        close = difflib.get_close_matches(name, machine.known, n=1)
        yield Finding(
            "variables",
            Level.WARNING,
            f"{name} is set",
            "a variable that Baton reads",
            "Nobody reads it, so that what it says does not count.",
            f"Did you mean {close[0]}?" if close else "Unset it; docs/reference/settings.md lists them all.",
        )
