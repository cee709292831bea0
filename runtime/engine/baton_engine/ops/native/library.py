"""
The native library of kernels: compiled on first use for this processor, and stored in the user's cache.

Any C compiler works: `$CC`, the system's, or the clang in the `ziglang` wheel (the extra
`kernels`). The file's name is a digest of sources, compiler and processor, so a change of any of them
creates another file, and of processes that start together one compiles it. Without a compiler, `Unavailable`
states what to install, and torch is used instead.

Container images contain libraries for several kinds of processors, so that pods do not compile:

    python -m baton_engine.ops.native.library FOLDER    builds one library for each kind

A worker loads the first one whose instructions the processor supports, and whose self-test passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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

from baton_api import installing
from baton_engine.machine import bundled_folder, cache_folder, trusted

log = logging.getLogger(__name__)

SOURCES = (
    "decoder.c",
    "draw.h",
    "experts.h",
    "lora.h",
    "model.h",
    "products.h",
    "attention.h",
    "softmax.h",
    "few_queries.h",
    "quantized.h",
    "linear.h",
    "tiles.h",
    "pool.h",
    "stored.h",
    "vector.h",
)
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = (
    "-O3",
    NATIVE_FLAG,
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-sanitize=undefined",  # zig enables it by default
    "-Wno-psabi",  # all functions with vector arguments are inlined
    "-shared",
    "-fPIC",
    "-pthread",
)
COMPILERS = ("cc", "gcc", "clang")
CAUTIONS: tuple[tuple[str, ...], ...] = ((), ("-DBATON_NO_TILES",))
"""Additional flags, tried in order until the library passes its self-test. Some machines report AMX, but do
not support it."""
BUILD_SECONDS = 300.0


_loaded: list[ctypes.CDLL] = []


class Unavailable(Exception):
    """The native library is unavailable. The message contains the reason and the remedy."""


def disabled(environment: Mapping[str, str]) -> bool:
    """Return whether BATON_KERNELS disables Baton's kernels."""
    return environment.get("BATON_KERNELS", "").lower() in ("0", "off", "false")


def load(environment: Mapping[str, str]) -> ctypes.CDLL:
    """
    Load the library, and build it if necessary. Raises Unavailable.

    Reads BATON_KERNELS, BATON_BUNDLED, CC, PATH, BATON_CACHE, XDG_CACHE_HOME and HOME.
    """
    if disabled(environment):
        raise Unavailable("BATON_KERNELS disables them")
    if sys.platform not in ("linux", "darwin"):
        raise Unavailable(f"they do not support {sys.platform}")
    if (folder := bundled_folder(environment)) is not None:
        for path in bundled(folder, instructions()):
            if _is_sound(path):
                return _open(path)
    compiler = find_compiler(environment)
    path = cache_folder(environment) / f"kernels-{_digest(compiler, environment)}.so"
    if not trusted(path):
        log.warning("another user can modify %s; building the kernels in a private folder", path)
        with tempfile.TemporaryDirectory() as private:
            built = Path(private) / path.name
            _build(compiler, built, environment)
            return _open(built)
    if not path.exists():
        _build(compiler, path, environment)
    return _open(path)


def begin_build(environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """
    Build the library in a process of its own if it is missing, and return that process without waiting.

    A worker imports torch in the meantime, and its `load` waits for the result. Compiling takes 15 s.
    """
    if disabled(environment) or bundled_folder(environment) is not None:
        return None
    try:
        compiler = find_compiler(environment)
        path = cache_folder(environment) / f"kernels-{_digest(compiler, environment)}.so"
    except Unavailable:
        return None  # `load` raises it again, with the reason
    if path.exists() or not trusted(path):
        return None
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        (sys.executable, "-m", __name__), env=dict(environment), stdin=quiet, stdout=quiet, stderr=quiet
    )


def _open(path: Path) -> ctypes.CDLL:
    try:
        _loaded[:] = [ctypes.CDLL(str(path))]
    except OSError as error:
        raise Unavailable(f"cannot load {path} ({error}); delete it to build it again") from error
    return _loaded[0]


