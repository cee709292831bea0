"""
Packed weights of the CPU kernels in files of Baton's cache, which later starts map instead of packing again.

A file is for one content of a checkpoint, one library of kernels (thus one kind of processor), one dtype and
one choice of formats. Its name is a digest of them, and of the sources that read and pack weights. The file
has a header and the kernels' memory. All bytes have checksums, which are compared before the weights are
used. Workers of one machine share the mapped memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_api.setting_types import show_size
from baton_engine.machine import trusted
from baton_engine.model.native_weights import WeightLayout

log = logging.getLogger(__name__)

PREFIX = "weights-"
PARTIAL = ".partial"
MAGIC = b"baton packed weights\n"
HEADER_BYTES = 2 * 1024 * 1024
"""The weights begin at a multiple of a huge page, because the kernel maps huge pages at such offsets only."""
PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of each checksum; as in stored.h."""
FREE_SHARE = 0.5
"""A file has at most this share of the free disk space."""

ABANDONED_S = 3600
"""Age of a partial file whose writer has ended."""

SAMPLES = 64
"""Number of samples of each file of a checkpoint in the digest of its content."""
SAMPLE_BYTES = 4096
WHOLE = 1024 * 1024
"""Bytes of a file up to which its whole content is part of the digest."""


class Header(msgspec.Struct, frozen=True):
    """Everything that a worker needs of the checkpoint's weights besides their bytes."""

    loads: tuple[WeightLayout, ...]
    size: int
    """Bytes of the packed weights."""
    sums: tuple[int, ...]
    """A checksum of each piece of them."""
    digest: str
    """`weights.weights_digest`."""
    loaded_bytes: int
    """`Weights.bytes`."""


class Damaged(Exception):
    """A file of packed weights cannot be used. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """An open file of packed weights. Its bytes are not checked yet."""

    path: Path
    file: int
    header: Header


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The place of a model's packed weights."""

    path: Path
    limit: int
    """Bytes of all such files in the folder."""

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredWeights | None]:
        """Open the file. None: it is missing or cannot be used. A damaged one is deleted."""
        if not trusted(self.path):
            log.warning("another user can modify %s; it is not used", self.path)
            yield None
            return
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            yield self._opened(file)
        finally:
            os.close(file)

    def _opened(self, file: int) -> StoredWeights | None:
        try:
            header = _read_header(file)
        except Damaged as reason:
            self.discard(reason)
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path)  # the least recently used files are deleted
        return StoredWeights(self.path, file, header)

    def discard(self, reason: Damaged) -> None:
        """Delete the file, so that it is written again."""
        log.warning("%s is not used: %s", self.path, reason)
        with contextlib.suppress(OSError):
            self.path.unlink()

    def write(self, address: int, header: Header, kernels: ctypes.CDLL) -> None:
        """
        Write packed weights of `header.size` bytes at `address`, and delete files beyond the limit.

        Other processes see a whole file only. Of several that write the same one, the first one does. Raises
        OSError.
        """
        size = HEADER_BYTES + header.size
        if size > self.limit:
            log.info(
                "The packed weights (%s) are not stored, because --weights-cache is %s.",
                show_size(size),
                show_size(self.limit),
            )
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if size > free * FREE_SHARE:
            log.warning(
                "The packed weights (%s) are not stored, because only %s are free in %s.",
                show_size(size),
                show_size(free),
                self.path.parent,
            )
            return
        with _locked(self.path) as file:
            if file is None:
                return
            _write(file, address, header, kernels)
            os.fchmod(file, 0o644)  # `trusted` rejects files that others can write
            os.replace(_partial(self.path), self.path)
        _prune(self.path, self.limit)
        log.info("The packed weights (%s) are stored in %s for later starts.", show_size(size), self.path)


