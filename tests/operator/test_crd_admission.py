"""Specs that a real API server admits, and specs that it rejects, naming the field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from baton_api import labels
from baton_operator.crd import RESOURCES, Resource
from baton_operator.kinds.inference_service import InferenceServiceSpec
from tests.operator.bounds import Breach, breaches, broken
from tests.operator.test_crd import NO_QUANTITIES, QUANTITIES
from tests.operator.test_engines import BATON, CLAIM, DISK, MEMORY, SGLANG, VLLM, settled, with_tiers
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

API = "/apis/baton.dev/v1alpha1/namespaces/default"

HERE = Path(__file__).parent
REFUSED = yaml.safe_load((HERE / "refused.yaml").read_text())
ADMITTED = yaml.safe_load((HERE / "admitted.yaml").read_text())
MINIMAL: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "decode": {}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealKubernetes]:
    async with real_kubernetes(tmp_path_factory.mktemp("kubernetes")) as running:
        for one in RESOURCES:
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            answer = await running.admin.post(path, json=one.definition)
            assert answer.status_code == 201, answer.text
            assert not answer.headers.get("warning"), answer.headers["warning"]
        for one in RESOURCES:
            await _served(running, one.plural)
        yield running


async def _served(api: RealKubernetes, plural: str) -> None:

    while (await api.admin.get(f"{API}/{plural}")).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def service(spec: Any, name: str = "chat") -> dict[str, Any]:
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": spec,
    }


async def create(api: RealKubernetes, object: dict[str, Any], plural: str = "inferenceservices") -> Any:
    query = "?dryRun=All&fieldValidation=Strict"
    return await api.admin.post(f"{API}/{plural}{query}", json=object)


LONG = [
    ("no spec", None, "spec"),
    (
        "a uri that is too long",
        {"model": {"uri": "hf://" + "a" * 1100}, "decode": {}},
        "spec.model.uri: Too long",
    ),
    (
        "too much environment",
        {**MINIMAL, "engine": {"env": [{"name": f"A{number}"} for number in range(65)]}},
        "spec.engine.env: Too many",
    ),
]
CASES = [(case["it has"], case["spec"], case["refused with"]) for case in REFUSED] + LONG


async def test_admission_cases_name_their_fields() -> None:
    assert len(CASES) > 40
    assert not [case for case in CASES if "spec" not in case[2]]


@pytest.mark.parametrize(("spec", "named"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_admission_invalid_spec_is_rejected_with_its_field(
    api: RealKubernetes, spec: Any, named: str
) -> None:
    manifest = service(spec)
    if spec is None:
        del manifest["spec"]
    answer = await create(api, manifest)
    assert answer.status_code in (400, 422), answer.text
    assert named in answer.json()["message"]


NAMES = [
    ("a" * 41, "at most 40 characters"),
    ("llama-3.1-8b", "have no dots"),
    ("7b", "must start with a letter"),
]


@pytest.mark.parametrize(("name", "named"), NAMES)
async def test_admission_name_that_no_service_can_have_is_rejected(
    api: RealKubernetes, name: str, named: str
) -> None:
    answer = await create(api, service(MINIMAL, name))
    assert answer.status_code == 422
    assert named in answer.json()["message"]


@pytest.mark.parametrize("name", ["a", "a" * 40, "llama-3-1-8b", "q2"])
async def test_admission_admitted_name_is_one_of_a_service(api: RealKubernetes, name: str) -> None:
    assert (await create(api, service(MINIMAL, name))).status_code == 201
    headless = {"metadata": {"name": name}, "spec": {"clusterIP": "None"}}
    answer = await api.admin.post("/api/v1/namespaces/default/services?dryRun=All", json=headless)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("quantity", [*QUANTITIES, 2, 1e9])
async def test_admission_quantity_of_kubernetes_is_admitted(
    api: RealKubernetes, quantity: str | float
) -> None:
    spec = {
        **MINIMAL,
        "decode": {"resources": {"limits": {"memory": quantity}}, "sharedMemorySize": quantity},
    }
    answer = await create(api, service(spec))
    assert answer.status_code == 201, answer.text
    memory = InferenceServiceSpec.model_validate(answer.json()["spec"]).decode.resources.limits["memory"]
    container = {"name": "main", "image": "none", "resources": {"requests": {"memory": memory}}}
    pod = {"metadata": {"name": "one"}, "spec": {"containers": [container]}}
    answer = await api.admin.post("/api/v1/namespaces/default/pods?dryRun=All", json=pod)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("quantity", NO_QUANTITIES)
async def test_admission_invalid_quantity_is_rejected(api: RealKubernetes, quantity: str) -> None:
    answer = await create(
        api, service({**MINIMAL, "decode": {"resources": {"limits": {"memory": quantity}}}})
    )
    assert answer.status_code == 422
    assert "spec.decode.resources.limits.memory" in answer.json()["message"]


@pytest.mark.parametrize(
    "spec", [case["spec"] for case in ADMITTED], ids=[case["it has"] for case in ADMITTED]
)
async def test_admission_valid_spec_is_read_back_by_its_types(api: RealKubernetes, spec: Any) -> None:
    answer = await create(api, service(spec))
    assert answer.status_code == 201, answer.text
    kind = next(one for one in RESOURCES if one.kind == "InferenceService")
    admitted = kind.spec.model_validate(answer.json()["spec"])
    assert admitted == kind.spec.model_validate(spec), (
        "the API server fills in the same defaults as the types"
    )


def lists(path: str, written: Any, stored: Any) -> Iterator[tuple[str, Any, Any]]:
    """The lists in what a user wrote, with what the API server stored in their place."""
    if isinstance(written, list):
        yield path, written, stored
    elif isinstance(written, dict):
        for name, below in written.items():
            yield from lists(f"{path}.{name}", below, stored[name])


@pytest.mark.parametrize(
    "spec", [case["spec"] for case in ADMITTED], ids=[case["it has"] for case in ADMITTED]
)
async def test_admission_lists_are_stored_as_written(api: RealKubernetes, spec: Any) -> None:
    """Clients compare lists whole, so a default in an item would make each `kubectl apply` a change."""
    stored = (await create(api, service(spec))).json()["spec"]
    assert not [one for one in lists("spec", spec, stored) if one[1] != one[2]]


OTHERS: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("rolescalers", {"serviceName": "a", "role": "decode", "replicas": 1}, "replicas", -1, "spec.replicas"),
    ("rolescalers", {"serviceName": "a", "role": "decode", "replicas": 1}, "role", "router", "spec.role"),
    ("batchjobs", {"serviceName": "a", "batchId": "batch_1"}, "inputFileId", "file-1", "spec"),
    ("batchjobs", {"serviceName": "a", "batchId": "batch_1"}, "batchId", "b", "spec.batchId"),
    ("batchjobs", {"serviceName": "a", "batchId": "batch_1"}, "endpoint", "/v1/rerank", "spec.endpoint"),
    ("loraadapters", {"serviceName": "a", "uri": "hf://a/b"}, "uri", "ftp://a/b/c", "spec.uri"),
    (
        "loraadapters",
        {"serviceName": "a", "uri": "hf://a/b"},
        "uri",
        "s3://a/b",
        "copy other files into a claim",
    ),
    ("loraadapters", {"serviceName": "a", "uri": "hf://a/b"}, "rank", 0, "spec.rank"),
]


@pytest.mark.parametrize(("plural", "spec", "field", "value", "named"), OTHERS)
async def test_admission_other_kinds_are_validated(
    api: RealKubernetes, plural: str, spec: dict[str, Any], field: str, value: Any, named: str
) -> None:
    kind = next(one for one in RESOURCES if one.plural == plural)
    manifest = {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": kind.kind,
        "metadata": {"name": "one"},
        "spec": spec,
    }
    answer = await create(api, manifest, plural)
    assert answer.status_code == 201, answer.text
    answer = await create(api, {**manifest, "spec": {**spec, field: value}}, plural)
    assert answer.status_code == 422 and named in answer.json()["message"], answer.text


LEAST: dict[str, dict[str, Any]] = {
    "InferenceService": MINIMAL,
    **{next(one.kind for one in RESOURCES if one.plural == plural): spec for plural, spec, *_ in OTHERS},
}


@pytest.mark.parametrize("kind", RESOURCES, ids=lambda one: one.kind)
async def test_admission_value_beyond_a_bound_is_rejected_and_named(
    api: RealKubernetes, kind: Resource
) -> None:
    """Try more values than a table could hold: every field of today's schema with invalid values."""
    schema = kind.definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    cases = list(breaches(("spec",), schema))
    few = asyncio.Semaphore(8)

    async def refused(breach: Breach) -> str:
        changed = broken(LEAST[kind.kind], schema, breach)
        named = {"apiVersion": "baton.dev/v1alpha1", "kind": kind.kind, "metadata": {"name": "one"}}
        async with few:
            answer = await create(api, {**named, **changed}, kind.plural)
        text = answer.text.replace('\\"', '"')
        return "" if answer.status_code in (400, 422) and breach.named in text else f"{breach}: {text[:300]}"

    taken = [complaint for complaint in await asyncio.gather(*map(refused, cases)) if complaint]
    assert not taken, taken[:3]
    print(f"{kind.kind}: {len(cases)} values refused")


