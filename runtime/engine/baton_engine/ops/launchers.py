"""
The compiler of Triton's launchers: its part on the host, in C, which it compiles before the first kernel.

Triton finds `$CC`, gcc and clang only. Images of workers have none of them, but the clang in the `ziglang`
wheel. Triton's setting `build.impl` replaces the command.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton_engine.ops.native.library import Unavailable, find_compiler

FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")
"""Those of Triton."""

HEADERS = Path(sysconfig.get_paths()["include"])
"""Folder of Python's headers."""

Build = Callable[[str, str, str, list[str], list[str], list[str]], str]
"""Compiles a module of Python. Returns its path."""


def prepare(environment: Mapping[str, str], headers: Path = HEADERS) -> str:
    """Give Triton a compiler where it does not find one. Returns why it cannot compile launchers, or ""."""
    if not (headers / "Python.h").is_file():
        return f"{headers} has no Python.h, with which Triton compiles its launchers; install python3-dev"
    path = environment.get("PATH", "")
    if environment.get("CC") or any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return ""
    try:
        compiler = find_compiler(environment)
    except Unavailable as error:
        return f"Triton compiles its launchers, but {error}"
    import triton

    triton.knobs.build.impl = build_with(compiler, headers)
    return ""


def build_with(compiler: Sequence[str], headers: Path) -> Build:
    """Return a function that compiles with the command `compiler`, as Triton itself does with gcc."""

    def build(
        name: str,
        source: str,
        folder: str,
        library_dirs: list[str],
        include_dirs: list[str],
        libraries: list[str],
    ) -> str:
        built = Path(folder) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        command = [*compiler, source, *FLAGS, "-o", str(built)]
        # A colon precedes the name of a file. Other libraries have a name without prefix and ending.
        command += [f"-l:{library}" if ".so" in library else f"-l{library}" for library in libraries]
        command += [f"-L{path}" for path in library_dirs]
        command += [f"-I{path}" for path in (*include_dirs, folder, headers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Triton's launcher {name} cannot be compiled: {done.stderr.strip()[-1000:]}")
        return str(built)

    return build
