"""
The native library of kernels: compiled on first use for this processor, and kept in the user's cache.

Any C compiler works: `$CC`, the system's, or the clang in the `ziglang` wheel (`pip install
'baton[kernels]'`). The file's name is a digest of sources, compiler and processor, so a change of any of them
creates another file, and processes that start together write the same one. Without a compiler, `Unavailable`
says what to do, and torch serves instead.

A container image contains libraries for kinds of processors, so that nothing is compiled in a pod:

    python -m baton_engine.ops.native.library FOLDER    builds one library for each kind

A worker loads the first one whose instructions its processor has, and whose self-test passes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_engine.machine import bundled_folder, cache_folder, owned

log = logging.getLogger(__name__)

SOURCES = ("decoder.c", "model.h", "attention.h", "linear.h", "tiles.h", "pool.h", "vector.h")
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = (
    "-O3",
    NATIVE_FLAG,
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-sanitize=undefined",  # zig turns it on
    "-Wno-psabi",  # every function that takes a vector is inlined
    "-shared",
    "-fPIC",
    "-pthread",
)
COMPILERS = ("cc", "gcc", "clang")
CAUTIONS: tuple[tuple[str, ...], ...] = ((), ("-DBATON_NO_TILES",))
"""Further flags, tried in turn until the library passes its own test: a machine may promise AMX in vain."""
BUILD_SECONDS = 300.0


class Unavailable(Exception):
    """There is no native library here; the message says why and what would give one."""


def load(environment: Mapping[str, str]) -> ctypes.CDLL:
    """
    The library, built if need be.

    Looks at BATON_KERNELS, BATON_BUNDLED, CC, PATH, BATON_CACHE, XDG_CACHE_HOME, HOME.
    """
    if environment.get("BATON_KERNELS", "").lower() in ("0", "off", "false"):
        raise Unavailable("BATON_KERNELS turns them off")
    if sys.platform not in ("linux", "darwin"):
        raise Unavailable(f"they are not made for {sys.platform}")
    if (folder := bundled_folder(environment)) is not None:
        for path in bundled(folder, instructions()):
            if _is_sound(path):
                return ctypes.CDLL(str(path))
    compiler = find_compiler(environment)
    path = cache_folder(environment) / f"kernels-{_digest(compiler, environment)}.so"
    if not _trusted(path):
        log.warning("%s can be changed by another user; building the kernels in a private folder", path)
        with tempfile.TemporaryDirectory() as private:
            built = Path(private) / path.name
            _build(compiler, built, environment)
            return _open(built)
    if not path.exists():
        _build(compiler, path, environment)
    return _open(path)


def _trusted(path: Path) -> bool:
    """Return whether the library, if there is one, and the folder's owner are this process's user or root.

    A folder that is writable for all is accepted, because volumes of Kubernetes are.
    """
    if path.parent.exists() and path.parent.stat().st_uid not in (os.getuid(), 0):
        return False
    return not os.path.lexists(path) or owned(path)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error}); delete it to build it anew") from error


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The command of a C compiler, without flags."""
    named = shlex.split(environment.get("CC", ""))
    if named:
        if shutil.which(named[0], path=environment.get("PATH", "")) is None:
            raise Unavailable(f"CC names {named[0]}, which is not to be found")
        return named
    for name in COMPILERS:
        if bundled := shutil.which(name, path=environment.get("PATH", "")):
            return [bundled]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise Unavailable("there is no C compiler: install gcc or clang, or `pip install 'baton[kernels]'`")


def _digest(compiler: Sequence[str], environment: Mapping[str, str]) -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    digest.update("\0".join((*compiler, *FLAGS, _processor())).encode())
    digest.update(_run([*compiler, "--version"], environment).encode())
    return digest.hexdigest()[:32]


def instructions() -> frozenset[str]:
    """What Linux says that the processor can; nothing where it says nothing."""
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    """Of the first processor."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return []


def _processor() -> str:
    """What the compiler's `native` depends on."""
    lines = _cpuinfo()
    if not lines:
        return platform.processor() + platform.machine()
    fields = ("flags", "features", "model", "model name", "cpu part", "cpu family")
    return "\n".join(line for line in lines if line.split(":")[0].strip().lower() in fields)


def _build(compiler: Sequence[str], path: Path, environment: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            for caution in CAUTIONS:
                compile_to(built, compiler, (*FLAGS, *caution), environment)
                if _is_sound(built):
                    built.chmod(0o755)  # whatever the umask is: `owned` refuses what a group can write
                    os.replace(built, path)  # at once: nobody ever sees half a file
                    return
    except OSError as error:
        raise Unavailable(
            f"{path.parent} cannot be written ({error}); set BATON_CACHE to a folder that can"
        ) from error
    raise Unavailable(
        f"what `{shlex.join(compiler)}` makes of them computes wrong results here; try another CC"
    )


def compile_to(
    path: Path, compiler: Sequence[str], flags: Sequence[str], environment: Mapping[str, str]
) -> None:
    """The library as `flags` make it. Raises Unavailable."""
    source = Path(__file__).parent / SOURCES[0]
    _run([*compiler, *flags, str(source), "-o", str(path), "-lm"], environment)


def _is_sound(built: Path) -> bool:
    """Whether the library passes its own test, in a process that may die of an instruction it has not got."""
    test = "import ctypes, sys; sys.exit(not ctypes.CDLL(sys.argv[1]).baton_sound())"
    result = subprocess.run([sys.executable, "-c", test, str(built)], capture_output=True, check=False)
    return result.returncode == 0


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"`{shlex.join(command)}` failed: {error}") from error
    if done.returncode:
        raise Unavailable(f"`{shlex.join(command)}` failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


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


def bundled(folder: Path, instructions: frozenset[str]) -> Iterator[Path]:
    """The libraries in `folder` that a processor with these instructions promises to run, the best first."""
    for target in TARGETS:
        path = folder / target.file
        if target.instructions <= instructions and path.is_file():
            yield path


def build(folder: Path, targets: Sequence[Target] = TARGETS) -> None:
    """Build one library for each kind. Raises Unavailable."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    compiler = find_compiler(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        # zig reads a hyphen as "without"
        fields = [f.replace("x86-64-", "x86_64_") if "ziglang" in compiler else f for f in target.flags]
        flags = (*fields, *(flag for flag in FLAGS if flag != NATIVE_FLAG))
        compile_to(folder / target.file, compiler, flags, os.environ)


def _sources() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
