"""
Make the CUDA build of torch run without the CUDA libraries: 2 GB of packages instead of 6.

    python cpu_only.py excluded CONSTRAINTS  # prints the packages to leave out, as overrides for uv
    python cpu_only.py SITE_PACKAGES [CC]    # creates stand-ins for the missing libraries

The package index's build of torch is linked to the CUDA libraries. It does not start without them, even on a
machine without a GPU. A stand-in replaces each library: it has the same name and the functions that torch
needs, under the same versions. Each function returns CUDA's status 100, "no device". So
`torch.cuda.is_available()` is False on every machine. A build of torch for CPUs needs no stand-ins.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice. In the other libraries it is just a failure."""

EXCLUDED = re.compile(r"(nvidia-[\w-]+|cuda-[\w-]+|triton|nixl-cu12)==")
"""Packages of CUDA, the compiler for it, and NIXL for another CUDA than torch's."""

EXPERTS = ("nixl_ep_cu12", "nixl_ep_cu13")
"""Packages for expert parallelism on GPUs. They are inside NIXL's wheels, so uv cannot leave them out."""

LIBRARY = re.compile(r"lib(?!cuda\.so)(cu|nv|nccl)\w*\.so\.\d+")
"""Libraries of CUDA, except libcuda: it belongs to the driver, and torch opens it only with a GPU."""

FUNCTION = re.compile(r"(cu|nv|nccl|__cuda)\w+")

DYNAMIC, SYMBOLS, NEEDED_VERSIONS, VERSIONS = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
"""Types of sections: System V ABI, chapter 4; Linux Standard Base, 10.7."""

NEEDED = 1
"""Tag of the dynamic section."""


@dataclass(frozen=True, slots=True, order=True)
class Imported:
    """A symbol that a library imports. If `version` is not empty, `library` is the one that provides it."""

    name: str
    version: str
    library: str


class Library:
    """A shared library, read from its ELF sections: 64 bit, little endian."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is not a library."""
        self._data = path.read_bytes()
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        offsets = range(start, start + size * count, size)
        self._sections = [struct.unpack_from("<IIQQQQIIQQ", self._data, offset) for offset in offsets]

    @property
    def needed(self) -> list[str]:
        """Names of the libraries that it is linked to."""
        table, names = self._section(DYNAMIC)
        return [_text(names, value) for tag, value in struct.iter_unpack("<qQ", table) if tag == NEEDED]

    @property
    def imported(self) -> Iterator[Imported]:
        """Symbols that it imports."""
        table, names = self._section(SYMBOLS)
        numbers, _ = self._section(VERSIONS)
        versions = self._versions()
        for i, (at, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", table)):
            if section == 0:
                number = struct.unpack_from("<H", numbers, 2 * i)[0] if numbers else 0
                version, library = versions.get(number, ("", ""))
                yield Imported(_text(names, at), version, library)

    def _versions(self) -> dict[int, tuple[str, str]]:
        """Return, by version number, the names of the version and of the library that provides it."""
        table, names = self._section(NEEDED_VERSIONS)
        versions, at, more = {}, 0, bool(table)
        while more:
            _, count, library, first, step_to_next = struct.unpack_from("<HHIII", table, at)
            inner = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", table, inner)
                versions[number] = (_text(names, name), _text(names, library))
                inner += step
            at, more = at + step_to_next, step_to_next > 0
        return versions

    def _section(self, kind: int) -> tuple[bytes, bytes]:
        """Return the first section of a kind, and the section that it is linked to: its strings."""
        for section in self._sections:
            if section[1] == kind:
                return self._content(section), self._content(self._sections[section[6]])
        return b"", b""

    def _content(self, section: Sequence[int]) -> bytes:
        return self._data[section[4] : section[4] + section[5]]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def excluded(constraints: str) -> str:
    """Return overrides for uv that leave out all packages of CUDA, whichever package requires them."""
    names = [match[1] for match in map(EXCLUDED.match, constraints.splitlines()) if match]
    return "".join(f"{name}; sys_platform == 'never'\n" for name in names)


def missing(libraries: Iterable[Library]) -> dict[str, set[Imported]]:
    """
    Return the symbols that these libraries import from CUDA, by the library that must provide them.

    A symbol without a version may come from any library, so every stand-in provides it.
    """
    names, imported = set[str](), set[Imported]()
    for library in libraries:
        names |= {name for name in library.needed if LIBRARY.fullmatch(name)}
        imported |= set(library.imported)
    anywhere = {one for one in imported if not one.version and FUNCTION.fullmatch(one.name)}
    return {name: anywhere | {one for one in imported if one.library == name} for name in names}


def assembly(names: Iterable[str]) -> str:
    """Return the source of one function under all names, for x86-64 and aarch64."""
    answer = [
        "#ifdef __aarch64__",
        f"mov w0, #{NO_DEVICE}",
        "#else",
        f"movl ${NO_DEVICE}, %eax",
        "#endif",
        "ret",
    ]
    lines = [".text", ".hidden baton_no_device", "baton_no_device:", *answer]
    for name in names:
        lines += [f".globl {name}", f".type {name}, %function", f".set {name}, baton_no_device"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""])


def version_script(symbols: Iterable[Imported]) -> str:
    """Return the linker's version script. Symbols without a version are not in it."""
    versions = defaultdict(list)
    for one in symbols:
        if one.version:
            versions[one.version].append(one.name)
    return "\n".join(f"{version} {{ global: {'; '.join(names)}; }};" for version, names in versions.items())


def stand_in(path: Path, symbols: Iterable[Imported], compiler: Sequence[str]) -> None:
    """Write a stand-in to `path` with a C compiler's command."""
    exported = sorted(symbols)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.S"), Path(folder, "versions")
        source.write_text(assembly({one.name: None for one in exported}))
        script.write_text(version_script(exported))
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}"]
        if script.stat().st_size:
            options.append(f"-Wl,--version-script={script}")
        subprocess.run([*compiler, *options, "-o", str(path), str(source)], check=True)


def main(packages: Path, compiler: Sequence[str] = (sys.executable, "-m", "ziglang", "cc")) -> None:
    """Create the stand-ins in a folder `site-packages` without packages of CUDA."""
    folder = packages / "torch" / "lib"
    stand_ins = missing(map(Library, sorted(folder.glob("*.so*"))))
    for name, symbols in stand_ins.items():
        stand_in(folder / name, symbols, compiler)
    for name in EXPERTS:
        shutil.rmtree(packages / name, ignore_errors=True)
    print(f"Created stand-ins for {len(stand_ins)} CUDA libraries.")


if __name__ == "__main__":
    if sys.argv[1] == "excluded":
        print(excluded(Path(sys.argv[2]).read_text()), end="")
    else:
        main(Path(sys.argv[1]), *([sys.argv[2:]] if sys.argv[2:] else []))
