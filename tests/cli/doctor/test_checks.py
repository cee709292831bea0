"""Findings on machines that have one fault each."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from baton_cli.doctor.cluster import compare
from baton_cli.doctor.command import CHECKS, as_data, examine, show
from baton_cli.doctor.machine import (
    Cluster,
    Crd,
    Gpus,
    Level,
    Machine,
    RdmaDevice,
    SelfTest,
    Space,
)
from tests.cli.doctor.machines import CRD, GIB, WELL, but

MIB = 1024**2

DOWN = RdmaDevice("mlx5_1", {1: "DOWN"})
MISSING = dataclasses.replace(CRD, versions=())
OLDER = dataclasses.replace(CRD, missing=("spec.a", "spec.b", "spec.c", "spec.d"))

WRONG: list[tuple[str, Machine, str, Level, str]] = [
    ("no shared memory", but(shm=None), "shared memory", Level.ERROR, "no /dev/shm"),
    ("tiny", but(shm=Space(16 * MIB, 16 * MIB)), "shared memory", Level.ERROR, "16.8 MB of 16.8 MB"),
    ("a container's", but(shm=Space(64 * MIB, 64 * MIB)), "shared memory", Level.WARNING, "67.1 MB"),
    ("full", but(shm=Space(8 * GIB, MIB)), "shared memory", Level.ERROR, "1.05 MB of 8.59 GB"),
    ("few files", but(open_files=256), "open files", Level.ERROR, "256"),
    ("some files", but(open_files=4096), "open files", Level.WARNING, "4096"),
    ("no memory to lock", but(locked=8 * MIB), "locked memory", Level.ERROR, "8.39 MB"),
    ("no verbs", but(verbs="no /dev/infiniband/uverbs*"), "RDMA", Level.ERROR, "mlx5_0: no /dev"),
    ("all ports down", but(rdma=(DOWN,)), "RDMA ports", Level.ERROR, "mlx5_1:1 is DOWN"),
    ("one port down", but(rdma=(*WELL.rdma, DOWN)), "RDMA ports", Level.WARNING, "mlx5_1:1 is DOWN"),
    ("no port", but(rdma=(RdmaDevice("x", {}),)), "RDMA ports", Level.ERROR, "x: no port"),
    (
        "no copies",
        but(copies=SelfTest("", "Operation not permitted")),
        "memory of other processes",
        Level.WARNING,
        "not permitted",
    ),
    ("no NIXL backend", but(nixl=SelfTest("", "no UCX plugin")), "NIXL", Level.ERROR, "no UCX plugin"),
    (
        "a device that is not",
        but(environment={"UCX_NET_DEVICES": "mlx5_0:1,mlx5_9:1"}),
        "network",
        Level.ERROR,
        "names mlx5_9:1",
    ),
    (
        "no compiler",
        but(kernels=SelfTest("", "no C compiler is installed")),
        "kernels",
        Level.WARNING,
        "compiler",
    ),
    ("no time server", but(clock_synchronised=False), "clock", Level.WARNING, "not synchronized"),
    ("a clock ahead", but(clock_apart={"http://r": 90.0}), "clock", Level.ERROR, "90 s ahead of"),
    ("a clock behind", but(clock_apart={"http://r": -20.0}), "clock", Level.WARNING, "20 s behind"),
    (
        "nobody there",
        but(unreachable={"http://r": "refused"}),
        "clock",
        Level.ERROR,
        "does not answer: refused",
    ),
    (
        "a misspelt variable",
        but(environment={"BATON_KV_CACHE_MEMRY": "1"}),
        "variables",
        Level.WARNING,
        "BATON_KV_CACHE_MEMRY",
    ),
    (
        "a ticket secret of workers only",
        but(environment={"BATON_TICKET_SECRET": "s"}),
        "tickets",
        Level.WARNING,
        "only BATON_TICKET_SECRET is set",
    ),
    (
        "two ticket secrets",
        but(environment={"BATON_TICKET_SECRET": "s", "BATON_ROUTER_TICKET_SECRET": "t"}),
        "tickets",
        Level.WARNING,
        "differ",
    ),
    ("no cluster", but(cluster=Cluster("https://c", "401")), "cluster", Level.ERROR, "https://c: 401"),
    (
        "no rights",
        but(cluster=Cluster("https://c", denied=("list pods in x",))),
        "permissions",
        Level.ERROR,
        "may not list pods in x",
    ),
    (
        "no definition",
        but(cluster=Cluster("https://c", crds=(MISSING,))),
        "custom resources",
        Level.ERROR,
        "not inst",
    ),
    (
        "an older definition",
        but(cluster=Cluster("https://c", crds=(OLDER,))),
        "custom resources",
        Level.ERROR,
        "lacks spec.a, spec.b, spec.c and 1 more",
    ),
]


@pytest.mark.parametrize(
    ("machine", "check", "level", "words"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG]
)
def test_doctor_one_fault_is_one_finding_with_a_remedy(
    machine: Machine, check: str, level: Level, words: str
) -> None:
    (finding,) = [one for one in examine(machine) if one.level in (Level.WARNING, Level.ERROR)]
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.measured
    assert finding.limit and finding.why.endswith(".") and finding.remedy


def test_where_all_is_well_each_check_says_so() -> None:
    machine = but(cluster=Cluster("https://c", crds=(CRD,)))
    assert {one.level for one in examine(machine)} == {Level.GOOD}
    assert all(list(check(machine)) for check in CHECKS)


def test_doctor_missing_optional_parts_are_notes() -> None:
    plain = but(
        rdma=(),
        gpus=Gpus(),
        locked=MIB,
        nixl=SelfTest("", installed=False),
        kernels=SelfTest("", installed=False),
    )
    assert {one.check for one in examine(plain) if one.level is Level.NOTE} == {
        "RDMA",
        "GPU",
        "locked memory",
        "NIXL",
        "kernels",
    }
    assert all(one.level in (Level.GOOD, Level.NOTE) for one in examine(plain))


def test_doctor_account_without_crd_rights_gets_a_note() -> None:
    (finding,) = [one for one in examine(but(cluster=Cluster("https://c", crds=None))) if one.why]
    assert (finding.check, finding.level) == ("custom resources", Level.NOTE)


def test_doctor_remedies_are_shown_and_in_the_json() -> None:
    everything = but(shm=None, open_files=256, nixl=SelfTest("", "no UCX plugin"), clock_synchronised=False)
    findings = examine(everything)
    screen = Console(file=io.StringIO(), width=300)
    show(screen, everything.name, findings)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    data = as_data(everything, findings)
    assert (data["errors"], data["warnings"]) == (3, 1)
    assert "3 errors, 1 warning." in shown
    for finding in findings:
        assert finding.measured in shown and finding.remedy in shown


def test_doctor_crd_without_a_field_or_version_is_older() -> None:
    def definition(version: str, fields: dict[str, object]) -> dict[str, object]:
        schema = {"openAPIV3Schema": {"properties": fields}}
        versions = [{"name": version, "served": True, "schema": schema}]
        return {"metadata": {"name": "x"}, "spec": {"versions": versions}}

    ours = definition("v1", {"spec": {"properties": {"a": {}, "b": {"items": {"properties": {"c": {}}}}}}})
    older = definition("v1", {"spec": {"properties": {"b": {"items": {}}}}})
    assert compare(ours, ours) == Crd("x", ("v1",))
    assert compare(ours, older).missing == ("spec.a", "spec.b[].c")
    assert compare(ours, definition("v0", {})).missing == ("version v1",)
