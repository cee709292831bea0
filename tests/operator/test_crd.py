"""The custom resources' schemas: generated, current, bounded, and described to the last leaf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from baton_operator.crd import RESOURCES, Resource, files
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import Duration, amount
from baton_operator.manifests.objects import contains

CRDS = Path(__file__).parents[2] / "crds"
KINDS = pytest.mark.parametrize("kind", RESOURCES, ids=lambda one: one.kind)


def fields(kind: Resource) -> Iterator[tuple[str, dict[str, Any]]]:
    """All fields below spec and status, with their paths."""
    schema = kind.definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in ("spec", "status"):
        yield from _below(name, schema["properties"][name])


def _below(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _below(f"{path}.{name}", field)
    if "items" in schema:
        for inner, field in _below(f"{path}[]", schema["items"]):
            if inner != f"{path}[]":
                yield inner, field


def test_crd_files_match_the_types() -> None:
    assert {file.name: file.read_text() for file in CRDS.glob("*.yaml")} == files()
    for text in files().values():
        assert yaml.safe_load(text)["kind"] == "CustomResourceDefinition"


@KINDS
def test_crd_field_descriptions_are_sentences(kind: Resource) -> None:
    for path, field in fields(kind):
        description = field.get("description", "")
        assert description.endswith("."), f"{path}: {description!r}"
        assert "\n" not in description, path


@KINDS
def test_crd_lists_texts_and_numbers_are_bounded(kind: Resource) -> None:
    for path, field in fields(kind):
        if field.get("type") == "array":
            assert "maxItems" in field, path
        if field.get("type") == "string" and "enum" not in field:
            assert "maxLength" in field, path
        if field.get("type") == "integer" and "enum" not in field and path.startswith("spec"):
            assert {"minimum", "maximum"} <= field.keys(), path


@KINDS
def test_crd_fields_have_a_type(kind: Resource) -> None:
    for path, field in fields(kind):
        assert "type" in field or field.get("x-kubernetes-int-or-string"), path


@KINDS
def test_crd_messages_and_reasons_are_in_conditions_only(kind: Resource) -> None:
    """Clients find them in one place, which `kubectl wait` and `kubectl describe` know."""
    texts = {"message", "reason", "summary", "progress"}
    assert not [
        path
        for path, _ in fields(kind)
        if path.startswith("status.") and path.rpartition(".")[2] in texts
        if not path.startswith("status.conditions[].")
    ]


@KINDS
def test_crd_items_of_lists_have_no_defaults(kind: Resource) -> None:
    """`kubectl apply` and Argo CD compare lists whole: a default inside would be a change for ever."""
    assert not [
        path
        for path, field in fields(kind)
        if path.startswith("spec") and "[]" in path and "default" in field
    ]


def test_crd_types_fill_in_defaults_of_items() -> None:
    read = InferenceServiceSpec.model_validate(
        {
            "model": {"uri": "hf://a/b"},
            "decode": {"placement": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}},
            "rollout": {"canary": {"steps": [{"weight": 5}]}},
        }
    )
    (spread,) = read.decode.placement.topology_spread_constraints
    assert (spread.max_skew, spread.when_unsatisfiable) == (1, "ScheduleAnyway")
    assert read.rollout.canary is not None and read.rollout.canary.steps[0].pause == "5m"


QUANTITIES = (
    "1", "+1", "1.", ".5", "0.5", "500m", "100n", "100u", "12k", "1.5Gi", "4G", "2E", "1Ei",
    "1e9", "1E9", "1.5e+3", "5e-3",
)  # fmt: skip
NO_QUANTITIES = (
    "",
    "-1",
    "Gi",
    "1 Gi",
    "1K",
    "1ki",
    "1GiB",
    "1e",
    "1e9Gi",
    "0x10",
    "1e999",
    "inf",
    "1,5",
    ".",
)


@pytest.mark.parametrize("text", QUANTITIES)
def test_quantity_of_kubernetes_is_read_and_compared(text: str) -> None:
    read = InferenceServiceSpec.model_validate(
        {"model": {"uri": "hf://a/b"}, "decode": {"resources": {"limits": {"memory": text}}}}
    )
    assert read.decode.resources.limits == {"memory": text}
    assert contains({"memory": f"{amount(text):f}"}, {"memory": text})


@pytest.mark.parametrize("text", NO_QUANTITIES)
def test_quantity_that_kubernetes_rejects_is_invalid(text: str) -> None:
    with pytest.raises(ValidationError):
        InferenceServiceSpec.model_validate(
            {"model": {"uri": "hf://a/b"}, "decode": {"resources": {"limits": {"memory": text}}}}
        )
    with pytest.raises(ValueError):
        amount(text)


def test_crd_defaults_read_by_rules_are_in_the_schema() -> None:
    by_path = dict(fields(RESOURCES[0]))
    assert by_path["spec.rollout"]["default"]["strategy"] == "PairedRevision"
    assert by_path["spec.model.cache"]["default"] == {"type": "None"}
    assert by_path["spec.decode.drain"]["default"] == {"preStopDelay": "5s", "timeout": "2m"}


def test_crd_types_read_an_admitted_spec_by_its_field_names() -> None:
    spec = {
        "model": {"uri": "hf://a/b", "allowPatterns": ["*.json"]},
        "decode": {"resources": {"requests": {"cpu": 2}}},
    }
    read = InferenceServiceSpec.model_validate(spec)
    assert (read.model.allow_patterns, read.decode.resources.requests) == (["*.json"], {"cpu": "2"})
    assert read.prefill is None


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
