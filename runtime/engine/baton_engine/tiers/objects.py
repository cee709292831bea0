"""
KV blocks as objects: in object storage, or in the files of a volume that several workers mount.

An object has 64 blocks that follow one another in a chain, from a multiple of 64 on. Its key is the namespace
of the model and the name of its last block, which is a hash of all tokens up to there. So workers of one
namespace find each other's objects by the names of their prompts, without an index, and write each of them
once. Objects are put as a whole and never changed.

An object begins with a header, which has a sum of itself and one of each block. All integers are
little-endian.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash

from baton_api.errors import SetupError
from baton_engine.machine import trusted
from baton_engine.model import buckets
from baton_engine.tiers.slab import Bytes, Checked, sum_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BLOCKS = 64
"""Of an object."""

FORMAT = 1
MAGIC = b"KV blocks Baton\n"

SCHEMES = ("s3", "gs", "az", "file")

LEFT_BEHIND_S = 3600.0
"""Age from which files of writes that did not end are deleted from a volume: none takes as long."""

DELETED_TO = 0.9
"""Fraction of the size to which a store is brought that has more."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})\.kv")
_LEFT_BEHIND = re.compile(r"[0-9a-f]{32}\.kv#\d+")
_HEADER = struct.Struct("<16sIIQ16s16sQ")
_BLOCK = struct.Struct("<16sQ")
_SUM = struct.Struct("<Q")
_ALIGN = 512


class Damaged(Exception):
    """An object is not what its key says."""


class Group(NamedTuple):
    """What an object has: blocks that follow one another."""

    number: int
    """Of the first block in its chain."""
    parent: bytes
    """Of the first block."""
    names: tuple[bytes, ...]
    sums: tuple[int, ...]
    """xxh3-64 of each block's bytes, as they were in the pool."""

    @property
    def key(self) -> bytes:
        return self.names[-1]


@dataclass(frozen=True, slots=True)
class Found:
    """An object that exists, and whose header is right."""

    group: Group
    version: str | None
    """None: the storage has none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a list."""

    key: str
    size: int
    written_at: float
    """Unix time, of the storage's clock."""

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]


def header_bytes(blocks: int) -> int:
    """Length of the header of an object with so many blocks."""
    return -(-(_HEADER.size + blocks * _BLOCK.size + _SUM.size) // _ALIGN) * _ALIGN


def encoded(namespace: bytes, group: Group, block_bytes: int) -> bytes:
    """Return the header of an object."""
    head = _HEADER.pack(MAGIC, FORMAT, len(group.names), block_bytes, namespace, group.parent, group.number)
    blocks = b"".join(map(_BLOCK.pack, group.names, group.sums))
    content = head + blocks
    return (content + _SUM.pack(xxhash.xxh3_64_intdigest(content))).ljust(
        header_bytes(len(group.names)), b"\0"
    )


def decoded(raw: bytes) -> tuple[bytes, Group, int]:
    """Return namespace, blocks, and the bytes of a block. `raw` may go on. Raises Damaged."""
    if len(raw) < _HEADER.size:
        raise Damaged("it ends in its header")
    magic, version, blocks, block_bytes, namespace, parent, number = _HEADER.unpack_from(raw)
    if magic != MAGIC or version != FORMAT:
        raise Damaged(f"it is not of format {FORMAT}")
    end = _HEADER.size + blocks * _BLOCK.size
    if not blocks or len(raw) < end + _SUM.size:
        raise Damaged("it ends in its header")
    if _SUM.unpack_from(raw, end)[0] != xxhash.xxh3_64_intdigest(raw[:end]):
        raise Damaged("the sum of its header is wrong")
    names, sums = zip(*_BLOCK.iter_unpack(raw[_HEADER.size : end]), strict=True)
    return namespace, Group(number, parent, names, sums), block_bytes


def outdated(entries: Iterable[Entry], size: int, expiry_s: float, now: float) -> list[Entry]:
    """
    Return the objects to be deleted: those written more than `expiry_s` ago (0: none is too old), and if the
    others have more than `size` bytes, the first written until they have `DELETED_TO` of it.

    The order is the same for all workers: several that delete at once delete the same objects.
    """
    gone: list[Entry] = []
    left: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.written_at, entry.key)):
        (gone if expiry_s and entry.written_at < now - expiry_s else left).append(entry)
    total = sum(entry.size for entry in left)
    if total > size:
        for entry in left:
            if total <= DELETED_TO * size:
                break
            gone.append(entry)
            total -= entry.size
    return gone