def content_digest(path: Path) -> str:
    """
    Return a digest of a checkpoint, a folder or a .gguf file, without reading all of it. Raises OSError.

    Sizes, times of change and samples of large files count, and the whole content of small ones.
    """
    files = [path]
    if path.is_dir():
        files = [part for part in sorted(path.iterdir()) if part.suffix in (".safetensors", ".json")]
    digest = hashlib.sha256()
    for part in files:
        with part.open("rb") as file:
            status = os.fstat(file.fileno())
            name = part.name if part != path else ""
            digest.update(f"{name}\0{status.st_size}\0".encode())
            if status.st_size <= WHOLE:
                digest.update(file.read())
                continue
            digest.update(f"{status.st_mtime_ns}\0".encode())
            last = status.st_size - SAMPLE_BYTES
            for sample in range(SAMPLES):
                file.seek(last * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def file_name(*parts: object) -> str:
    """Return the name of the file for weights that depend on `parts`, by their representations."""
    digest = hashlib.sha256(repr(parts).encode())
    package = Path(__file__).parents[1]
    layout = package / "quantized.py", package / "spec.py", package / "ops" / "native" / "support.py"
    for source in (*layout, *sorted((package / "model").rglob("*.py"))):
        digest.update(source.read_bytes())
    return f"{PREFIX}{digest.hexdigest()[:32]}"


def _read_header(file: int) -> Header:
    """Read the header, and compare it with the size of the file. Raises Damaged."""
    try:
        block = os.pread(file, HEADER_BYTES, 0)
        size = os.fstat(file).st_size
    except OSError as error:
        raise Damaged(f"it cannot be read ({error})") from error
    magic, _, rest = block.partition(b"\n")
    checksum, _, rest = rest.partition(b"\n")
    content = rest.rstrip(b"\0")
    if magic + b"\n" != MAGIC or hashlib.sha256(content).hexdigest().encode() != checksum:
        raise Damaged("its header is damaged")
    header = msgspec.json.decode(content, type=Header)
    if size != HEADER_BYTES + header.size:
        raise Damaged(f"it has {size} bytes instead of {HEADER_BYTES + header.size}")
    return header


def _write(file: int, address: int, header: Header, kernels: ctypes.CDLL) -> None:
    """Write the header with the checksums, and the weights. Raises OSError."""
    sums = []
    os.ftruncate(file, 0)
    for first in range(0, header.size, PIECE_BYTES):
        length = min(PIECE_BYTES, header.size - first)
        sums.append(kernels.baton_checksum(ctypes.c_void_p(address + first), ctypes.c_int64(length)))
        piece = memoryview((ctypes.c_char * length).from_address(address + first)).cast("B")
        done = 0
        while done < length:
            done += os.pwrite(file, piece[done:], HEADER_BYTES + first + done)
    content = msgspec.json.encode(msgspec.structs.replace(header, sums=tuple(sums)))
    block = MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    if len(block) > HEADER_BYTES:
        raise OSError(f"the header has {len(block)} bytes, the maximum is {HEADER_BYTES}")
    os.pwrite(file, block, 0)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Open the partial file of `path`. None: another process writes it or has written it. Raises OSError."""
    partial = _partial(path)
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        # Another process may have renamed or deleted it between `open` and `flock`.
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samestat(partial.stat(), os.fstat(file)):
                yield None
                return
            try:
                yield None if path.exists() else file
            finally:
                partial.unlink(missing_ok=True)  # a failed write, such as on a full disk
            return
        yield None
    finally:
        os.close(file)


def _prune(written: Path, limit: int) -> None:
    """Delete the least recently used files except `written`, until all have at most `limit` bytes."""
    files = []
    for path in written.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((path == written, status.st_mtime, status.st_size, path))
    total = 0
    for newest, used, size, path in sorted(files, reverse=True):
        total += size
        abandoned = path.suffix == PARTIAL and time.time() - used > ABANDONED_S
        if abandoned or (total > limit and not newest and path.suffix != PARTIAL):
            with contextlib.suppress(OSError):
                path.unlink()
