"""Checks of limits, kernels, variables, clocks, secrets, KV transports and a cluster."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from baton_api import installing
from baton_api.setting_types import show_size
from baton_api.tickets import CLOCK_SKEW_S
from baton_cli.doctor.machine import Crd, Finding, Level, Machine, good, note

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


CLOCK_WANTED_S = 5.0
"""Beyond this difference spans and KV event lag are wrong. Beyond `CLOCK_SKEW_S` tickets are rejected."""


def clock(machine: Machine) -> Iterator[Finding]:
    if machine.clock_synchronised is False:
        yield Finding(
            "clock",
            Level.WARNING,
            "not synchronized",
            limit="synchronized by NTP",
            why=f"Workers reject tickets of a machine whose clock differs by more than {CLOCK_SKEW_S:g} s.",
            remedy="Start chrony or systemd-timesyncd: timedatectl set-ntp true.",
        )
    for url, reason in machine.unreachable.items():
        yield Finding(
            "clock",
            Level.ERROR,
            f"{url} does not answer: {reason}",
            limit="an answer",
            why="Its clock cannot be compared.",
            remedy="Start it, or set its address with --url.",
        )
    for url, seconds in machine.clock_apart.items():
        if abs(seconds) <= CLOCK_WANTED_S:
            yield good("clock", f"{url} is within {CLOCK_WANTED_S:g} s")
            continue
        side = "ahead of" if seconds > 0 else "behind"
        yield Finding(
            "clock",
            Level.ERROR if abs(seconds) > CLOCK_SKEW_S else Level.WARNING,
            f"{url} is {abs(seconds):.0f} s {side} this machine",
            limit=f"{CLOCK_WANTED_S:g} s",
            why=f"Beyond {CLOCK_SKEW_S:g} s workers reject tickets, and decode workers compute all prompts.",
            remedy="Synchronize both clocks by NTP: timedatectl set-ntp true.",
        )
    if machine.clock_synchronised is not False and not machine.clock_apart and not machine.unreachable:
        yield good("clock", "synchronized" if machine.clock_synchronised else "the kernel does not report it")


ROUTERS_SECRET, WORKERS_SECRET = "BATON_ROUTER_TICKET_SECRET", "BATON_TICKET_SECRET"


def tickets(machine: Machine) -> Iterator[Finding]:
    """Compare the two variables of the secret that signs tickets."""
    routers, workers = (machine.environment.get(name, "") for name in (ROUTERS_SECRET, WORKERS_SECRET))
    if routers == workers:
        yield good("tickets", "routers and workers have the same secret" if routers else "no secret is set")
        return
    only = ROUTERS_SECRET if not workers else WORKERS_SECRET
    yield Finding(
        "tickets",
        Level.WARNING,
        f"{ROUTERS_SECRET} and {WORKERS_SECRET} differ" if routers and workers else f"only {only} is set",
        limit="the same secret in both",
        why="Workers refuse the tickets of a router with another secret, so that no pairs are used.",
        remedy=f"Set {ROUTERS_SECRET} of all routers and {WORKERS_SECRET} of all workers to the same value.",
    )


def cluster(machine: Machine) -> Iterator[Finding]:
    cluster = machine.cluster
    if cluster is None:
        return
    if cluster.trouble:
        yield Finding(
            "cluster",
            Level.ERROR,
            f"{cluster.server}: {cluster.trouble}",
            limit="an answer",
            why="The cluster cannot be inspected.",
            remedy="Check --kubeconfig and your login: kubectl version.",
        )
        return
    crds = cluster.crds or ()
    yield from _custom_resources(cluster.crds)
    if cluster.denied:
        yield Finding(
            "permissions",
            Level.ERROR,
            f"this account may not {', '.join(cluster.denied)}",
            limit="these permissions",
            why="This account cannot manage services.",
            remedy="Bind the account to a role with them. The chart adds them to the roles edit and view.",
        )
    if not cluster.denied and crds and all(crd.versions and not crd.missing for crd in crds):
        yield good(
            "cluster", f"{cluster.server}: {len(crds)} custom resources of this version, all permissions"
        )


def _custom_resources(crds: Sequence[Crd] | None) -> Iterator[Finding]:
    check = "custom resources"
    if crds is None:
        yield note(
            check, "unknown", "This account may not read definitions. An administrator can check them."
        )
    for crd in crds or ():
        if not crd.versions:
            yield Finding(
                check,
                Level.ERROR,
                f"{crd.name} is not installed",
                limit="installed",
                why="The cluster rejects objects of this kind.",
                remedy="Install it: helm install baton charts/baton, or kubectl apply -f crds/.",
            )
        elif crd.missing:
            more = f" and {len(crd.missing) - 3} more" if crd.missing[3:] else ""
            yield Finding(
                check,
                Level.ERROR,
                f"{crd.name} ({', '.join(crd.versions)}) lacks {', '.join(crd.missing[:3])}{more}",
                limit="the definition of this version",
                why="The API server drops or rejects unknown fields.",
                remedy="Upgrade it: helm upgrade baton charts/baton, or kubectl apply -f crds/.",
            )


LOCKED_LEAST = 1024**3
"""RDMA locks the whole KV cache, which is rarely smaller."""


def rdma(machine: Machine) -> Iterator[Finding]:
    if not machine.rdma:
        yield note(
            "RDMA",
            "no device",
            "KV transfers use shared memory on one machine, and TCP between machines.",
        )
        return
    names = ", ".join(device.name for device in machine.rdma)
    if machine.verbs:
        yield Finding(
            "RDMA",
            Level.ERROR,
            f"{names}: {machine.verbs}",
            limit="a readable and writable /dev/infiniband/uverbs*",
            why="This process cannot use the devices, so KV transfers use TCP.",
            remedy="Load ib_uverbs, or pass the devices to the container: docker run "
            "--device=/dev/infiniband; in a pod, a resource of the RDMA device plugin "
            "(spec.decode.resources.limits).",
        )
    down = [
        f"{device.name}:{port} is {state}"
        for device in machine.rdma
        for port, state in device.ports.items()
        if state != "ACTIVE"
    ]
    active = any("ACTIVE" in device.ports.values() for device in machine.rdma)
    if down or not active:
        yield Finding(
            "RDMA ports",
            Level.WARNING if active else Level.ERROR,
            ", ".join(down) or f"{names}: no port",
            limit="ACTIVE",
            why="KV transfers cannot use a port that is down.",
            remedy="Check cable and subnet manager (ibstat, rdma link), or set UCX_NET_DEVICES to other "
            "devices.",
        )
    if not machine.verbs and active:
        yield good("RDMA", names)


def locked_memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.locked
    measured = "no limit" if limit is None else show_size(limit)
    if limit is None or limit >= LOCKED_LEAST:
        yield good("locked memory", measured)
    elif not machine.rdma:
        yield note("locked memory", measured, "Only RDMA locks memory, and this machine has no RDMA device.")
    else:
        yield Finding(
            "locked memory",
            Level.ERROR,
            measured,
            limit="no limit",
            why="RDMA locks the whole KV cache. Memory beyond the limit cannot be registered.",
            remedy="Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity of the systemd unit "
            "(containerd's, for containers), docker run --ulimit memlock=-1.",
        )


def copies(machine: Machine) -> Iterator[Finding]:
    if not machine.copies.trouble:
        yield good("memory of other processes", machine.copies.means)
        return
    yield Finding(
        "memory of other processes",
        Level.WARNING,
        machine.copies.trouble,
        limit="process_vm_readv between processes",
        why="KV transfers on one machine use TCP, which is several times slower.",
        remedy="Run sysctl kernel.yama.ptrace_scope=0, use a seccomp profile that allows process_vm_readv, "
        "or docker run --cap-add=SYS_PTRACE.",
    )


def nixl(machine: Machine) -> Iterator[Finding]:
    if not machine.nixl.installed:
        yield note(
            "NIXL",
            "not installed",
            "This machine can run routers and the operator, but no prefill or decode worker.",
        )
    elif not machine.nixl.trouble:
        yield good("NIXL", machine.nixl.means)
    else:
        yield Finding(
            "NIXL",
            Level.ERROR,
            machine.nixl.trouble,
            limit="an agent with the UCX backend",
            why="Workers cannot transfer KV blocks.",
            remedy=f"Reinstall it ({installing.command('nixl', '--force-reinstall')}). Unset "
            "NIXL_PLUGIN_DIR, UCX_TLS and UCX_NET_DEVICES unless you need them.",
        )


def network(machine: Machine) -> Iterator[Finding]:
    """Check that the devices of UCX_NET_DEVICES exist. Otherwise UCX does not start."""
    named = machine.environment.get("UCX_NET_DEVICES", "")
    if named in ("", "all"):
        yield good("network", "UCX uses all devices")
        return
    existing = set(machine.interfaces) | {device.name for device in machine.rdma}
    missing = [device for device in named.split(",") if device.partition(":")[0] not in existing]
    if not missing:
        yield good("network", f"UCX_NET_DEVICES={named}")
        return
    yield Finding(
        "network",
        Level.ERROR,
        f"UCX_NET_DEVICES names {', '.join(missing)}",
        limit=f"some of {', '.join(sorted(existing))}",
        why="UCX starts without a device, and workers cannot reach each other.",
        remedy="Set existing devices, or unset UCX_NET_DEVICES.",
    )
