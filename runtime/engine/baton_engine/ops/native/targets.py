"""
Kinds of processors for which an image brings the library along, so that nothing is compiled in a pod.

    python -m baton_engine.ops.native.targets FOLDER    builds one library for each

Whoever starts takes the first whose instructions its processor promises and whose own test it passes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_engine.ops.native import library

V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]
    """What tells a compiler of it."""
    instructions: frozenset[str]
    """What Linux says of such a processor."""

    @property
    def file(self) -> str:
        """Of its library: other sources have another name."""
        return f"kernels-{self.name}-{_sources()}.so"


TARGETS = (
    Target(
        "amx",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        BF16 | {"amx_tile", "amx_bf16"},
    ),
    Target("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16"), BF16),
    Target("avx512", ("-march=x86-64-v4",), V4),
    Target("avx2", ("-march=x86-64-v3",), V3),
)
"""The best first. Others are served by what is compiled for them, or by torch."""


def found(folder: Path, instructions: frozenset[str]) -> Iterator[Path]:
    """The libraries in `folder` that a processor with these instructions promises to run, the best first."""
    for target in TARGETS:
        path = folder / target.file
        if target.instructions <= instructions and path.is_file():
            yield path


def build(folder: Path, targets: Sequence[Target] = TARGETS) -> None:
    """One library for each kind. Raises library.Unavailable."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    compiler = library.find_compiler(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        # zig reads a hyphen as "without"
        told = [f.replace("x86-64-", "x86_64_") if "ziglang" in compiler else f for f in target.flags]
        flags = (*told, *(flag for flag in library.FLAGS if flag != library.NATIVE))
        library.compile_to(folder / target.file, compiler, flags, os.environ)


def _sources() -> str:
    digest = hashlib.sha256()
    for name in library.SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
