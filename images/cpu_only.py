"""
A torch for CUDA that runs without any of CUDA's libraries: 2 GB of packages in place of 6.

    python cpu_only.py spared CONSTRAINTS    # what need not be installed, as a file of overrides for uv
    python cpu_only.py SITE_PACKAGES         # stand-ins for what then is missing

The package index's own build of torch is linked to CUDA's libraries, so it does not start without them, even
where there is no GPU and nothing in them called. In place of each there is a stand-in, a library of its name
with the functions that torch names, under the same versions, all of which answer that there is no device
(CUDA's status 100). So `torch.cuda.is_available()` is False, wherever it runs. A torch for CPUs wants none.
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
"""cudaErrorNoDevice. Of the other libraries it is a failure like another."""

SPARED = re.compile(r"(nvidia-[\w-]+|cuda-[\w-]+|triton)==")
"""Packages of CUDA, and the compiler for it."""

EXPERTS = ("nixl_ep_cu12", "nixl_ep_cu13")
"""What NIXL brings for experts on many GPUs, in wheels that are needed otherwise."""

LIBRARY = re.compile(r"lib(?!cuda\.so)(cu|nv|nccl)\w*\.so\.\d+")
"""libcuda is the driver's, and is looked for only when a GPU is."""

FUNCTION = re.compile(r"(cu|nv|nccl|__cuda)\w+")

DYNAMIC, SYMBOLS, NEEDED_VERSIONS, VERSIONS = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
"""Types of sections: System V ABI, chapter 4; Linux Standard Base, 10.7."""

NEEDED = 1
"""Tag of the dynamic section."""


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """A symbol that a library finds in others. With a `version`, which may be empty, it knows in which."""

    name: str
    version: str
    library: str


class Library:
    """A shared library as its ELF sections tell: 64 bit, little endian."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if it is none."""
        self._data = path.read_bytes()
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        places = range(start, start + size * count, size)
        self._sections = [struct.unpack_from("<IIQQQQIIQQ", self._data, place) for place in places]

    @property
    def needed(self) -> list[str]:
        """The names of those that it is linked to."""
        table, names = self._section(DYNAMIC)
        return [_text(names, value) for tag, value in struct.iter_unpack("<qQ", table) if tag == NEEDED]

    @property
    def wanted(self) -> Iterator[Wanted]:
        table, names = self._section(SYMBOLS)
        numbers, _ = self._section(VERSIONS)
        versions = self._versions()
        for i, (at, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", table)):
            if section == 0:
                number = struct.unpack_from("<H", numbers, 2 * i)[0] if numbers else 0
                version, library = versions.get(number, ("", ""))
                yield Wanted(_text(names, at), version, library)

    def _versions(self) -> dict[int, tuple[str, str]]:
        """By their numbers the names of versions, and of the libraries that are to have them."""
        table, names = self._section(NEEDED_VERSIONS)
        found, at, more = {}, 0, bool(table)
        while more:
            _, count, library, first, following = struct.unpack_from("<HHIII", table, at)
            inner = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", table, inner)
                found[number] = (_text(names, name), _text(names, library))
                inner += step
            at, more = at + following, following > 0
        return found

    def _section(self, kind: int) -> tuple[bytes, bytes]:
        """The first of a kind, and the one that it is linked to: its strings."""
        for section in self._sections:
            if section[1] == kind:
                return self._content(section), self._content(self._sections[section[6]])
        return b"", b""

    def _content(self, section: Sequence[int]) -> bytes:
        return self._data[section[4] : section[4] + section[5]]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def spared(constraints: str) -> str:
    """Overrides by which none of CUDA's packages is installed, whoever requires it."""
    names = [found[1] for found in map(SPARED.match, constraints.splitlines()) if found]
    return "".join(f"{name}; sys_platform == 'never'\n" for name in names)


def missing(libraries: Iterable[Library]) -> dict[str, set[Wanted]]:
    """What these want of CUDA's, by the library that is to have it: all of them, where it is not said."""
    names, wanted = set[str](), set[Wanted]()
    for library in libraries:
        names |= {name for name in library.needed if LIBRARY.fullmatch(name)}
        wanted |= set(library.wanted)
    anywhere = {one for one in wanted if not one.version and FUNCTION.fullmatch(one.name)}
    return {name: anywhere | {one for one in wanted if one.library == name} for name in names}


def assembly(names: Iterable[str]) -> str:
    """One function under all names, for x86-64 and aarch64."""
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


def version_script(symbols: Iterable[Wanted]) -> str:
    """For the linker; symbols that have no version need no mention."""
    versions = defaultdict(list)
    for one in symbols:
        if one.version:
            versions[one.version].append(one.name)
    return "\n".join(f"{version} {{ global: {'; '.join(names)}; }};" for version, names in versions.items())


def stand_in(path: Path, symbols: Iterable[Wanted], compiler: Sequence[str]) -> None:
    """Writes one to `path` by a C compiler's command."""
    there = sorted(symbols)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.S"), Path(folder, "versions")
        source.write_text(assembly({one.name: None for one in there}))
        script.write_text(version_script(there))
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}"]
        if script.stat().st_size:
            options.append(f"-Wl,--version-script={script}")
        subprocess.run([*compiler, *options, "-o", str(path), str(source)], check=True)


def main(packages: Path, compiler: Sequence[str] = (sys.executable, "-m", "ziglang", "cc")) -> None:
    """Of a folder `site-packages` in which nothing of CUDA is installed."""
    folder = packages / "torch" / "lib"
    stand_ins = missing(map(Library, sorted(folder.glob("*.so*"))))
    for name, symbols in stand_ins.items():
        stand_in(folder / name, symbols, compiler)
    for name in EXPERTS:
        shutil.rmtree(packages / name, ignore_errors=True)
    print(f"{len(stand_ins)} libraries of CUDA have stand-ins")


if __name__ == "__main__":
    if sys.argv[1] == "spared":
        print(spared(Path(sys.argv[2]).read_text()), end="")
    else:
        main(Path(sys.argv[1]))
