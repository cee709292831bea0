"""
Memory that clients use, by tenant: bodies, and responses that nobody reads.

A body counts from its arrival until it is consumed or its request ends; one of an announced length counts as
a whole, so that it is refused at its head and not in its middle.
"""

from __future__ import annotations

from baton_api.capacity import SharedCapacity
from baton_api.errors import Overloaded


class BodyMemory:
    """What the body of one request uses."""

    __slots__ = ("_expected", "_missing", "_shared", "tenant", "used")

    def __init__(self, shared: SharedCapacity) -> None:
        self._shared = shared
        self.tenant = ""
        """Whose share it uses."""
        self.used = 0
        """Bytes."""
        self._expected = 0
        """Bytes of `used` that have not arrived yet."""
        self._missing = 0
        """`_expected` when `lapse` was last called."""

    def use(self, size: int) -> None:
        """Use `size` bytes instead of `used`. Raises Overloaded beyond the tenant's share."""
        more = size - self.used
        if not more:
            return
        if more > 0 and not self._shared.fits(self.tenant, more):
            used, allowed = self._shared.used_by(self.tenant), self._shared.allowed(self.tenant)
            raise Overloaded(used, allowed, what="bytes")
        self._shared.add(self.tenant, more)
        self.used = size

    def free(self, size: int) -> None:
        """`size` bytes have been consumed."""
        self.use(max(0, self.used - size))

    def expect(self, length: int) -> None:
        """The body will have `length` bytes in all. Raises Overloaded beyond the tenant's share."""
        arrived = self.used - self._expected
        expected = max(0, length - arrived)
        self.use(arrived + expected)
        self._expected = expected

    def arrived(self, size: int) -> None:
        """`size` more bytes have arrived. Raises Overloaded beyond the tenant's share."""
        expected = min(size, self._expected)
        self._expected -= expected
        self.use(self.used + size - expected)

    def lapse(self) -> None:
        """Reserve nothing for the rest of the body if none of it has arrived since the last call."""
        if self._expected == self._missing:
            self.use(self.used - self._expected)
            self._expected = 0
        self._missing = self._expected

    def belongs_to(self, tenant: str) -> None:
        """Count what it uses, and will use, for this tenant. Raises Overloaded beyond its share."""
        if tenant == self.tenant:
            return
        used = self.used
        self.use(0)
        self.tenant = tenant
        self.use(used)

    def release(self) -> None:
        """The request has ended: its body is not used any more."""
        self._expected = 0
        self.use(0)


class UnreadMemory:
    """What the responses that one client has not read use."""

    __slots__ = ("_shared", "_tenant", "_used")

    def __init__(self, shared: SharedCapacity) -> None:
        self._shared = shared
        self._tenant = ""
        self._used = 0

    def use(self, size: int, tenant: str) -> bool:
        """Use `size` bytes of this tenant's share instead of those before. False: too many, none is used."""
        self._shared.add(self._tenant, -self._used)
        self._tenant = tenant
        fits = self._shared.fits(tenant, size)
        self._used = size if fits else 0
        self._shared.add(tenant, self._used)
        return fits
