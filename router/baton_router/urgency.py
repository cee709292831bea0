"""How urgent a request is, by its headers and its tenant: its class, and when its first token is wanted."""

from __future__ import annotations

import math

from baton_api import headers
from baton_api.errors import Forbidden, InvalidRequest
from baton_router.tenants import CLASSES, Tenant
from baton_router.upstream import Headers

CLASS = headers.CLASS.encode()
OBJECTIVE = headers.OBJECTIVE.encode()


def urgency(given: Headers, tenant: Tenant) -> tuple[str, float | None]:
    """
    The class, and the seconds within which the first token is wanted, or None if that was not said.

    Raises InvalidRequest for what is none, and Forbidden for a class that is not the tenant's to use.
    """
    kind, objective_s = tenant.default_class, None
    for name, value in given:
        if name == CLASS:
            kind = value.decode("latin-1").strip().lower()
            _check(kind, tenant)
        elif name == OBJECTIVE:
            objective_s = _seconds(value)
    return kind, objective_s


def _check(kind: str, tenant: Tenant) -> None:
    if kind not in CLASSES:
        raise InvalidRequest(f"{headers.CLASS} must be one of {', '.join(CLASSES)}.", param=headers.CLASS)
    if kind not in tenant.classes:
        raise Forbidden(f"send requests of the class {kind}", tenant.name)


def _seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(
            f"{headers.OBJECTIVE} must be a number of milliseconds above 0.", param=headers.OBJECTIVE
        )
    return milliseconds / 1000
