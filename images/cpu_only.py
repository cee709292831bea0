"""
A worker's packages without what only a GPU's node loads: 2 GB in place of 6.

    python cpu_only.py SITE_PACKAGES

The package index's own build of torch is linked to CUDA's libraries, so it does not start without them,
though on a machine without a GPU nothing in them is called. Each that torch names gives way to a stand-in: a
library of the same name, with the same functions under the same versions, each of which answers that there is
no device (CUDA's status 100). So `torch.cuda.is_available()` is False, wherever it runs. All else of CUDA is
gone, and with it Triton and NIXL's experts in parallel. A torch that was built for CPUs stays as it is.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice. Of the other libraries it is a failure like another."""

SUPERFLUOUS = ("triton", "nvidia", "nixl_ep_cu12", "nixl_ep_cu13")
"""Packages' folders that go as a whole; the stand-ins are put back into theirs."""

DYNAMIC, SYMBOLS, DEFINED_VERSIONS, VERSIONS = 6, 11, 0x6FFFFFFD, 0x6FFFFFFF
"""Types of sections: System V ABI, chapter 4; Linux Standard Base, 10.7."""

NEEDED, SONAME = 1, 14
"""Tags of the dynamic section."""

NOWHERE, RESERVED = 0, 0xFF00
"""Section numbers of symbols that a library itself asks for, and from which on they are none."""

NAME = re.compile(r"(?!_Z|_end$|_edata$|__bss_start$)\w+")
"""A C interface. C++ names are a library's own affair, and would hide those of others."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """What a library offers by a name. `size`: bytes of a variable, 0 of a function. `version`: or empty."""

    name: str
    version: str
    size: int


class Library:
    """A shared library as its ELF sections tell: 64 bit, little endian."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if it is none."""
        self._data = path.read_bytes()
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        self._sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._data, start + i * size) for i in range(count)
        ]

    @property
    def soname(self) -> str:
        return "".join(self._dynamic(SONAME))

    @property
    def needed(self) -> list[str]:
        """The sonames of those that it is linked to."""
        return self._dynamic(NEEDED)

    @property
    def symbols(self) -> list[Symbol]:
        """What others may call or read."""
        table, names = self._section(SYMBOLS)
        numbers, _ = self._section(VERSIONS)
        versions = self._versions()
        found = []
        for i, (at, kind, _, section, _, size) in enumerate(struct.iter_unpack("<IBBHQQ", table)):
            name = _text(names, at)
            if section != NOWHERE and section < RESERVED and NAME.fullmatch(name):
                number = struct.unpack_from("<H", numbers, 2 * i)[0] & 0x7FFF if numbers else 1
                found.append(Symbol(name, versions.get(number, ""), size if kind & 15 == 1 else 0))
        return found

    def _versions(self) -> dict[int, str]:
        """By their numbers. The first is the file's own name, and no version."""
        table, names = self._section(DEFINED_VERSIONS)
        named, at, following = {}, 0, 1 if table else 0
        while following:
            _, _, number, _, _, first, following = struct.unpack_from("<HHHHIII", table, at)
            named[number] = _text(names, struct.unpack_from("<I", table, at + first)[0])
            at += following
        return {number: name for number, name in named.items() if number > 1}

    def _dynamic(self, wanted: int) -> list[str]:
        table, names = self._section(DYNAMIC)
        return [_text(names, value) for tag, value in struct.iter_unpack("<qQ", table) if tag == wanted]

    def _section(self, kind: int) -> tuple[bytes, bytes]:
        """The first of a kind, and of that which it is linked to: its strings."""
        for section in self._sections:
            if section[1] == kind:
                linked = self._sections[section[6]]
                return self._content(section), self._content(linked)
        return b"", b""

    def _content(self, section: Sequence[int]) -> bytes:
        return self._data[section[4] : section[4] + section[5]]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def assembly(symbols: Sequence[Symbol]) -> str:
    """x86-64 or aarch64, by the preprocessor: one function under all names, and zeros for variables."""
    answer = [
        "#ifdef __aarch64__",
        f"mov w0, #{NO_DEVICE}",
        "#else",
        f"movl ${NO_DEVICE}, %eax",
        "#endif",
        "ret",
    ]
    lines = [".text", ".globl baton_no_device", ".hidden baton_no_device", "baton_no_device:", *answer]
    for one in symbols:
        lines.append(f".globl {one.name}")
        if one.size:
            lines.append(f".comm {one.name}, {one.size}, 16")
        else:
            lines += [f".type {one.name}, %function", f".set {one.name}, baton_no_device"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""])


def version_script(symbols: Sequence[Symbol]) -> str:
    """For the linker; symbols that have no version need no mention."""
    versions = defaultdict(list)
    for one in symbols:
        if one.version:
            versions[one.version].append(one.name)
    return "\n".join(f"{version} {{ global: {'; '.join(names)}; }};" for version, names in versions.items())


def stand_in(library: Library, path: Path, compiler: Sequence[str]) -> None:
    """Writes one for `library` to `path`, by a C compiler's command."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.S"), Path(folder, "versions")
        source.write_text(assembly(library.symbols))
        script.write_text(version_script(library.symbols))
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{library.soname}"]
        if script.stat().st_size:
            options.append(f"-Wl,--version-script={script}")
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*compiler, *options, "-o", str(path), str(source)], check=True)


def main(packages: Path, compiler: Sequence[str] = (sys.executable, "-m", "ziglang", "cc")) -> None:
    """Of a folder `site-packages`."""
    wanted = {name for path in packages.glob("torch/lib/*.so*") for name in Library(path).needed}
    stand_ins = {path: Library(path) for path in packages.glob("nvidia/**/lib/*.so*") if path.name in wanted}
    for name in SUPERFLUOUS:
        shutil.rmtree(packages / name, ignore_errors=True)
    for path, library in stand_ins.items():
        stand_in(library, path, compiler)
    print(f"{len(stand_ins)} libraries of CUDA are stand-ins now")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
