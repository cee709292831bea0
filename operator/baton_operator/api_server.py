"""
The Kubernetes API as the operator needs it: read, apply, make once, delete, and write status.

By the official client's transport, with paths and bodies of our own: the operator deals in manifests, and a
generated class for each kind would only stand between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

from aiohttp import ClientError
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from baton_operator.api_resources import plural
from baton_operator.manifests.objects import Manifest
from baton_operator.observed import Key

FIELD_MANAGER = "baton"

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

TIMEOUT_S = 30.0
PAGE = 500
"""Objects of one answer to a list."""

NOT_FOUND, CONFLICT = 404, 409

Guard = Callable[[], None]


class ApiServer:
    """One API server, under one account. `guard` is asked before each write, and raises if it may not be."""

    def __init__(self, client: ApiClient, guard: Guard, answered: Callable[[str, int], None]) -> None:
        self._client = client
        self._guard = guard
        self._answered = answered
        """Told of each answer: method and status, 0 if there was none."""

    async def list(
        self, api: str, kind: str, namespace: str = "", selector: str = "", field: str = ""
    ) -> list[Manifest]:
        """All of a kind, in a namespace or in all, with these labels and this field. Raises ApiException."""
        found: list[Manifest] = []
        query = {"limit": str(PAGE)}
        query |= {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": field} if field else {}
        while True:
            answer = await self._request("GET", path(api, kind, namespace), query=query)
            # What a list holds does not say its kind again.
            found += [{"apiVersion": api, "kind": kind, **item} for item in answer["items"]]
            more = answer["metadata"].get("continue")
            if not more:
                return found
            query["continue"] = more

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """None if there is no such object. Raises ApiException."""
        try:
            return await self._request("GET", path(api, kind, namespace, name))
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def apply(self, manifest: Manifest, *, ours: bool) -> Manifest:
        """
        Have the object as the manifest says: if it is `ours`, whoever wrote its fields before.

        Another's object of the same name is left alone. Raises ApiException, 409 for such a one.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": str(ours).lower()}
        return await self._request("PATCH", path_of(manifest), query=query, body=manifest, kind=APPLY)

    async def create(self, manifest: Manifest) -> bool:
        """Make an object; False if there is one already. Raises ApiException."""
        where = path(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace", ""))
        try:
            await self._request("POST", where, query={"fieldManager": FIELD_MANAGER}, body=manifest)
        except ApiException as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    async def replace(self, manifest: Manifest) -> Manifest:
        """Write an object over the version it was made from. Raises ApiException, 409 if there is a newer."""
        return await self._request("PUT", path_of(manifest), body=manifest)

    async def delete(self, key: Key, namespace: str) -> None:
        """Delete an object and what belongs to it; one that is gone is fine. Raises ApiException."""
        api, kind, name = key
        try:
            body = {"propagationPolicy": "Background"}
            await self._request("DELETE", path(api, kind, namespace, name), body=body)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise

    async def write_status(self, manifest: Manifest, status: Mapping[str, Any]) -> None:
        """
        Merge into the status of the object. A field that is gone has to be written as None.

        An object that is gone, or was made anew, is fine. Raises ApiException.
        """
        metadata = {"uid": manifest["metadata"]["uid"]}
        body = {"metadata": metadata, "status": status}
        try:
            await self._request("PATCH", f"{path_of(manifest)}/status", body=body, kind=MERGE)
        except ApiException as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    async def merge(self, api: str, kind: str, namespace: str, name: str, body: Mapping[str, Any]) -> bool:
        """Change some fields of an object; False if there is none. Raises ApiException."""
        try:
            await self._request("PATCH", path(api, kind, namespace, name), body=body, kind=MERGE)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def has(self, api: str) -> bool:
        """Whether the cluster serves this group and version. Raises ApiException."""
        try:
            await self._request("GET", f"/apis/{api}")
        except ApiException as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def _request(
        self,
        method: str,
        where: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
    ) -> Manifest:
        if method != "GET":
            self._guard()
        # The transport looks for this very spelling.
        headers = {
            "Accept": "application/json",
            "Content-Type": kind,
            "User-Agent": self._client.user_agent,
        }
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], where, method, body)
        host: str = self._client.configuration.host
        url = host + where + (f"?{urlencode(query)}" if query else "")
        # The transport writes JSON, which is YAML too.
        try:
            response = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=TIMEOUT_S
            )
            content = await response.read()
        except (ClientError, OSError, TimeoutError) as error:
            self._answered(method, 0)
            raise ApiException(status=0, reason=f"{type(error).__name__}: {error}") from error
        self._answered(method, response.status)
        if not 200 <= response.status < 300:
            raise ApiException(status=response.status, reason=_reason(content) or response.reason)
        return cast(Manifest, json.loads(content))


def path(api: str, kind: str, namespace: str = "", name: str = "") -> str:
    """
    Where objects are.

    >>> path("apps/v1", "Deployment", "models", "chat-router")
    '/apis/apps/v1/namespaces/models/deployments/chat-router'
    >>> path("v1", "Pod")
    '/api/v1/pods'
    """
    parts = ["/apis" if "/" in api else "/api", api]
    if namespace:
        parts += ["namespaces", quote(namespace)]
    parts.append(plural(kind))
    if name:
        parts.append(quote(name))
    return "/".join(parts)


def path_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return path(manifest["apiVersion"], manifest["kind"], metadata.get("namespace", ""), metadata["name"])


def _reason(content: bytes) -> str:
    """The API server's own words, if they are there."""
    try:
        message = json.loads(content).get("message", "")
    except (ValueError, AttributeError):
        return ""
    return str(message)[:1000]