def opened(url: str) -> ObjectStore | Path:
    """
    Return the store of a URL, or its folder, which is opened with the first request. Raises SetupError.

    Credentials come from the environment or the machine's role, as for models.
    """
    try:
        scheme, place, path, *_ = urlsplit(url)
    except ValueError:
        scheme = place = path = ""
    folder = os.path.normpath("/" + unquote(path).lstrip("/"))
    is_folder = scheme == "file" and not place and folder != "/" and "\0" not in folder
    is_bucket = scheme in SCHEMES and scheme != "file" and place != "" and "@" not in place
    if "?" in url or "#" in url or not (is_folder or is_bucket):
        shown = "" if re.search("[@?#]", url) else f" {url!r}"  # else it may have a password
        raise SetupError(
            f"Invalid KV store{shown}. Expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or "
            "file:///FOLDER, without user, password, query or fragment."
        )
    if is_bucket:
        return buckets.opened(url, read_timeout="20s", timeout="120s", retries=2)
    return Path(folder)


def _opened_folder(folder: Path) -> ObjectStore:
    """Raises OSError."""
    from obstore.store import LocalStore

    if not folder.is_dir():
        # Without its parents: if they are missing, the volume is not mounted, and the disk below would fill.
        folder.mkdir(mode=0o700, exist_ok=True)
    _check_owner(folder)
    return LocalStore(folder)


def _check_owner(folder: Path) -> None:
    """Raises PermissionError."""
    if not trusted(folder / "any"):
        raise PermissionError(f"{folder} belongs to another user, who could modify the answers")


