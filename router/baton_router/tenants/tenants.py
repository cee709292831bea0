"""
Tenants: their models, classes, limits and cache salts.

A file lists them with the digests of their keys, so that a mounted Secret, or even a ConfigMap, can hold it;
it is YAML, and JSON is YAML too. It is reloaded within a second after a change. An invalid file changes
nothing: the tenants stay as they were, the log says why, and a metric reports it.

The salt separates tenants' prompts in every prefix cache. It is derived from the tenant's name and the secret
that routers share, so that all of them compute the same one. Without the secret, the salt of another tenant
cannot be computed (ADR 17).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml
from xxhash import xxh3_64_intdigest as digest

from baton_api.errors import SetupError
from baton_api.keys import NAME, KeyDigest, Pepper
from baton_api.request_classes import CLASSES, DEFAULT_CLASS
from baton_api.watched import WatchedFile

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    ClassName = str
else:
    ClassName = Literal[tuple(CLASSES)]

OPEN_CLASSES: frozenset[str] = frozenset(name for name, row in CLASSES.items() if row.open)
"""Classes of tenants without a list of classes: others must be allowed explicitly."""

FILE_LIMIT = 4 * 1024 * 1024
"""Bytes of a file of tenants."""

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of a tenant, over all of its keys; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    streams: int | None = None
    """Requests at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One of the users who share a cluster, with its rights."""

    name: str = ""
    """Empty for requests without a name: all of them are one tenant."""
    kind: Literal["tenant", "key"] = "tenant"
    """Where the name comes from: a file of tenants or a token, or a file of keys. Equal names of different
    kinds are different tenants."""
    salt: str = ""
    """Of its KV blocks; tenants without one share a cache."""
    models: frozenset[str] | None = None
    """Names of the models that it may use; None: all."""
    classes: frozenset[str] = frozenset(CLASSES)
    default_class: str = DEFAULT_CLASS
    """Class of requests without the header."""
    limits: TenantLimits = TenantLimits()
    admin: bool = True
    """Whether it may see and change data of other tenants."""

    @property
    def id(self) -> str:
        """The unique name, which keys owners, quotas and queues; empty without a name."""
        return f"{self.kind}:{self.name}" if self.name else ""

    @property
    def turn(self) -> str:
        """Its name for workers, which need not know it; empty without a name."""
        return f"{digest(self.id.encode(errors='replace')):016x}" if self.name else ""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def narrowed(self, models: Iterable[str] | None, classes: Iterable[str] | None) -> Tenant:
        """The tenant with the rights of one of its members: never more than its own."""
        own = self
        if models is not None:
            allowed = frozenset(models)
            own = replace(own, models=allowed if own.models is None else own.models & allowed)
        if classes is not None:
            left = own.classes & frozenset(classes)
            own = replace(own, classes=left, default_class=_default_class(left, own.default_class))
        return own


DEFAULT_TENANT = Tenant()
"""The tenant of all requests where no tenants are configured."""


class TenantEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One tenant as the file has it."""

    name: str
    keys: list[str] = []
    models: list[str] | None = None
    classes: list[ClassName] | None = None
    default_class: ClassName | None = None
    requests_per_minute: _AtLeastOne | None = None
    tokens_per_minute: _AtLeastOne | None = None
    streams: _AtLeastOne | None = None
    cache: str = ""
    admin: bool = False


class TenantsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    tenants: list[TenantEntry]


