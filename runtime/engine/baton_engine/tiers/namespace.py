"""
What distinguishes the blocks of a model, in a place that outlives the process.

All bytes of its weights count. The digest of `Compatibility` has samples of them only, and a fine-tune may
change others. To read all takes long, so their digest is kept beside the blocks, with what the system says of
the files: any change of a file changes its `st_ctime_ns`, which no program can set. The exception are changes
by mapped memory on a tmpfs, which never writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from baton_api import __version__
from baton_engine.machine import trusted
from baton_engine.tiers.slab import NAME_BYTES, WEIGHTS

PIECE_BYTES = 64 * 2**20
"""Bytes of a checkpoint that one thread sums at once."""

READERS = 4

SETTLED_S = 60.0
"""
Files that have not changed for so long are known by their times. Times are coarse, and the system notes a
change by mapped memory once for all changes before it is written, 30 s later.
"""

State = list[int]
"""Device, inode, size, and times of the last changes of a file."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All bytes of a checkpoint, a folder or a .gguf file, and of the folder of its draft head."""

    digest: str
    states: list[State]
    """Those of its files. Empty: one changed lately, so the digest is not kept."""

    @classmethod
    def of(
        cls,
        checkpoint: Path,
        folder: Path | None = None,
        now: float | None = None,
        head: Path | None = None,
    ) -> Self:
        """
        Read all of a checkpoint, unless `folder` has the digest of these very files. Raises OSError.

        `now`: in seconds since 1970, by default the present. `head`: the folder of an EAGLE-3 head, if the
        model has one.
        """
        files = _files(checkpoint) + ([] if head is None else _files(head))
        now = time.time() if now is None else now
        states = _states(files)
        if folder is not None and (kept := _kept(folder / WEIGHTS, states)) is not None:
            return cls(kept, states)
        pieces = [
            (file, at)
            for file, state in zip(files, states, strict=True)
            for at in range(0, state[2], PIECE_BYTES)
        ]
        digest = hashlib.sha256()
        with ThreadPoolExecutor(READERS) as readers:
            for each in readers.map(_sum_of_piece, pieces):
                digest.update(each)
        kept_by = states if settled(states, now) and states == _states(files) else []
        return cls(digest.hexdigest(), kept_by)

    def keep(self, folder: Path) -> None:
        """Keep the digest in a folder of blocks for `of`, where that is possible."""
        path, content = folder / WEIGHTS, json.dumps([self.digest, self.states])
        if self.states and _kept(path, self.states) != self.digest:
            with contextlib.suppress(OSError):
                part = path.with_suffix(".part")
                part.unlink(missing_ok=True)
                with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(content)
                part.replace(path)

    def namespace(self, compatibility: str) -> bytes:
        """Return the name of what these weights compute. `compatibility` is the digest of `Compatibility`."""
        text = f"baton-kv-blocks {__version__} {compatibility} {self.digest}"
        return hashlib.sha256(text.encode()).digest()[:NAME_BYTES]


def settled(states: Iterable[State], now: float) -> bool:
    """Return whether a later change of any of these files would change its state."""
    for *_, modified, changed in states:
        if max(modified, changed) >= (now - SETTLED_S) * 1e9:
            return False
        # In whole seconds it is the time of an image (squashfs, erofs), and who builds that can set it.
        if changed % 10**9 == 0:
            return False
    return True


def _files(checkpoint: Path) -> list[Path]:
    if not checkpoint.is_dir():
        return [checkpoint]
    return sorted(path for path in checkpoint.iterdir() if path.suffix == ".safetensors")


def _states(files: Iterable[Path]) -> list[State]:
    """Opened files have their present state, on network file systems too."""
    states = []
    for path in files:
        with path.open("rb") as file:
            at = os.fstat(file.fileno())
        states.append([at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns])
    return states


def _kept(path: Path, states: list[State]) -> str | None:
    """Return the digest of files in these states. None: it is not known."""
    try:
        if not trusted(path):
            return None
        known: Any = json.loads(path.read_bytes())
        return str(known[0]) if known[1] == states else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _sum_of_piece(piece: tuple[Path, int]) -> bytes:
    path, at = piece
    total = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        left = PIECE_BYTES
        while left and (data := file.read(min(left, 2**20))):
            total.update(data)
            left -= len(data)
    return total.digest()
