"""Baton's kinds beside those of KServe in a real API server, as docs/guides/kserve.md says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_operator.crd import GROUP, RESOURCES, VERSION
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

KSERVE = "serving.kserve.io"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definition(kind: str, short: str, version: str) -> dict[str, Any]:
    """A definition with KServe's names; its schema does not matter here."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{KSERVE}"},
        "spec": {
            "group": KSERVE,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "shortNames": [short]},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


THEIRS = (
    definition("InferenceService", "isvc", "v1beta1"),
    definition("LLMInferenceService", "llmisvc", "v1alpha2"),
)


async def test_kinds_of_baton_and_kserve_are_served_side_by_side(tmp_path: Path) -> None:
    async with real_kubernetes(tmp_path) as api:
        for one in (*THEIRS, *(resource.definition for resource in RESOURCES)):
            await api.post(CRDS, one)
        names = await _accepted(api)
        services: dict[str, dict[str, Any]] = {
            f"/apis/{KSERVE}/v1beta1": {"predictor": {}},
            f"/apis/{GROUP}/{VERSION}": {"model": {"uri": "builtin://smollm2"}, "decode": {}},
        }
        for path, spec in services.items():
            body = {
                "apiVersion": path.removeprefix("/apis/"),
                "kind": "InferenceService",
                "metadata": {"name": "chat"},
                "spec": spec,
            }
            await api.post(f"{path}/namespaces/default/inferenceservices", body)
        for path, spec in services.items():
            stored = (await api.admin.get(f"{path}/namespaces/default/inferenceservices/chat")).json()
            assert stored["spec"].keys() >= spec.keys()
        listed = [one["name"] for one in (await api.admin.get("/apis")).json()["groups"]]
    assert listed.index(GROUP) < listed.index(KSERVE), "kubectl takes the first for a name without a group"
    shorts = [short for one in names for short in one["shortNames"]]
    assert len(shorts) == len(set(shorts))


async def _accepted(api: RealKubernetes) -> list[dict[str, Any]]:
    """Wait until the API server serves all definitions, and return the names that it has accepted."""
    async with asyncio.timeout(120):
        while True:
            items = (await api.admin.get(CRDS)).json()["items"]
            states = [
                {one["type"]: one["status"] for one in item.get("status", {}).get("conditions") or ()}
                for item in items
            ]
            if all(state.get("Established") == state.get("NamesAccepted") == "True" for state in states):
                groups = (await api.admin.get("/apis")).json()["groups"]
                if {GROUP, KSERVE} <= {one["name"] for one in groups}:
                    return [item["status"]["acceptedNames"] for item in items]
            await asyncio.sleep(0.1)
