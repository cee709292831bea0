"""
The client of the Kubernetes API: list, watch, apply, create, delete, and write status.

It uses the transport of the official client with its own paths and bodies. The operator works with
manifests, so generated classes for each kind would add nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import ClientError, ClientResponse, ClientTimeout
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

from baton_api.errors import SetupError
from baton_operator.cluster.api_resources import path, path_of
from baton_operator.manifests.objects import Key, Manifest, key

FIELD_MANAGER = "baton"

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

TIMEOUT_S = 30.0
PAGE = 500
"""Objects of one answer to a list."""

FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 403, 404, 409, 410

T = TypeVar("T")

Guard = Callable[[], None]


class WriteListener(Protocol):
    """Takes what the API server answered to writes, so that the next read sees them."""

    def wrote(self, manifest: Manifest) -> None: ...

    def deleted(self, key: Key, namespace: str, uid: str) -> None: ...


class NoWriteListener:
    """For whoever reads from the API server itself."""

    def wrote(self, manifest: Manifest) -> None: ...

    def deleted(self, key: Key, namespace: str, uid: str) -> None: ...


class ApiServer:
    """One API server, under one account. `guard` is asked before each write, and raises if it may not be."""

    def __init__(
        self,
        connect: ApiClient,
        guard: Guard,
        answered: Callable[[str, int], None],
        writes: WriteListener | None = None,
    ) -> None:
        self._client = connect
        self._guard = guard
        self._answered = answered
        """Told of each answer: method and status, 0 if there was none."""
        self._writes = writes or NoWriteListener()

    async def pages(
        self,
        api: str,
        kind: str,
        namespace: str = "",
        selector: str = "",
        field: str = "",
        limit: int = PAGE,
    ) -> AsyncGenerator[tuple[Iterator[Manifest], str]]:
        """
        The same page by page, each with the version of the whole list; items do not say their kind.

        All pages are of one moment. With a `limit` of 0 there is just one page, of all objects. Raises
        ApiException: 410 if the API server has forgotten that moment before the last page.
        """
        query = {"limit": str(limit), **_selecting(selector, field)}
        while True:
            content = await self._answer("GET", path(api, kind, namespace), query=query)
            page = _decoded(content, _Page)
            # One at a time: parsed, a page takes ten times the memory of its text.
            items = (_decoded(item, Manifest) for item in page.items or ())
            yield items, page.metadata["resourceVersion"]
            more = page.metadata.get("continue")
            if not more:
                return
            query["continue"] = more

    async def watch(
        self,
        api: str,
        kind: str,
        namespace: str,
        selector: str,
        version: str,
        *,
        limit_s: float,
        silence_s: float,
    ) -> AsyncGenerator[tuple[str, Manifest]]:
        """
        Events after that version: their type, and the object. The first one has neither: the watch has
        begun.

        Ends when the API server ends it, after `limit_s` at the latest, or when it brings nothing for
        `silence_s`. Raises ApiException: 410 if the version is too old, 0 if the connection breaks.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{limit_s:.0f}",
            **_selecting(selector),
        }
        within = ClientTimeout(total=None, connect=TIMEOUT_S, sock_read=silence_s)
        try:
            response = await self._send("GET", path(api, kind, namespace), query=query, within=within)
            try:
                self._answered("GET", response.status)
                if response.status != 200:
                    content = await response.read()
                    raise ApiException(status=response.status, reason=_reason(content) or response.reason)
                yield "", {}
                async for line in _lines(response):
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiException(status=status.get("code", 500), reason=status.get("message", ""))
                    yield event["type"], event["object"]
            except TimeoutError:
                return  # it was silent
            finally:
                response.close()
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise ApiException(status=0, reason=f"{type(error).__name__}: {error}") from error

    async def list(
        self, api: str, kind: str, namespace: str = "", selector: str = "", field: str = ""
    ) -> list[Manifest]:
        """All of a kind, in a namespace or in all, with these labels and this field. Raises ApiException."""
        found: list[Manifest] = []
        async for items, _ in self.pages(api, kind, namespace, selector, field):
            # What a list holds does not say its kind again.
            found += [{"apiVersion": api, "kind": kind, **item} for item in items]
        return found

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
        answer = await self._request("PATCH", path_of(manifest), query=query, body=manifest, kind=APPLY)
        self._writes.wrote(answer)
        return answer

    async def create(self, manifest: Manifest) -> bool:
        """Make an object; False if there is one already. Raises ApiException."""
        where = path(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace", ""))
        try:
            answer = await self._request("POST", where, query={"fieldManager": FIELD_MANAGER}, body=manifest)
        except ApiException as error:
            if error.status == CONFLICT:
                return False
            raise
        self._writes.wrote(answer)
        return True

    async def replace(self, manifest: Manifest) -> Manifest:
        """Write an object over the version it was made from. Raises ApiException, 409 if there is a newer."""
        return await self._request("PUT", path_of(manifest), body=manifest)

    async def delete(self, manifest: Manifest) -> None:
        """
        Delete just this object, and what belongs to it; one that is gone is fine.

        Raises ApiException, 409 if another one has its name by now.
        """
        metadata = manifest["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        try:
            answer = await self._request("DELETE", path_of(manifest), body=body)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise
            answer = {}
        # Some kinds answer with a Status, others with the object that was. Finalizers may hold it back.
        if answer.get("metadata", {}).get("finalizers"):
            self._writes.wrote(answer)
        else:
            self._writes.deleted(key(manifest), metadata.get("namespace", ""), metadata["uid"])

    async def write_status(self, manifest: Manifest, status: Mapping[str, Any]) -> None:
        """
        Merge into the status of the object. A field that is gone has to be written as None.

        An object that is gone, or was made anew, is fine. Raises ApiException.
        """
        metadata = {"uid": manifest["metadata"]["uid"]}
        body = {"metadata": metadata, "status": status}
        try:
            answer = await self._request("PATCH", f"{path_of(manifest)}/status", body=body, kind=MERGE)
        except ApiException as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise
        else:
            self._writes.wrote(answer)

    async def merge(self, api: str, kind: str, namespace: str, name: str, body: Mapping[str, Any]) -> bool:
        """Change some fields of an object; False if there is none. Raises ApiException."""
        try:
            answer = await self._request("PATCH", path(api, kind, namespace, name), body=body, kind=MERGE)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return False
            raise
        self._writes.wrote(answer)
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
        return _decoded(await self._answer(method, where, query=query, body=body, kind=kind), Manifest)

    async def _answer(
        self,
        method: str,
        where: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
    ) -> bytes:
        if method != "GET":
            self._guard()
        try:
            response = await self._send(method, where, query=query, body=body, kind=kind)
            content: bytes = await response.read()
        except (ClientError, OSError, TimeoutError) as error:
            self._answered(method, 0)
            raise ApiException(status=0, reason=f"{type(error).__name__}: {error}") from error
        self._answered(method, response.status)
        if not 200 <= response.status < 300:
            raise ApiException(status=response.status, reason=_reason(content) or response.reason)
        return content

    async def _send(
        self,
        method: str,
        where: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        within: float | ClientTimeout = TIMEOUT_S,
    ) -> ClientResponse:
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
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=within
        )
        response: ClientResponse = answer.response
        return response


class _Page(msgspec.Struct):
    """One page of a list, whose items are not parsed yet."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None = None


def _decoded(content: bytes | msgspec.Raw, type: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=type)
    except msgspec.DecodeError as error:  # a proxy's page
        raise ApiException(status=0, reason=f"The answer is not what was asked for: {error}") from error


async def _lines(response: ClientResponse) -> AsyncIterator[bytes]:
    """Each as soon as it is there; the stream's own reader refuses long ones."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _selecting(selector: str, field: str = "") -> dict[str, str]:
    query = {"labelSelector": selector, "fieldSelector": field}
    return {name: value for name, value in query.items() if value}


def _reason(content: bytes) -> str:
    """The API server's own words, if they are there."""
    try:
        message = json.loads(content).get("message", "")
    except (ValueError, AttributeError):
        return ""
    return str(message)[:1000]


async def configuration(kubeconfig: str) -> Configuration:
    """Read anew each time: tokens are exchanged while the operator runs. Raises SetupError."""
    made = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=made)
        else:
            config.load_incluster_config(client_configuration=made)
    except (config.ConfigException, OSError) as error:
        raise SetupError(
            f"No account for the Kubernetes API ({error}): run in a pod with a ServiceAccount, "
            "or name a kubeconfig file with --kubeconfig."
        ) from error
    return made


async def connect(kubeconfig: str) -> ApiClient:
    """For all of the operator's requests. Raises SetupError."""
    made = await configuration(kubeconfig)
    made.connection_pool_maxsize = 0  # no limit: each watch holds a connection
    return ApiClient(configuration=made)