class BlockObjects:
    """
    The objects of one store. Any thread. Methods that reach it raise OSError if that fails.

    Each call is one request to the storage, or several for lists.
    """

    def __init__(
        self,
        store: ObjectStore | Path,
        namespace: bytes,
        block_bytes: int,
        blocks: int = BLOCKS,
        url: str = "",
    ) -> None:
        """`store` may be a folder, which may not exist yet, or only later."""
        self._given = store
        self._namespace = namespace
        self.block_bytes = block_bytes
        self.blocks = blocks
        self.bytes = header_bytes(blocks) + blocks * block_bytes
        """Size of an object."""
        self.url = url

    @property
    def _store(self) -> ObjectStore:
        if isinstance(self._given, Path):
            self._given = _opened_folder(self._given)
        return self._given

    def find(self, key: bytes) -> Found | None:
        """Read the header of an object. None: there is none. Raises Damaged."""
        import obstore

        try:
            with _errors():
                options = {"range": (0, header_bytes(self.blocks))}
                reply = obstore.get(self._store, self._path(key), options=options)  # type: ignore[arg-type]
                raw, meta = bytes(reply.bytes()), reply.meta
        except FileNotFoundError:
            return None
        except OSError as error:
            # An empty object has no range, which each storage says in other words.
            if "range" in str(error.__cause__).lower() and self._is_empty(key):
                raise Damaged("it is empty") from None
            raise
        if meta["size"] != self.bytes:
            raise Damaged(f"it has {meta['size']} bytes instead of {self.bytes}")
        namespace, group, block_bytes = decoded(raw)
        if (namespace, group.key, len(group.names), block_bytes) != (
            self._namespace,
            key,
            self.blocks,
            self.block_bytes,
        ):
            raise Damaged("it has other blocks than its key says")
        return Found(group, meta["e_tag"])

    def read(self, found: Found, first: int, count: int) -> Bytes:
        """
        Return the bytes of some blocks, which may be wrong: compare their sums.

        Raises FileNotFoundError if the object was deleted or is another one now.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        start = header_bytes(self.blocks) + first * self.block_bytes
        wanted = count * self.block_bytes
        options = {"range": (start, start + wanted)}
        if found.version is not None:
            options |= {"if_match": found.version}  # type: ignore[dict-item]
        try:
            with _errors():
                reply = obstore.get(self._store, self._path(found.group.key), options=options)  # type: ignore[arg-type]
                data = np.frombuffer(memoryview(reply.bytes()), dtype=np.uint8)
        except PreconditionError as error:
            raise FileNotFoundError("the object is another one now") from error
        if len(data) != wanted:
            raise OSError(f"{len(data)} bytes of an object were read instead of {wanted}")
        return data

    def put(self, group: Group, content: Bytes) -> Found:
        """
        Write an object, unless it exists. `content` has room for its header, and its blocks after it.

        Nobody sees a part of it, and whoever is killed meanwhile leaves none that is seen.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        header = encoded(self._namespace, group, self.block_bytes)
        content[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        path = self._path(group.key)
        with _errors():
            try:
                put = obstore.put(self._store, path, content.data, mode="create")
            except AlreadyExistsError:
                put = None
            except (NotSupportedError, NotImplementedError):  # then the last one stays: they are alike
                put = obstore.put(self._store, path, content.data, use_multipart=False)
        if put is not None:
            return Found(group, put["e_tag"])
        try:
            found = self.find(group.key)
        except Damaged as error:
            raise OSError(f"an object exists already, and {error}") from error
        if found is None:
            raise OSError("an object could not be written because it exists, and does not exist")
        return found

    def list(self) -> list[Entry]:
        """
        Return the objects of all namespaces. It may lack the latest ones, and have some that are gone.

        What others have beside the folders of namespaces is not looked at.
        """
        import obstore

        if (folder := _folder_of(self._store)) is not None:
            _check_owner(folder)  # another volume may be mounted by now
        entries = []
        with _errors():
            for namespace in _namespaces(self._store):
                for page in obstore.list(self._store, namespace):
                    for item in page:
                        if _KEY.fullmatch(item["path"]):
                            at = item["last_modified"].timestamp()
                            entries.append(Entry(item["path"], item["size"], at))
        return entries

    def delete(self, entries: Iterable[Entry]) -> None:
        """Delete these objects, or those of them that are still there."""
        for entry in entries:
            self._delete(entry.key)

    def remove(self, key: bytes) -> None:
        self._delete(self._path(key))

    def clear(self) -> None:
        """Delete the objects of this namespace."""
        mine = self._namespace.hex()
        self.delete(entry for entry in self.list() if entry.namespace == mine)

    def keys(self, entries: Iterable[Entry]) -> set[bytes]:
        """Return the keys of those that have this namespace."""
        mine = self._namespace.hex()
        return {bytes.fromhex(entry.key[33:65]) for entry in entries if entry.namespace == mine}

    def tidy(self, now: float) -> None:
        """Delete files of writes that did not end, if the store is a folder. `now`: Unix time."""
        for path in left_behind(self._store, now):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def check(self, entry: Entry) -> Checked:
        """Read an object of any namespace and compare its sums."""
        import obstore

        try:
            with _errors():
                raw = bytes(obstore.get(self._store, entry.key).bytes())
        except FileNotFoundError:
            return Checked(changed=1)
        try:
            namespace, group, block_bytes = decoded(raw)
        except Damaged:
            return Checked(corrupt=1)
        start, count = header_bytes(len(group.names)), len(group.names)
        whole = len(raw) == start + count * block_bytes
        if entry.key != _path(namespace, group.key) or not whole:
            return Checked(corrupt=count)
        data = np.frombuffer(raw, dtype=np.uint8)[start:].reshape(count, block_bytes)
        good = sum(sum_of(row) == value for row, value in zip(data, group.sums, strict=True))
        return Checked(good, count - good)

    def _is_empty(self, key: bytes) -> bool:
        """False: it is not, or the storage does not say."""
        import obstore

        with contextlib.suppress(OSError), _errors():
            return not obstore.head(self._store, self._path(key))["size"]
        return False

    def _delete(self, path: str) -> None:
        import obstore

        with _errors(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    def _path(self, key: bytes) -> str:
        return _path(self._namespace, key)


def left_behind(store: ObjectStore, now: float) -> Iterator[Path]:
    """Yield the files in a folder that writes left behind, which are in no list."""
    if (folder := _folder_of(store)) is None:
        return
    for namespace in _namespaces(store):
        for path in (folder / namespace).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _LEFT_BEHIND.fullmatch(path.name) and path.lstat().st_mtime < now - LEFT_BEHIND_S:
                    yield path


def _folder_of(store: ObjectStore) -> Path | None:
    from obstore.store import LocalStore

    return store.prefix if isinstance(store, LocalStore) else None


def _namespaces(store: ObjectStore) -> list[str]:
    """Return the names of the namespaces. Links to folders are not followed: they lead out of the store."""
    import obstore

    if (folder := _folder_of(store)) is None:
        names = obstore.list_with_delimiter(store)["common_prefixes"]
    else:
        with os.scandir(folder) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    return [name for name in names if _NAMESPACE.fullmatch(name)]


def _path(namespace: bytes, key: bytes) -> str:
    return f"{namespace.hex()}/{key.hex()}.kv"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise errors of the storage as OSError, but for those that their caller knows."""
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotSupportedError,
        PreconditionError,
    )

    try:
        yield
    except (AlreadyExistsError, NotSupportedError, PreconditionError):
        raise
    except (BaseError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:500].rstrip(".")
        raise OSError(reason) from error
