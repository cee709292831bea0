"""
Capacity that tenants share: one may fill most of what the others leave, and never all of it.

So a tenant that arrives while another one floods the server still finds some.
"""

from __future__ import annotations

from baton_api.limits import TENANT_SHARE


class SharedCapacity:
    """Units of one kind, such as bytes, and how many each tenant uses."""

    __slots__ = ("_by_tenant", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """Units that all tenants have."""
        self._by_tenant: dict[str, int] = {}

    def used_by(self, tenant: str) -> int:
        return self._by_tenant.get(tenant, 0)

    def allowed(self, tenant: str) -> int:
        """Units that the tenant may have now, including those that it has."""
        return int(TENANT_SHARE * (self.limit - self.used + self.used_by(tenant)))

    def fits(self, tenant: str, units: int) -> bool:
        """Whether the tenant may have `units` more."""
        return self.used_by(tenant) + units <= self.allowed(tenant)

    def add(self, tenant: str, units: int) -> None:
        """Give `units` more to the tenant, without a check; take them back if negative."""
        self.used += units
        if used := self.used_by(tenant) + units:
            self._by_tenant[tenant] = used
        else:
            self._by_tenant.pop(tenant, None)
