"""By what KV blocks can move: RDMA, copies between processes, TCP, and NIXL above them."""

from __future__ import annotations

from collections.abc import Iterator

from baton_api.setting_types import show_size
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

LOCKED_LEAST = 1024**3
"""RDMA pins the whole KV cache, which is rarely smaller."""


def rdma(machine: Machine) -> Iterator[Finding]:
    if not machine.rdma:
        yield note(
            "RDMA",
            "no device",
            "KV blocks go over shared memory on one machine, and over TCP between machines.",
        )
        return
    names = ", ".join(device.name for device in machine.rdma)
    if machine.verbs:
        yield Finding(
            "RDMA",
            Level.ERROR,
            f"{names}: {machine.verbs}",
            "a readable and writable /dev/infiniband/uverbs*",
            "There are devices and this process cannot use them, so that blocks go over TCP.",
            "Load ib_uverbs, or give the container the devices: docker run --device=/dev/infiniband; in a "
            "pod, a resource of the RDMA device plugin (spec.decode.resources.rdma).",
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
            "ACTIVE",
            "Blocks do not go over a port that is down.",
            "Look at cable and subnet manager (ibstat, rdma link), or name others by UCX_NET_DEVICES.",
        )
    if not machine.verbs and active:
        yield good("RDMA", names)


def locked_memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.locked
    measured = "no limit" if limit is None else show_size(limit)
    if limit is None or limit >= LOCKED_LEAST:
        yield good("locked memory", measured)
    elif not machine.rdma:
        yield note("locked memory", measured, "Only RDMA pins memory, and there is no device here.")
    else:
        yield Finding(
            "locked memory",
            Level.ERROR,
            measured,
            "no limit",
            "RDMA pins the whole KV cache; what is beyond the limit cannot be registered.",
            "Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity of the systemd unit (containerd's, for "
            "containers), docker run --ulimit memlock=-1.",
        )


def copies(machine: Machine) -> Iterator[Finding]:
    if not machine.copies.trouble:
        yield good("memory of other processes", machine.copies.means)
        return
    yield Finding(
        "memory of other processes",
        Level.WARNING,
        machine.copies.trouble,
        "process_vm_readv between processes",
        "Workers of one machine hand over KV blocks by TCP, which is several times slower.",
        "sysctl kernel.yama.ptrace_scope=0, a seccomp profile that allows process_vm_readv, or docker run "
        "--cap-add=SYS_PTRACE.",
    )


def nixl(machine: Machine) -> Iterator[Finding]:
    if not machine.nixl.installed:
        yield note(
            "NIXL", "not installed", "This machine can route and operate, but not be a worker of a pair."
        )
    elif not machine.nixl.trouble:
        yield good("NIXL", machine.nixl.means)
    else:
        yield Finding(
            "NIXL",
            Level.ERROR,
            machine.nixl.trouble,
            "an agent with the UCX backend",
            "No KV blocks can be handed over.",
            "Install it anew (pip install --force-reinstall 'baton[nixl]'), and unset NIXL_PLUGIN_DIR, "
            "UCX_TLS and UCX_NET_DEVICES unless they are meant.",
        )


def network(machine: Machine) -> Iterator[Finding]:
    """What UCX was told to use has to be there: it does not start otherwise."""
    named = machine.environment.get("UCX_NET_DEVICES", "")
    if named in ("", "all"):
        yield good("network", "UCX takes what there is")
        return
    there = set(machine.interfaces) | {device.name for device in machine.rdma}
    missing = [one for one in named.split(",") if one.partition(":")[0] not in there]
    if not missing:
        yield good("network", f"UCX_NET_DEVICES={named}")
        return
    yield Finding(
        "network",
        Level.ERROR,
        f"UCX_NET_DEVICES names {', '.join(missing)}",
        f"some of {', '.join(sorted(there))}",
        "UCX starts without any device, and workers do not reach each other.",
        "Name devices that there are, or unset UCX_NET_DEVICES.",
    )
