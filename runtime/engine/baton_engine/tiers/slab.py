"""
KV blocks in a folder of fixed size.

The file `blocks` has them in slots, `headers` says what each slot has, and the process that writes holds
`lock`. A header has the sum of its block's bytes, and one of itself. It is cleared before its slot is
written, and written after it. So a process may be killed anywhere: the next one finds whole blocks, or finds
by the sums that they are not. A header also has the namespace of its model; slots of other ones count as
unused. All integers are little-endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton_api.errors import SetupError
from baton_api.setting_types import show_size

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
"""The bytes of one block, contiguous."""

FORMAT = 1
NAME_BYTES = 16
"""Of a namespace, and of the chain hash of a block."""

BLOCKS, HEADERS, LOCK, WEIGHTS = "blocks", "headers", "lock", "weights-digest"
PAGE = 4096
"""Slots begin at a multiple of it, and the headers after the first one, which describes the folder."""

MAGIC = b"KV blocks of Baton\n"
"""Begins the first page in any format. Without it, the files are somebody else's."""

LOCK_TRIES, LOCK_WAIT_S = 100, 0.01
"""A lock that is only read is waited for: `in_use` holds it for a moment."""

CLEARED_BYTES = 2**20
"""Of headers, at once."""

DISK_SHARE = 0.95
"""Fraction of the space of a disk that a folder takes at most. File systems need some themselves."""

_HEADER = struct.Struct("<16s16s16sQQ56xQ")
_EMPTY = bytes(_HEADER.size)


class Header(NamedTuple):
    """What a slot has."""

    namespace: bytes
    name: bytes
    parent: bytes
    sum: int
    """xxh3-64 of the block's bytes."""
    order: int
    """It grows by each block that is written."""

    def encoded(self, slot: int) -> bytes:
        """The header with its own sum, which is wrong in any other slot."""
        content = _HEADER.pack(*self, 0)[:-8]
        return content + xxhash.xxh3_64_intdigest(content, slot).to_bytes(8, "little")


class SlabLocked(SetupError):
    """Another process writes to the folder."""


class NoSlab(SetupError):
    """The folder has no KV blocks, or their format is not known."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of reading blocks, in blocks."""

    good: int = 0
    corrupt: int = 0
    changed: int = 0
    """Those that were written meanwhile."""


