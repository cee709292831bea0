"""Checks of clocks, secrets and a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton_api.tickets import CLOCK_SKEW_S
from baton_cli.doctor.machine import Crd, Finding, Level, Machine, good, note

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
