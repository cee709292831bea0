"""Field names of 0.1.0: read where an object still has them, and named in its status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from baton_operator.crd import RESOURCES, Resource
from baton_operator.kinds import renames
from baton_operator.kinds.batch_job import BatchJobSpec
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import Duration, Part
from baton_operator.kinds.renames import old_names, with_new_names
from baton_operator.manifests.revision import Blueprint
from tests.operator.fake_cluster import FakeCluster
from tests.operator.test_crd import KINDS, fields

MINIMAL: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "decode": {}}

OLD = """
transfer: {timeoutSeconds: 45, domainKey: example.com/rack, enforcement: Required}
decode:
  scaling: {maxReplicas: 4, scaleUp: {stabilizationWindowSeconds: 5, periodSeconds: 90}}
  resources: {claims: [{name: gpu, resourceClaimTemplateName: one-gpu}]}
  startupTimeoutSeconds: 600
  drain: {preStopSeconds: 7, timeoutSeconds: 60}
  rollout: {maxSurge: 2, maxUnavailable: 1}
  disruption: {enabled: false, maxUnavailable: 2}
router: {aloneTokens: 64, page: true, holdForScaleFromZeroSeconds: 120, drain: {timeoutSeconds: 900}}
autoscaling:
  mode: Internal
  slo: {ttft: 3s, itl: 40ms, percentile: 90}
  intervalSeconds: 30
  scaleToZeroAfterSeconds: 600
  onMetricsLoss: {holdSeconds: 60, then: Hold}
rollout:
  strategy: PairedGeneration
  progressDeadlineSeconds: 600
  maxTtft: 2s
  canary: {steps: [{weight: 10, pauseSeconds: 60}, {weight: 20}]}
"""
NEW = """
transfer: {timeout: 45s, topology: {key: example.com/rack, policy: Required}}
decode:
  scaling: {maxReplicas: 4, scaleUp: {stabilizationWindow: 5s, period: 1m30s}}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
  startupTimeout: 10m
  drain: {preStopDelay: 7s, timeout: 1m}
  updateStrategy: {maxSurge: 2, maxUnavailable: 1}
  podDisruptionBudget: {enabled: false, maxUnavailable: 2}
router: {localPrefillMaxTokens: 64, dashboard: true, scaleFromZeroTimeout: 2m, drain: {timeout: 15m}}
objectives: {timeToFirstToken: 3s, interTokenLatency: 40ms, percentile: 90}
autoscaling:
  mode: Internal
  interval: 30s
  scaleToZeroAfter: 10m
  onMetricsLoss: {holdDuration: 1m, policy: Hold}
rollout:
  strategy: PairedRevision
  progressDeadline: 10m
  maxTimeToFirstToken: 2s
  canary: {steps: [{weight: 10, pause: 1m}, {weight: 20}]}
