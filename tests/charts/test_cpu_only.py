"""Without CUDA's libraries, what is linked to them loads all the same, and is told of no device."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.charts.helm import ROOT

spec = importlib.util.spec_from_file_location("cpu_only", ROOT / "images" / "cpu_only.py")
assert spec and spec.loader
cpu_only = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = cpu_only
spec.loader.exec_module(cpu_only)

COMPILER = shutil.which("cc")
CUDART = """
int devices(int *count) { *count = 8; return 0; }
int plain(void) { return 7; }
long limits[3] = {1, 2, 3};
"""
VERSIONS = "libcudart.so.13 { global: devices; limits; };"
TORCH = """
int devices(int *count); int plain(void); extern long limits[3];
int counted(void) { int count = 0; return devices(&count) * 10 + count; }
int plainly(void) { return plain(); }
long limit(void) { return limits[1]; }
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """As they are installed: a torch that is linked to one of CUDA's libraries, and more."""
    if COMPILER is None:
        pytest.skip("cc is not installed")
    cuda, torch, triton = tmp_path / "nvidia/cu13/lib", tmp_path / "torch/lib", tmp_path / "triton"
    for folder in (cuda, torch, triton):
        folder.mkdir(parents=True)
    (tmp_path / "versions").write_text(VERSIONS)
    _library(cuda / "libcudart.so.13", CUDART, f"-Wl,--version-script={tmp_path / 'versions'}")
    _library(cuda / "libunused.so.13", "int unused(void) { return 1; }")
    _library(
        torch / "libtorch.so",
        TORCH,
        "-Wl,-rpath,$ORIGIN/../../nvidia/cu13/lib",
        str(cuda / "libcudart.so.13"),
    )
    (triton / "libtriton.so").write_bytes(bytes(1000))
    return tmp_path


def test_what_is_linked_to_cuda_is_told_that_there_is_no_device(packages: Path) -> None:
    cpu_only.main(packages, [str(COMPILER)])
    torch = ctypes.CDLL(str(packages / "torch/lib/libtorch.so"))
    assert torch.counted() == cpu_only.NO_DEVICE * 10
    assert torch.plainly() == cpu_only.NO_DEVICE
    assert torch.limit() == 0


def test_a_stand_in_offers_what_the_library_did(packages: Path) -> None:
    path = packages / "nvidia/cu13/lib/libcudart.so.13"
    before = cpu_only.Library(path)
    cpu_only.main(packages, [str(COMPILER)])
    after = cpu_only.Library(path)
    assert after.soname == before.soname == path.name
    assert set(after.symbols) == set(before.symbols)
    assert {(one.name, one.version, one.size) for one in after.symbols} >= {
        ("devices", "libcudart.so.13", 0),
        ("limits", "libcudart.so.13", 24),
        ("plain", "", 0),
    }


def test_the_rest_of_cuda_and_triton_are_gone(packages: Path) -> None:
    cpu_only.main(packages, [str(COMPILER)])
    left = {str(path.relative_to(packages)) for path in packages.rglob("*.so*")}
    assert left == {"nvidia/cu13/lib/libcudart.so.13", "torch/lib/libtorch.so"}


def test_a_torch_for_cpus_stays_as_it_is(packages: Path) -> None:
    shutil.rmtree(packages / "nvidia")
    _library(packages / "torch/lib/libtorch.so", "int one(void) { return 1; }")
    cpu_only.main(packages, [str(COMPILER)])
    assert ctypes.CDLL(str(packages / "torch/lib/libtorch.so")).one() == 1


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libnot.so").write_text("INPUT(libc.so.6)")
    with pytest.raises(ValueError, match=r"libnot\.so is no 64-bit ELF file"):
        cpu_only.Library(tmp_path / "libnot.so")


def _library(path: Path, source: str, *options: str) -> None:
    named = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-x", "none"]
    subprocess.run([str(COMPILER), *named, *options, "-o", str(path)], input=source, text=True, check=True)