class Slab:
    """An open folder. One thread may write while another one reads. All methods raise OSError."""

    def __init__(self, blocks: int, headers: int, lock: int | None, block_bytes: int, slots: int) -> None:
        """Takes over the open files. `lock` is None if it is only read."""
        self._blocks = blocks
        self._headers = headers
        self._lock = lock
        self.block_bytes = block_bytes
        self.slots = slots
        self._stride = stride_of(block_bytes)
        self._used: set[int] = set()
        """Slots whose header may not be empty."""

    @classmethod
    def open(cls, folder: Path, size: int, block_bytes: int) -> Self:
        """
        Open or create a folder of at most `size` bytes, to write. Its disk space is allocated: less than
        `size` if the disk has less.

        Keeps the blocks of an earlier process if they have this size. Raises SlabLocked, and PermissionError
        if another user can modify them.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            lock = locked(folder)
            opened.callback(os.close, lock)
            headers = _open(folder / HEADERS, os.O_RDWR | os.O_CREAT)
            opened.callback(os.close, headers)
            blocks = _open(folder / BLOCKS, os.O_RDWR | os.O_CREAT)
            opened.callback(os.close, blocks)
            for file, name in (lock, LOCK), (headers, HEADERS), (blocks, BLOCKS):
                _keep_private(file, folder / name)
            slots = slots_of(min(size, int(DISK_SHARE * _available(blocks))), block_bytes)
            if not slots:
                raise OSError(errno.ENOSPC, "the disk has no room for one block")
            if (known := _description(headers)) != (FORMAT, block_bytes):
                before = _sizes(headers, blocks)
                if any(before) and not _is_ours(headers):
                    raise OSError(errno.EEXIST, "its files are not KV blocks")
                if known is not None and before[1]:
                    other = show_size(known[1])
                    log.warning(
                        "%s is emptied: its KV blocks have another size (%s) or format.", folder, other
                    )
                os.ftruncate(headers, min(before[0], PAGE))  # it has the magic at any time
                os.ftruncate(blocks, 0)
                first = json.dumps({"format": FORMAT, "block_bytes": block_bytes}).encode()
                _write(headers, (MAGIC + first).ljust(PAGE), 0)
                os.fdatasync(headers)
            before = _sizes(headers, blocks)
            try:
                _allocate(headers, PAGE + slots * _HEADER.size)
                _allocate(blocks, slots * stride_of(block_bytes))
            except OSError:
                with contextlib.suppress(OSError):  # what was allocated now is of no use to anybody
                    os.ftruncate(blocks, before[1])
                    os.ftruncate(headers, before[0])
                raise
            slab = cls(blocks, headers, lock, block_bytes, slots)
            slab._used.update(range(slots))
            opened.pop_all()
            return slab

    @classmethod
    def read_only(cls, folder: Path) -> Self:
        """Open a folder, which a process may be writing. Raises NoSlab."""
        headers = _open_ours(folder)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, headers)
            known = _description(headers)
            if known is None or known[0] != FORMAT:
                raise _unknown(folder)
            blocks = _open(folder / BLOCKS, os.O_RDONLY)
            slots = (os.fstat(headers).st_size - PAGE) // _HEADER.size
            slab = cls(blocks, headers, None, known[1], max(0, slots))
            opened.pop_all()
            return slab

    @classmethod
    @contextlib.contextmanager
    def reading(cls, folder: Path) -> Iterator[Self]:
        """As `read_only`, until the end of the block."""
        slab = cls.read_only(folder)
        try:
            yield slab
        finally:
            slab.close()

    def close(self) -> None:
        for file in (self._blocks, self._headers, self._lock):
            if file is not None:
                os.close(file)

    @property
    def bytes(self) -> int:
        """Size of the files of headers and blocks."""
        return sum(_sizes(self._headers, self._blocks))

    def headers(self) -> dict[int, Header]:
        """Read all valid headers, by slot."""
        content = bytearray(self.slots * _HEADER.size)
        _read(self._headers, memoryview(content), PAGE, whole=False)
        raw = memoryview(content)
        sums = np.frombuffer(content, dtype="<u8").reshape(self.slots, -1)[:, -1]
        found: dict[int, Header] = {}
        for slot in np.flatnonzero(sums).tolist():
            at = slot * _HEADER.size
            *fields, own = _HEADER.unpack_from(content, at)
            if own == xxhash.xxh3_64_intdigest(raw[at : at + _HEADER.size - 8], slot):
                found[slot] = Header(*fields)
        return found

    def write(self, written: Iterable[tuple[int, Header, Bytes]]) -> None:
        """
        Write blocks, then their headers. The array of a block may be used again for the next one.

        If that fails, some may be written.
        """
        files = (self._headers, self._blocks, self._lock)
        if not all(os.fstat(file).st_nlink for file in files if file is not None):
            raise OSError(errno.ENOENT, "its files were deleted")
        headers: dict[int, Header] = {}
        for slot, header, data in written:
            if slot in self._used:
                _write(self._headers, _EMPTY, PAGE + slot * _HEADER.size)
                self._used.discard(slot)
            _write(self._blocks, data.data, slot * self._stride)
            headers[slot] = header
        # Bounds the memory that waits for the disk, and no header is on the disk before its block.
        os.fdatasync(self._blocks)
        for slot, header in headers.items():
            self._used.add(slot)
            _write(self._headers, header.encoded(slot), PAGE + slot * _HEADER.size)

    def read(self, slot: int, out: Bytes) -> None:
        _read(self._blocks, out.data, slot * self._stride)

    def expect(self, slots: Iterable[int]) -> None:
        """The disk can begin to read these slots."""
        for slot in slots:
            os.posix_fadvise(self._blocks, slot * self._stride, self.block_bytes, os.POSIX_FADV_WILLNEED)

    def clear(self) -> None:
        """Forget all blocks. The headers keep their disk space."""
        end = PAGE + self.slots * _HEADER.size
        empty = memoryview(bytes(CLEARED_BYTES))
        for at in range(PAGE, end, CLEARED_BYTES):
            _write(self._headers, empty[: end - at], at)
        self._used.clear()

    def verify(self) -> Checked:
        """Read all blocks, and compare their sums."""
        data: Bytes = np.empty(self.block_bytes, dtype=np.uint8)
        good, wrong = 0, []
        for slot, header in self.headers().items():
            with contextlib.suppress(OSError):
                self.read(slot, data)
                if sum_of(data) == header.sum:
                    good += 1
                    continue
            wrong.append((slot, header))
        now = self.headers() if wrong else {}
        corrupt = sum(now.get(slot) == header for slot, header in wrong)
        return Checked(good, corrupt, len(wrong) - corrupt)


def sum_of(data: Bytes) -> int:
    """xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def slots_of(size: int, block_bytes: int) -> int:
    """Return the number of blocks for which a folder of `size` bytes has room."""
    return max(0, (size - PAGE) // (stride_of(block_bytes) + _HEADER.size))


def stride_of(block_bytes: int) -> int:
    return -(-block_bytes // PAGE) * PAGE


def locked(folder: Path, sleep: Callable[[float], None] = time.sleep) -> int:
    """Lock a folder for this process, until the returned file is closed. Raises SlabLocked and OSError."""
    file = _open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises at once if a process writes
            fcntl.flock(file, fcntl.LOCK_UN)
            sleep(LOCK_WAIT_S)
        else:
            raise BlockingIOError
        before = os.pread(file, 32, 0).strip(b"\0\n ")
        if before and not before.isdigit():
            raise OSError(errno.EEXIST, "its files are not KV blocks")
        _write(file, b"%-15d\n" % os.getpid(), 0)  # in place: on a full disk no file may grow
    except BlockingIOError:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise SlabLocked(
            f"{folder} is in use by another process (pid {holder}). Give each worker a folder of its own, or "
            "stop that process."
        ) from None
    except BaseException:
        os.close(file)
        raise
    return file


def in_use(folder: Path) -> bool:
    """Return whether a process writes to the folder. Raises OSError."""
    try:
        file = _open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def delete(folder: Path) -> int:
    """Delete all blocks. Returns the size of the files. Raises SlabLocked, NoSlab and OSError."""
    os.close(_open_ours(folder))  # nobody else's folder gets a lock
    lock = locked(folder)
    try:
        os.close(_open_ours(folder))
        size = 0
        for name in (
            WEIGHTS,
            f"{WEIGHTS}.part",
            BLOCKS,
            HEADERS,
        ):  # the headers last: they say whose blocks those are
            path = folder / name
            with contextlib.suppress(FileNotFoundError):
                size += path.lstat().st_size
                path.unlink()
    finally:
        os.close(lock)
    return size


def _open(path: Path, flags: int) -> int:
    """Open a regular file."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _open_ours(folder: Path) -> int:
    """Open the headers to read. Raises NoSlab if there are none, or they are somebody else's."""
    try:
        headers = _open(folder / HEADERS, os.O_RDONLY)
    except FileNotFoundError as error:
        raise NoSlab(f"{folder} has no KV blocks of a worker: {error.filename} does not exist.") from error
    if not _is_ours(headers):
        os.close(headers)
        raise _unknown(folder)
    return headers


def _unknown(folder: Path) -> NoSlab:
    return NoSlab(f"{folder / HEADERS} has a format that this version of Baton does not know.")


def _keep_private(file: int, path: Path) -> None:
    """Raise PermissionError if another user could modify an open file, or close it to those who read."""
    status = os.fstat(file)
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"another user can modify {path}, and so the answers")
    if status.st_mode & 0o077:
        os.fchmod(file, 0o600)


def _sizes(*files: int) -> list[int]:
    return [os.fstat(file).st_size for file in files]


def _is_ours(headers: int) -> bool:
    return os.pread(headers, len(MAGIC), 0) == MAGIC


def _description(headers: int) -> tuple[int, int] | None:
    """Return format and bytes of a block."""
    if not _is_ours(headers):
        return None
    try:
        found: Any = json.loads(os.pread(headers, PAGE - len(MAGIC), len(MAGIC)))
        return int(found["format"]), int(found["block_bytes"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, at)
        rest, at = rest[done:], at + done


def _read(file: int, out: memoryview, at: int, whole: bool = True) -> None:
    """`whole`: raises OSError if the file ends before."""
    while out:
        done = os.preadv(file, [out], at)
        if not done:
            if whole:
                raise OSError(errno.EIO, "the file is too short")
            return
        out, at = out[done:], at + done


def _available(file: int) -> int:
    """Return the bytes that a file can have on its disk."""
    system = os.fstatvfs(file)
    return system.f_bavail * system.f_frsize + os.fstat(file).st_blocks * 512


def _allocate(file: int, size: int) -> None:
    """Give a file this size, and its disk space where the file system can. Raises OSError."""
    os.ftruncate(file, size)
    libc = ctypes.CDLL(None, use_errno=True)  # os.posix_fallocate writes all pages where the system cannot
    if size and libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