"""


def spec(text: str) -> dict[str, Any]:
    return {**MINIMAL, **yaml.safe_load(text)}


def parts(kind: type[Part]) -> Iterator[type[Part]]:
    yield kind
    for field in renames.fields(kind).values():
        if (part := renames.part_of(field.annotation)) is not None:
            yield from parts(part)


def test_spec_with_old_names_equals_the_one_with_new_names() -> None:
    assert InferenceServiceSpec.model_validate(spec(OLD)) == InferenceServiceSpec.model_validate(spec(NEW))


def test_spec_with_old_names_beside_defaults_keeps_values() -> None:
    """As the API server gives it back: each new field has its default beside the old value."""
    filled = InferenceServiceSpec.model_validate(MINIMAL).model_dump(mode="json", by_alias=True)
    filled = {name: value for name, value in filled.items() if value is not None}
    for name, part in spec(OLD).items():
        filled[name] = {**filled[name], **part}
    assert InferenceServiceSpec.model_validate(filled) == InferenceServiceSpec.model_validate(spec(NEW))


def test_spec_with_both_names_uses_the_new_one() -> None:
    both = {**MINIMAL, "router": {"aloneTokens": 64, "localPrefillMaxTokens": 128}}
    assert InferenceServiceSpec.model_validate(both).router.local_prefill_max_tokens == 128
    assert old_names(InferenceServiceSpec, both, "spec") == []


def test_old_names_are_reported_with_their_paths() -> None:
    reported = old_names(InferenceServiceSpec, spec(OLD), "spec")
    assert "spec.autoscaling.slo.ttft is now spec.objectives.timeToFirstToken" in reported
    assert "spec.decode.rollout.maxSurge is now spec.decode.updateStrategy.maxSurge" in reported
    assert "spec.rollout.canary.steps[0].pauseSeconds is now spec.rollout.canary.steps[0].pause" in reported
    assert old_names(InferenceServiceSpec, spec(NEW), "spec") == []


def test_old_names_at_their_defaults_are_not_reported() -> None:
    """The API server of 0.1.0 stored the defaults of all fields, also of unset ones."""
    stored = {**MINIMAL, "router": {"aloneTokens": 512, "page": False, "holdForScaleFromZeroSeconds": 0}}
    assert old_names(InferenceServiceSpec, stored, "spec") == []


def test_reading_old_names_changes_nothing_of_the_object() -> None:
    given = spec(OLD)
    with_new_names(InferenceServiceSpec, given)
    assert given == spec(OLD)


def test_batch_job_with_old_names_is_read() -> None:
    old = {"serviceName": "a", "inputFileId": "file-1", "completionWindowSeconds": 600}
    read = BatchJobSpec.model_validate({**old, "ttlSecondsAfterFinished": 60})
    assert (read.completion_window, read.ttl_after_finished) == ("10m", "1m")


def test_blueprint_of_0_1_0_has_the_digest_of_the_same_spec() -> None:
    """Or the workers of every service would be replaced by an upgrade."""
    today = Blueprint.of("chat", InferenceServiceSpec.model_validate(spec(NEW)))
    kept = ("resources", "startupTimeoutSeconds", "drain")
    decode = {name: value for name, value in spec(OLD)["decode"].items() if name in kept}
    memory = {
        "servedNames": ["chat"],
        **MINIMAL,
        "engine": {},
        "transfer": spec(OLD)["transfer"],
        "decode": decode,
    }
    assert Blueprint.model_validate(memory).digest == today.digest
    assert Blueprint.model_validate(json.loads(today.model_dump_json(by_alias=True))).digest == today.digest


@KINDS
def test_schema_keeps_each_old_name_as_deprecated(kind: Resource) -> None:
    """Without it, the API server would drop what an object has under that name."""
    by_path = dict(fields(kind))
    names = {
        old.rpartition(".")[2]
        for top in (kind.spec, kind.status)
        for one in parts(top)
        for old in one.renamed_fields
    }
    deprecated = {
        path.rpartition(".")[2]
        for path, field in by_path.items()
        if field["description"].startswith("Deprecated: the name of ")
    }
    assert deprecated == names
    for path, field in by_path.items():
        assert not field["description"].startswith("Deprecated") or "default" not in field, path


def test_service_with_old_names_says_so_in_its_status() -> None:
    cluster = FakeCluster({**MINIMAL, "router": {"page": True}})
    cluster.settle()
    assert cluster.condition("SpecSupported") == ("True", "DeprecatedFields")
    assert "spec.router.page is now spec.router.dashboard" in cluster.message("SpecSupported")
    (container,) = cluster.objects["apps/v1", "Deployment", "chat-router"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert "--dashboard" in container["args"]
    cluster.change({**MINIMAL, "router": {"dashboard": True}})
    cluster.settle()
    assert cluster.condition("SpecSupported") == ("True", "Supported")


@pytest.mark.parametrize(
    ("text", "short", "seconds"),
    [
        ("60s", "1m", 60.0),
        ("90m", "1h30m", 5400.0),
        ("0.05s", "50ms", 0.05),
        ("0h", "0s", 0.0),
        ("1.5s", "1s500ms", 1.5),
    ],
)
def test_duration_is_equal_in_all_its_forms(text: str, short: str, seconds: float) -> None:
    assert Duration(text) == short and Duration(text).seconds == seconds == Duration(seconds).seconds


@pytest.mark.parametrize("text", ["soon", "10", "1d", "-1s", ""])
def test_duration_without_unit_or_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Expected numbers with units"):
        Duration(text)


def test_resources_have_old_names() -> None:
    assert {kind.kind for kind in RESOURCES if any(one.renamed_fields for one in parts(kind.spec))} == {
        "InferenceService",
        "BatchJob",
    }
