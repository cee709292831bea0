"""Check the permissions of an account in a cluster, and the cluster's custom resource definitions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from baton_api.errors import SetupError
from baton_cli.doctor.machine import Cluster, Crd

NEEDED = (
    ("baton.dev", "inferenceservices", ("get", "list", "watch", "create", "patch", "delete")),
    ("baton.dev", "rolescalers", ("list", "patch")),
    ("", "pods", ("list",)),
    ("", "events", ("list",)),
)
"""Permissions that users of services need: group, resource, verbs."""

TIMEOUT_S = 60.0
FORBIDDEN, NOT_FOUND = 403, 404


def inspect(kubeconfig: str, namespace: str) -> Cluster:
    """Inspect a cluster. Raises SetupError without an account."""
    return asyncio.run(_inspect(kubeconfig, namespace))


async def _inspect(kubeconfig: str, namespace: str) -> Cluster:
    from aiohttp import ClientError
    from kubernetes.aio.client.exceptions import ApiException

    from baton_operator.cluster import api_server

    async with await api_server.connect(kubeconfig) as client:
        server = client.configuration.host
        try:
            async with asyncio.timeout(TIMEOUT_S):
                denied = [permission async for permission in _denied(client, namespace)]
                return Cluster(server, denied=tuple(denied), crds=await _allowed_crds(client))
        except ApiException as error:
            return Cluster(server, f"{error.status} {error.reason}")
        except (ClientError, OSError, TimeoutError) as error:
            return Cluster(server, str(error) or "no answer in time")


async def _denied(client: Any, namespace: str) -> Any:
    from kubernetes.aio.client import AuthorizationV1Api

    api = AuthorizationV1Api(client)
    for group, resource, verbs in NEEDED:
        for verb in verbs:
            attributes = {"group": group, "resource": resource, "verb": verb, "namespace": namespace}
            spec = {"resourceAttributes": attributes}
            review = await api.create_self_subject_access_review({"spec": spec})
            if not review.status.allowed:
                yield f"{verb} {resource} in {namespace}"


async def _allowed_crds(client: Any) -> tuple[Crd, ...] | None:
    """Return None if the account may not read definitions, as users of a namespace usually may not."""
    from kubernetes.aio.client.exceptions import ApiException

    try:
        return tuple([crd async for crd in _crds(client)])
    except ApiException as error:
        if error.status == FORBIDDEN:
            return None
        raise


async def _crds(client: Any) -> Any:
    from kubernetes.aio.client import ApiextensionsV1Api
    from kubernetes.aio.client.exceptions import ApiException

    from baton_operator.crd import RESOURCES

    api = ApiextensionsV1Api(client)
    for resource in RESOURCES:
        definition = resource.definition
        name = definition["metadata"]["name"]
        try:
            installed = client.sanitize_for_serialization(await api.read_custom_resource_definition(name))
        except ApiException as error:
            if error.status == NOT_FOUND:
                yield Crd(name, ())
                continue
            raise
        yield compare(definition, installed)


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Crd:
    """Compare the definition of this version with that of the cluster."""
    served = {version["name"]: version for version in theirs["spec"]["versions"] if version["served"]}
    missing: list[str] = []
    for version in ours["spec"]["versions"]:
        installed = served.get(version["name"])
        if installed is None:
            missing.append(f"version {version['name']}")
            continue
        have = set(fields(installed["schema"]["openAPIV3Schema"]))
        missing += [path for path in fields(version["schema"]["openAPIV3Schema"]) if path not in have]
    return Crd(ours["metadata"]["name"], tuple(served), tuple(missing))


def fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """
    Yield the paths of all fields of a schema.

    >>> list(fields({"properties": {"a": {"items": {"properties": {"b": {}}}}}}))
    ['a', 'a[].b']
    """
    for name, part in (schema.get("properties") or {}).items():
        here = f"{path}.{name}" if path else name
        yield here
        yield from fields(part, here)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            yield from fields(schema[inner], f"{path}[]")


def account(kubeconfig: str, environment: Mapping[str, str]) -> str:
    """
    Return the kubeconfig file: the given one, or that of kubectl.

    Raises SetupError if it does not exist.
    """
    from pathlib import Path

    named = kubeconfig or environment.get("KUBECONFIG", "")
    path = Path(named).expanduser() if named else Path(environment.get("HOME", "/")) / ".kube" / "config"
    if path.exists():
        return str(path)
    if named:
        raise SetupError(f"The kubeconfig file {named} does not exist. Set another one with --kubeconfig.")
    return ""  # the ServiceAccount of the pod
