"""Processors and memory that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton_engine import machine

GIB = 1024**3


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:  {8 * GIB // 1024} kB\nMemAvailable:  {4 * GIB // 1024} kB\n")
    return file


def limits(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_usable_cores_of_half_a_core_are_one(tmp_path: Path) -> None:
    assert machine.usable_cores(limits(tmp_path, cpu_max="50000 100000\n")) == 1


@pytest.mark.parametrize("quota", ["max 100000", "nonsense", "100000000 100000"])
def test_without_a_lower_limit_all_cores_of_the_affinity_count(tmp_path: Path, quota: str) -> None:
    assert machine.usable_cores(limits(tmp_path, cpu_max=quota)) == len(os.sched_getaffinity(0))


def topology(folder: Path, **files: str) -> Path:
    """Sysfs with these files; `__` in a name stands for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_usable_cores_hyperthreads_count_once(tmp_path: Path) -> None:
    """Two threads on one core's vector units are slower than one."""
    here = sorted(os.sched_getaffinity(0))
    everyone = f"0-{here[-1]}\n"
    system = topology(
        tmp_path, **{f"cpu__cpu{number}__topology__thread_siblings_list": everyone for number in here}
    )
    assert machine.usable_cores(tmp_path / "none", system) == 1
    (system / f"cpu/cpu{here[0]}/topology/thread_siblings_list").write_text(f"{here[0]}\n")
    assert machine.usable_cores(tmp_path / "none", system) == min(2, len(here))
    assert machine.usable_cores(tmp_path / "none", tmp_path / "unknown") == len(here)


def test_memory_nodes_of_usable_processors_are_a_mask(tmp_path: Path) -> None:
    """Only nodes on which a thread can run are named: memory elsewhere is farther than it need be."""
    here = sorted(os.sched_getaffinity(0))
    away = f"{here[-1] + 1}-{here[-1] + 8}"
    system = topology(tmp_path, node__node0__cpulist=f"{away}\n", node__node1__cpulist=f"{away},{here[0]}\n")
    assert machine.memory_nodes(system) == 0b10
    (system / "node/node0/cpulist").write_text(f"{here[-1]}\n")
    assert machine.memory_nodes(system) == 0b11
    assert machine.memory_nodes(tmp_path / "unknown") == 0


def test_outside_a_container_the_machines_free_memory_counts(tmp_path: Path, meminfo: Path) -> None:
    assert machine.free_memory(tmp_path / "none", meminfo) == 4 * GIB


def test_total_memory_includes_swap(tmp_path: Path, meminfo: Path) -> None:
    assert machine.total_memory(meminfo) == 8 * GIB
    with meminfo.open("a") as file:
        file.write(f"SwapTotal:  {GIB // 1024} kB\n")
    assert machine.total_memory(meminfo) == 9 * GIB
    assert machine.total_memory(tmp_path / "none") is None


def test_free_memory_container_limit_counts_if_lower(tmp_path: Path, meminfo: Path) -> None:
    cgroup = limits(tmp_path / "cgroup", memory_max=str(2 * GIB), memory_current=str(GIB))
    assert machine.free_memory(cgroup, meminfo) == GIB


def test_free_memory_counts_unused_file_pages(tmp_path: Path, meminfo: Path) -> None:
    cgroup = limits(tmp_path / "cgroup", memory_max=str(2 * GIB), memory_current=str(2 * GIB))
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\n")
    assert machine.free_memory(cgroup, meminfo) == GIB // 2


def test_free_memory_without_limit_is_the_machines(tmp_path: Path, meminfo: Path) -> None:
    cgroup = limits(tmp_path / "cgroup", memory_max="max", memory_current="5")
    assert machine.free_memory(cgroup, meminfo) == 4 * GIB


def test_free_memory_unknown_is_unset(tmp_path: Path) -> None:
    assert machine.free_memory(tmp_path, tmp_path / "none") is None