@pytest.mark.parametrize(
    ("spec", "disk"),
    [
        pytest.param(VLLM, DISK, id="vLLM, a claim of each pod"),
        pytest.param(VLLM, CLAIM, id="vLLM, one claim for all"),
        pytest.param(SGLANG, DISK, id="SGLang, a claim of each pod"),
        pytest.param(SGLANG, CLAIM, id="SGLang, one claim for all"),
        pytest.param(BATON, DISK, id="Baton, a claim of each pod"),
    ],
)
async def test_pods_with_tiers_of_the_kv_cache_are_admitted(
    api: RealKubernetes, spec: dict[str, Any], disk: dict[str, Any]
) -> None:
    """The templates as the operator writes them, which pods are created from."""
    cluster = settled(with_tiers(spec, MEMORY, disk))
    roles = set()
    for (_, kind, _), one in cluster.objects.items():
        role = one["metadata"]["labels"].get(labels.ROLE)
        if kind != "Deployment" or role not in ("prefill", "decode"):
            continue
        template = one["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": role, "labels": template["metadata"]["labels"]},
            "spec": {**template["spec"], "serviceAccountName": "default"},
        }
        account = await api.admin.post(
            "/api/v1/namespaces/default/serviceaccounts", json={"metadata": {"name": "default"}}
        )
        assert account.status_code in (201, 409)
        query = "?dryRun=All&fieldValidation=Strict"
        answer = await api.admin.post(f"/api/v1/namespaces/default/pods{query}", json=pod)
        assert answer.status_code == 201, answer.text
        volumes = {volume["name"]: volume for volume in answer.json()["spec"]["volumes"]}
        assert ("kv-tier" in volumes) is (spec is not SGLANG or role == "prefill")
        roles.add(role)
    assert roles == {"prefill", "decode"}


async def test_openapi_fields_have_descriptions(api: RealKubernetes) -> None:
    """It reads what the API server publishes, which is not the file that was applied."""
    published = (await api.admin.get("/openapi/v3/apis/baton.dev/v1alpha1")).raise_for_status().json()
    schemas = published["components"]["schemas"]
    silent: list[str] = []

    def walk(path: str, schema: dict[str, Any]) -> None:
        if not schema.get("description", "").endswith("."):
            silent.append(path)
        for name, below in schema.get("properties", {}).items():
            walk(f"{path}.{name}", below)
        for name, below in schema.get("items", {}).get("properties", {}).items():
            walk(f"{path}[].{name}", below)

    for kind in RESOURCES:
        schema_of_kind = next(
            schema
            for schema in schemas.values()
            if {"kind": kind.kind}.items() <= schema.get("x-kubernetes-group-version-kind", [{}])[0].items()
        )
        for part in ("spec", "status"):
            walk(f"{kind.kind}.{part}", schema_of_kind["properties"][part])
    assert not silent