class Tenants:
    """The tenants of a file, reloaded after changes."""

    def __init__(self, file: str, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SetupError if `file` is not a file of tenants."""
        self._pepper = Pepper()
        self._secret = secret
        self._file = WatchedFile(file, clock)
        self.problem = ""
        """Why the current file is invalid; empty if it is not."""
        self.reads = 0
        """Number of reloads: a cached tenant is outdated when this has changed."""
        self._take(read_tenants(self._file.path, secret))

    def __len__(self) -> int:
        return len(self._by_name)

    def by_key(self, sha256: bytes) -> Tenant | None:
        """The tenant with a key of this digest."""
        self.reload_if_changed()
        return self._by_key.get(self._pepper(sha256))

    def by_name(self, name: str) -> Tenant | None:
        self.reload_if_changed()
        return self._by_name.get(name)

    def reload_if_changed(self) -> None:
        """Read the file again if it has changed."""
        if not self._file.changed():
            return
        path = self._file.path
        try:
            self._take(read_tenants(path, self._secret))
        except SetupError as error:
            self.problem = error.message
            log.error("%s The tenants stay as they were.", error.message)
        else:
            log.info("%s was read again: %d tenants", path, len(self))

    def _take(self, read: dict[Tenant, tuple[KeyDigest, ...]]) -> None:
        self._by_name = {tenant.name: tenant for tenant in read}
        self._by_key = {self._pepper(key.sha256): tenant for tenant, keys in read.items() for key in keys}
        self.problem = ""
        self.reads += 1


def cache_salt(secret: bytes, name: str, cache: str = "") -> str:
    """The salt of the tenant `name`, or of all tenants that share the cache of that name."""
    kind, owner = (b"shared", cache) if cache else (b"own", name)
    text = b"baton-cache-salt|%b|%b" % (kind, owner.encode())
    return hmac.new(secret, text, hashlib.sha256).hexdigest()[:32]


def read_tenants(path: Path, secret: bytes) -> dict[Tenant, tuple[KeyDigest, ...]]:
    """The tenants of a file with their keys. Raises SetupError, which names the place and repeats no key."""
    try:
        with path.open("rb") as opened:
            text = opened.read(FILE_LIMIT + 1)
    except OSError as error:
        raise SetupError(f"--tenants-file {path} cannot be read: {error.strerror}.") from error
    if len(text) > FILE_LIMIT:
        raise SetupError(f"--tenants-file {path} is over the limit of {FILE_LIMIT} bytes.")
    read: dict[Tenant, tuple[KeyDigest, ...]] = {}
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for number, entry in enumerate(_parsed(path, text).tenants, start=1):
        place = f"--tenants-file {path}, tenant {number}"
        if not NAME.fullmatch(entry.name):
            raise SetupError(f"{place}: a name has at most 64 letters, digits and . _ @ -.")
        place += f" ({entry.name})"
        if entry.name in names:
            raise SetupError(f"{place}: another tenant has this name.")
        names.add(entry.name)
        keys = tuple(_key(place, position, text) for position, text in enumerate(entry.keys, start=1))
        for position, key in enumerate(keys, start=1):
            owner = owners.setdefault(key.sha256, entry.name)
            if owner != entry.name:
                raise SetupError(f"{place}, key {position}: the tenant {owner} has this key too.")
        read[_tenant(place, entry, secret)] = keys
    return read


def _parsed(path: Path, text: bytes) -> TenantsFile:
    try:
        return msgspec.convert(yaml.load(text, _Loader), TenantsFile)  # noqa: S506, it is a safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it is not text"
        raise SetupError(f"--tenants-file {path}{where}: invalid YAML: {problem}.") from error
    except (msgspec.ValidationError, RecursionError) as error:
        raise SetupError(f"--tenants-file {path}: {error}.") from error


def _key(place: str, position: int, text: str) -> KeyDigest:
    if not text.startswith("sha256:"):
        raise SetupError(f"{place}, key {position}: a file of tenants has keys as sha256:<hex> only.")
    try:
        return KeyDigest.of(text)
    except ValueError as error:
        raise SetupError(f"{place}, key {position}: {error}.") from error


def _tenant(place: str, entry: TenantEntry, secret: bytes) -> Tenant:
    classes = OPEN_CLASSES if entry.classes is None else frozenset(entry.classes)
    if not classes:
        raise SetupError(f"{place}: classes is empty, so no request of this tenant could be served.")
    if entry.default_class is not None and entry.default_class not in classes:
        raise SetupError(f"{place}: its default_class {entry.default_class} is none of its classes.")
    limits: dict[str, Any] = {name: getattr(entry, name) for name in TenantLimits.__slots__}
    return Tenant(
        name=entry.name,
        salt=cache_salt(secret, entry.name, entry.cache),
        models=None if entry.models is None else frozenset(entry.models),
        classes=classes,
        default_class=entry.default_class or _default_class(classes, DEFAULT_CLASS),
        limits=TenantLimits(**limits),
        admin=entry.admin,
    )


def _default_class(classes: frozenset[str], wanted: str) -> str:
    """`wanted` if it is allowed, else the least urgent one that is; `wanted` again if none is."""
    return (
        wanted if wanted in classes else next((name for name in reversed(CLASSES) if name in classes), wanted)
    )
