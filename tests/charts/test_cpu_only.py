"""Without CUDA's libraries, binaries linked to them still load, and find no device."""

from __future__ import annotations

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
CUDART = "int cudaGetDeviceCount(int *count) { *count = 8; return 0; }"
NCCL = "int ncclGetVersion(int *version) { *version = 2; return 0; }"
TORCH = """
#include <string.h>
int cudaGetDeviceCount(int *count); int ncclGetVersion(int *version);
int counted(void) { int count = 0; return cudaGetDeviceCount(&count) * 10 + count; }
int version(void) { int version = 0; return ncclGetVersion(&version) * 10 + version; }
int length(const char *text) { return strlen(text); }
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """As they are installed: a torch that is linked to two of CUDA's libraries, and neither of them."""
    if COMPILER is None:
        pytest.skip("cc is not installed")
    cuda, torch, packages = tmp_path / "cuda", tmp_path / "packages/torch/lib", tmp_path / "packages"
    for folder in (cuda, torch, packages / cpu_only.EXPERTS[0]):
        folder.mkdir(parents=True)
    (cuda / "versions").write_text("libcudart.so.13 { global: cudaGetDeviceCount; };")
    _library(cuda / "libcudart.so.13", CUDART, f"-Wl,--version-script={cuda / 'versions'}")
    _library(cuda / "libnccl.so.2", NCCL)
    linked = [str(cuda / name) for name in ("libcudart.so.13", "libnccl.so.2")]
    _library(torch / "libtorch.so", TORCH, "-Wl,-rpath,$ORIGIN", *linked)
    return packages


# In a process of its own: in this one another test's torch may have brought the real libraries along.
CALL = """
import ctypes, sys
torch = ctypes.CDLL(sys.argv[1])
print(torch.counted(), torch.version(), torch.length(b"what the system has"))
"""


def _called(path: Path) -> subprocess.CompletedProcess[str]:
    """Call the library's three functions and print their results."""
    return subprocess.run(
        [sys.executable, "-c", CALL, str(path)], capture_output=True, text=True, check=False
    )


def test_cpu_only_linked_library_finds_no_device(packages: Path) -> None:
    path = packages / "torch/lib/libtorch.so"
    assert "libcudart.so.13: cannot open shared object file" in _called(path).stderr
    cpu_only.main(packages, [str(COMPILER)])
    none = str(cpu_only.NO_DEVICE * 10)
    assert _called(path).stdout.split() == [none, none, "19"]


def test_cpu_only_adds_only_stubs_and_removes_multi_gpu_files(packages: Path) -> None:
    cpu_only.main(packages, [str(COMPILER)])
    files = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert files == {f"torch/lib/{name}" for name in ("libtorch.so", "libcudart.so.13", "libnccl.so.2")}
    assert not (packages / cpu_only.EXPERTS[0]).exists()


def test_cpu_only_missing_symbols_have_their_versions(packages: Path) -> None:
    wanted = cpu_only.missing([cpu_only.Library(packages / "torch/lib/libtorch.so")])
    nccl = cpu_only.Imported("ncclGetVersion", "", "")
    count = cpu_only.Imported("cudaGetDeviceCount", "libcudart.so.13", "libcudart.so.13")
    assert wanted == {"libcudart.so.13": {count, nccl}, "libnccl.so.2": {nccl}}


def test_cpu_only_cpu_torch_is_unchanged(packages: Path) -> None:
    path = packages / "torch/lib/libtorch.so"
    _library(path, "int one(void) { return 1; }")
    cpu_only.main(packages, [str(COMPILER)])
    assert list(path.parent.iterdir()) == [path]


def test_cpu_only_file_that_is_no_library_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "libnot.so").write_text("INPUT(libc.so.6)")
    with pytest.raises(ValueError, match=r"libnot\.so is not a 64-bit ELF file"):
        cpu_only.Library(tmp_path / "libnot.so")


@pytest.mark.parametrize("file", ["constraints.txt", "e2e/vllm/constraints.txt"])
def test_all_of_cuda_that_is_pinned_is_spared_and_nothing_else(file: str) -> None:
    pinned = (ROOT / file).read_text()
    names = {line.partition("==")[0] for line in pinned.splitlines()}
    spared = {line.partition(";")[0] for line in cpu_only.excluded(pinned).splitlines()}
    assert (
        {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton", "nixl-cu12"} <= spared <= names
    )
    assert not spared & {"torch", "nixl", "numpy"}


def _library(path: Path, source: str, *options: str) -> None:
    named = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-x", "none"]
    subprocess.run([str(COMPILER), *named, *options, "-o", str(path)], input=source, text=True, check=True)
