"""
The client of the Kubernetes API: list, watch, apply, create, delete, and write status.

It uses the transport of the official client with its own paths and bodies. The operator works with
manifests, so generated classes for each kind would add nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import kopf
import msgspec
from aiohttp import ClientError, ClientResponse, ClientTimeout
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

from baton_api.errors import SetupError
from baton_operator.cluster.api_resources import path, path_of
from baton_operator.cluster.cache import ObjectCache
from baton_operator.manifests.objects import Manifest, key

FIELD_MANAGER = "baton"

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

TIMEOUT_S = 30.0
PAGE = 500
"""Objects per page of a list."""

FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 403, 404, 409, 410

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """One API server and account."""

    client: ApiClient
    guard: Callable[[], None]
    """Called before each write; raises if the operator may not write."""
    answered: Callable[[str, int], None]
    """Called with method and status of each response; status 0 without a response."""
    cache: ObjectCache | None = None
    """Gets the responses to writes, so that the next read of it includes them."""

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
        Yield the pages of a list, each with the version of the list. Items lack kind and apiVersion.

        All pages are of one version. `limit` 0 means one page with all objects. Raises ApiException, with
        410 if the API server no longer has that version.
        """
        query = {"limit": str(limit), **_selecting(selector, field)}
        while True:
            content = await self._answer("GET", path(api, kind, namespace), query=query)
            page = _decoded(content, _Page)
            # Parsed lazily: a parsed page takes ten times the memory of its text.
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
        Yield type and object of each event after that version. The first item is empty: the watch has
        started.

        Ends when the API server closes it, after `limit_s` at the latest, or after `silence_s` without
        data. Raises ApiException: 410 if the version is too old, 0 if the connection breaks.
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
                self.answered("GET", response.status)
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
                return  # no data for silence_s
            finally:
                response.close()
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise ApiException(status=0, reason=f"{type(error).__name__}: {error}") from error

    async def list(
        self, api: str, kind: str, namespace: str = "", selector: str = "", field: str = ""
    ) -> list[Manifest]:
        """Return the objects of a kind that match the selectors; empty `namespace`: all. Raises
        ApiException.
        """
        objects: list[Manifest] = []
        async for items, _ in self.pages(api, kind, namespace, selector, field):
            # Items of a list lack apiVersion and kind.
            objects += [{"apiVersion": api, "kind": kind, **item} for item in items]
        return objects

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return the object, or None if it does not exist. Raises ApiException."""
        return await self._request("GET", path(api, kind, namespace, name), ignored={NOT_FOUND}) or None

    async def apply(self, manifest: Manifest, *, ours: bool) -> None:
        """Apply the manifest by server-side apply; for an object of `ours`, override other field managers. A
        foreign object with this name stays unchanged. Raises ApiException, 409 for such an object.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": str(ours).lower()}
        await self._write("PATCH", path_of(manifest), query=query, body=manifest, kind=APPLY)

    async def create(self, manifest: Manifest) -> bool:
        """Create an object; return False if it exists already. Raises ApiException."""
        where = path(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace", ""))
        query = {"fieldManager": FIELD_MANAGER}
        return bool(await self._write("POST", where, query=query, body=manifest, ignored={CONFLICT}))

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replace the version that the manifest was read from. Raises ApiException, 409 if there is a newer
        one.
        """
        return await self._request("PUT", path_of(manifest), body=manifest)

    async def delete(self, manifest: Manifest) -> None:
        """Delete exactly this object (by UID) with its dependents. Ignores a missing object. Raises
        ApiException, 409 if another object has the name now.
        """
        metadata = manifest["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        answer = await self._request("DELETE", path_of(manifest), body=body, ignored={NOT_FOUND})
        if self.cache is None:
            return
        # A Status or the deleted object, depending on the kind. Finalizers may delay the deletion.
        if answer.get("metadata", {}).get("finalizers"):
            self.cache.wrote(answer)
        else:
            self.cache.deleted(key(manifest), metadata.get("namespace", ""), metadata["uid"])

    async def write_status(
        self, manifest: Manifest, status: Mapping[str, Any], *, shared: bool = False
    ) -> None:
        """
        Merge into the status of the object. None removes a field. Ignores a missing or recreated object.
        Raises ApiException.

        `shared`: others write to its lists, too, and a merge replaces lists whole. So only the version that
        the manifest was read from is written to; raises ApiException 409 if there is a newer one.
        """
        metadata = manifest["metadata"]
        known = {"uid": metadata["uid"]}
        ignored = {NOT_FOUND, CONFLICT}
        if shared:
            known["resourceVersion"] = metadata["resourceVersion"]
            ignored = {NOT_FOUND}
        where = f"{path_of(manifest)}/status"
        body = {"metadata": known, "status": status}
        await self._write("PATCH", where, body=body, kind=MERGE, ignored=ignored)

    async def merge(self, api: str, kind: str, namespace: str, name: str, body: Mapping[str, Any]) -> bool:
        """Merge `body` into an object; return False if it does not exist. Raises ApiException."""
        where = path(api, kind, namespace, name)
        return bool(await self._write("PATCH", where, body=body, kind=MERGE, ignored={NOT_FOUND}))

    async def has(self, api: str) -> bool:
        """Return whether the cluster serves this group and version. Raises ApiException."""
        return bool(await self._request("GET", f"/apis/{api}", ignored={NOT_FOUND}))

    async def _write(self, method: str, where: str, **options: Any) -> Manifest:
        answer = await self._request(method, where, **options)
        if answer and self.cache is not None:
            self.cache.wrote(answer)
        return answer

    async def _request(
        self, method: str, where: str, *, ignored: Collection[int] = (), **options: Any
    ) -> Manifest:
        """Return the object in the response; an empty one for an `ignored` status."""
        try:
            return _decoded(await self._answer(method, where, **options), Manifest)
        except ApiException as error:
            if error.status in ignored:
                return {}
            raise

    async def _answer(self, method: str, where: str, **options: Any) -> bytes:
        """`options`: of `_send`."""
        if method != "GET":
            self.guard()
        try:
            response = await self._send(method, where, **options)
            content: bytes = await response.read()
        except (ClientError, OSError, TimeoutError) as error:
            self.answered(method, 0)
            raise ApiException(status=0, reason=f"{type(error).__name__}: {error}") from error
        self.answered(method, response.status)
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
        # The transport expects this spelling.
        headers = {
            "Accept": "application/json",
            "Content-Type": kind,
            "User-Agent": self.client.user_agent,
        }
        await self.client.update_params_for_auth(headers, [], ["BearerToken"], where, method, body)
        host: str = self.client.configuration.host
        url = host + where + (f"?{urlencode(query)}" if query else "")
        # The transport serializes to JSON, which is valid YAML.
        answer = await self.client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=within
        )
        response: ClientResponse = answer.response
        return response


class _Page(msgspec.Struct):
    """One page of a list with unparsed items."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None = None


def _decoded(content: bytes | msgspec.Raw, type: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=type)
    except msgspec.DecodeError as error:  # for example an error page of a proxy
        raise ApiException(status=0, reason=f"Unexpected response: {error}") from error


async def _lines(response: ClientResponse) -> AsyncIterator[bytes]:
    """Yield each line as it arrives. The reader of the stream would reject long lines."""
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
    """Return the message of the API server, if the response has one."""
    try:
        message = json.loads(content).get("message", "")
    except (ValueError, AttributeError):
        return ""
    return str(message)[:1000]


async def load_configuration(kubeconfig: str) -> Configuration:
    """Return the configuration from a kubeconfig file, or from the pod. Raises SetupError."""
    configuration = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise SetupError(
            f"Cannot find credentials for the Kubernetes API: {error}. Run in a pod with a ServiceAccount, "
            "or set --kubeconfig."
        ) from error
    return configuration


async def connection_info(client: ApiClient) -> kopf.ConnectionInfo:
    """Return how kopf connects: as the client does, with its present token."""
    configuration = client.configuration
    headers: dict[str, str] = {}
    await client.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        proxy_url=configuration.proxy or None,
    )


async def connect(kubeconfig: str) -> ApiClient:
    """Return the HTTP client for all requests of the operator. Raises SetupError."""
    configuration = await load_configuration(kubeconfig)
    configuration.connection_pool_maxsize = 0  # no limit: each watch holds a connection
    return ApiClient(configuration=configuration)