def loaded() -> ctypes.CDLL | None:
    """Return the library that this process loaded last; None if it has not loaded any."""
    return _loaded[0] if _loaded else None


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the command of a C compiler, without flags. Raises Unavailable."""
    named = shlex.split(environment.get("CC", ""))
    if named:
        if shutil.which(named[0], path=environment.get("PATH", "")) is None:
            raise Unavailable(f"CC is {named[0]}, which does not exist")
        return named
    for name in COMPILERS:
        if bundled := shutil.which(name, path=environment.get("PATH", "")):
            return [bundled]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise Unavailable(
        f"no C compiler is installed: install gcc or clang, or `{installing.command('kernels')}`"
    )


def _digest(compiler: Sequence[str], environment: Mapping[str, str]) -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    digest.update("\0".join((*compiler, *FLAGS, processor())).encode())
    digest.update(_run([*compiler, "--version"], environment).encode())
    return digest.hexdigest()[:32]


def instructions() -> frozenset[str]:
    """Return the CPU flags that Linux reports; empty on other systems."""
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    """Return the lines of the first processor in /proc/cpuinfo."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return []


def processor() -> str:
    """Return a description of the processor, which determines the result of `-march=native` and rates."""
    lines = _cpuinfo()
    if not lines:
        return platform.processor() + platform.machine()
    fields = ("flags", "features", "model", "model name", "cpu part", "cpu family")
    return "\n".join(line for line in lines if line.split(":")[0].strip().lower() in fields)


def _build(compiler: Sequence[str], path: Path, environment: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _build_lock(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            if path.exists():
                return  # another process built it meanwhile
            built = Path(folder) / path.name
            for caution in CAUTIONS:
                compile_to(built, compiler, (*FLAGS, *caution), environment)
                if _is_sound(built):
                    built.chmod(0o755)  # independent of the umask: `trusted` rejects group-writable files
                    os.replace(built, path)  # atomic: other processes never read a partial file
                    return
    except OSError as error:
        raise Unavailable(
            f"cannot write to {path.parent} ({error}); set BATON_CACHE to a writable folder"
        ) from error
    raise Unavailable(
        f"kernels built by `{shlex.join(compiler)}` compute wrong results on this machine; try another CC"
    )


@contextlib.contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`. A filesystem without locks lets them all build."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_to(
    path: Path, compiler: Sequence[str], flags: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Compile the library with `flags`. Raises Unavailable."""
    source = Path(__file__).parent / SOURCES[0]
    _run([*compiler, *flags, str(source), "-o", str(path), "-lm"], environment)


def _is_sound(built: Path) -> bool:
    """Run the library's self-test in a separate process, because an unsupported instruction kills it."""
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
VNNI = V4 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags."""
    instructions: frozenset[str]
    """CPU flags that Linux reports for such a processor."""

    @property
    def file(self) -> str:
        """File name of the library. It contains a digest of the sources."""
        return f"kernels-{self.name}-{_sources()}.so"


TARGETS = (
    Target(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    ),
    Target("avx512-bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), BF16),
    Target("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), VNNI),
    Target("avx512", ("-march=x86-64-v4",), V4),
    Target("avx-vnni", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),
    Target("avx2", ("-march=x86-64-v3",), V3),
)
"""Kinds of processors, fastest first. Other processors compile the kernels or use torch."""


def bundled(folder: Path, instructions: frozenset[str]) -> Iterator[Path]:
    """Yield the libraries in `folder` that a processor with these instructions supports, fastest first."""
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
        # zig interprets a hyphen as "without"
        fields = [f.replace("x86-64-", "x86_64_") if "ziglang" in compiler else f for f in target.flags]
        flags = (*fields, *(flag for flag in FLAGS if flag != NATIVE_FLAG))
        compile_to(folder / target.file, compiler, flags, os.environ)


def _sources() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        build(Path(sys.argv[1]))
    else:
        load(os.environ)
