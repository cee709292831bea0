"""Checks of KV transports: RDMA, copies between processes, NIXL, network devices."""

from __future__ import annotations

from collections.abc import Iterator

from baton_api import installing
from baton_api.setting_types import show_size
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

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
