"""What is around the process: ports, clocks, folders, and a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

from baton_api.setting_types import show_size
from baton_api.tickets import CLOCK_SKEW_S
from baton_cli.doctor.machine import Finding, Level, Machine, good, note

SPACE_LEAST, SPACE_WANTED = 256 * 1024**2, 4 * 1024**3

OURS = re.compile(r"baton_cli|(^|[/ ])baton( |$)")
"""In the command line of a process of Baton."""

CLOCK_WANTED_S = 5.0
"""Beyond it, spans and the age of KV events make no sense; beyond `CLOCK_SKEW_S` tickets are refused."""


def ports(machine: Machine) -> Iterator[Finding]:
    taken = [port for port in machine.ports if port.holder]
    if not taken:
        yield good("ports", ", ".join(f"{port.number} ({port.what})" for port in machine.ports) + " are free")
    for port in taken:
        if OURS.search(port.holder):
            yield note(
                "ports", f"{port.number}: {port.holder}", f"A Baton runs here already, as {port.what}."
            )
            continue
        yield Finding(
            "ports",
            Level.ERROR,
            f"{port.number} is taken by {port.holder}",
            "a free port",
            f"The {port.what} cannot listen where it does by default.",
            "End that program, or give another --port (0 takes a free one).",
        )


def clock(machine: Machine) -> Iterator[Finding]:
    if machine.clock_synchronised is False:
        yield Finding(
            "clock",
            Level.WARNING,
            "not synchronised",
            "synchronised by NTP",
            f"Tickets of a machine whose clock is {CLOCK_SKEW_S:g} s behind or before are refused.",
            "Start chrony or systemd-timesyncd: timedatectl set-ntp true.",
        )
    for url, reason in machine.unreachable.items():
        yield Finding(
            "clock",
            Level.ERROR,
            f"{url} does not answer: {reason}",
            "an answer",
            "Neither its clock nor anything else of it can be compared.",
            "Start it, or give its address with --url.",
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
            f"{CLOCK_WANTED_S:g} s",
            f"Beyond {CLOCK_SKEW_S:g} s tickets are refused, and prompts are computed where they are used.",
            "Synchronise both clocks by NTP: timedatectl set-ntp true.",
        )
    if machine.clock_synchronised is not False and not machine.clock_apart and not machine.unreachable:
        yield good("clock", "synchronised" if machine.clock_synchronised else "the kernel does not say")


def places(machine: Machine) -> Iterator[Finding]:
    for place in machine.places:
        where = f"{place.what}, {place.path}"
        way_out = f"Set {place.setting} to a folder with room." if place.setting else "Make room there."
        if place.trouble:
            yield Finding(
                "disk",
                Level.ERROR,
                f"{where}: {place.trouble}",
                "a folder that can be written",
                "What would be kept there cannot be.",
                way_out,
            )
        elif place.free >= SPACE_WANTED:
            yield good("disk", f"{where}: {show_size(place.free)} free")
        else:
            yield Finding(
                "disk",
                Level.ERROR if place.free < SPACE_LEAST else Level.WARNING,
                f"{where}: {show_size(place.free)} free",
                show_size(SPACE_WANTED),
                "A model may not fit.",
                way_out,
            )


def cluster(machine: Machine) -> Iterator[Finding]:
    there = machine.cluster
    if there is None:
        return
    if there.trouble:
        yield Finding(
            "cluster",
            Level.ERROR,
            f"{there.server}: {there.trouble}",
            "an answer",
            "Nothing can be said of the cluster.",
            "Check --kubeconfig and your login: kubectl version.",
        )
        return
    crds = there.crds or ()
    if there.crds is None:
        yield note(
            "custom resources", "unknown", "This account may not read definitions; an administrator may."
        )
    for crd in crds:
        if not crd.versions:
            yield Finding(
                "custom resources",
                Level.ERROR,
                f"{crd.name} is not installed",
                "installed",
                "The cluster does not know what it is.",
                "helm install baton charts/baton, or kubectl apply -f crds/.",
            )
        elif crd.missing:
            shown = ", ".join(crd.missing[:3]) + (
                f" and {len(crd.missing) - 3} more" if crd.missing[3:] else ""
            )
            yield Finding(
                "custom resources",
                Level.ERROR,
                f"{crd.name} ({', '.join(crd.versions)}) lacks {shown}",
                "this version's definition",
                "The API server drops or refuses what it does not know.",
                "helm upgrade baton charts/baton, or kubectl apply -f crds/.",
            )
    if there.denied:
        yield Finding(
            "rights",
            Level.ERROR,
            f"this account may not {', '.join(there.denied)}",
            "these rights",
            "Services cannot be made or looked at by this account.",
            "Have somebody bind it to a role that may: the chart aggregates them to edit and view.",
        )
    if not there.denied and crds and all(crd.versions and not crd.missing for crd in crds):
        yield good("cluster", f"{there.server}: {len(crds)} custom resources of this version, all rights")
