"""
Where a gateway sends a request, and the headers and body with which the chosen worker serves it.

The headers are those that the router itself would send: the prefill worker and its ticket, the cache salt,
the key of the workers. A client's own `x-baton-*` headers are removed, or it could name a prefill worker of
its choice.
"""

from __future__ import annotations

import ipaddress
import socket
from asyncio import get_running_loop

from baton_api import headers, tickets
from baton_api.engines import EngineKind
from baton_api.errors import NotReady
from baton_api.keys import API_KEY, AUTHORIZATION
from baton_api.request_classes import CLASSES
from baton_http.replies import REQUEST_ID
from baton_http.upstream import Headers
from baton_router.engines.heads import PREFILL, SALT, TENANT, TICKET, WorkerCredentials
from baton_router.gateway.messages import DESTINATION
from baton_router.proxy import responses
from baton_router.requests.inference_request import CLASS, InferenceRequest
from baton_router.requests.picker import Grant

_OURS = "x-baton-"

_READ_BY_ROUTER = "accept-encoding"
"""Removed, because the router reads the end of a response, which must not be compressed."""


async def destination_of(worker: str) -> str:
    """
    The endpoint of a worker as `IP:PORT`, from its `host:port`. A host name is resolved.

    Raises NotReady if the name has no address.
    """
    host, _, port = worker.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        pass
    else:
        return worker
    try:
        addresses = await get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotReady(
            f"Cannot resolve the worker {worker}: {error.strerror}. A gateway needs its IP address.",
            public="No worker that serves this model is ready.",
        ) from error
    address = str(addresses[0][4][0])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def worker_headers(
    grant: Grant,
    request: InferenceRequest,
    request_id: bytes,
    destination: str,
    credentials: WorkerCredentials,
    now: float,
) -> Headers:
    """The headers to set on the request. `now` is Unix time."""
    fields = [(DESTINATION.encode(), destination.encode()), (REQUEST_ID, request_id), *credentials.headers]
    if grant.engine is not EngineKind.BATON:
        return fields
    if grant.control:
        fields.append((PREFILL, grant.control.encode()))
        if credentials.secret:
            ticket = tickets.issue(credentials.secret, request_id.decode(), grant.control, now)
            fields.append((TICKET, ticket.encode()))
    if request.tenant.turn:
        fields.append((TENANT, request.tenant.turn.encode()))
    if request.tenant.salt:
        fields.append((SALT, request.tenant.salt.encode()))
    if CLASSES[request.priority_class].background:
        fields.append((CLASS, headers.BATCH_CLASS.encode()))
    if request.target.partition(b"?")[0] == responses.PATH.encode():
        fields.append((responses.STATE, b"0"))  # the worker keeps no responses: another one may get the next
    return fields


def removed_headers(given: Headers, set_fields: Headers, credentials: WorkerCredentials) -> list[str]:
    """Names of the client's headers that the worker does not get."""
    kept = {name for name, _ in set_fields}
    names = {name.decode("latin-1") for name, _ in given if name not in kept}
    removed = {name for name in names if name.startswith(_OURS) or name == _READ_BY_ROUTER}
    if not credentials.passes_keys and AUTHORIZATION not in kept:
        removed.add(AUTHORIZATION.decode())
    if not credentials.passes_keys:
        removed.add(API_KEY.decode())
    return sorted(removed)
