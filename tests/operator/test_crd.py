"""The custom resources' schemas: generated, current, bounded, and described to the last leaf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_operator.crd import RESOURCES, Resource, files
from baton_operator.kinds.inference_service import InferenceServiceSpec

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


def test_crd_defaults_read_by_rules_are_in_the_schema() -> None:
    by_path = dict(fields(RESOURCES[0]))
    assert by_path["spec.rollout"]["default"]["strategy"] == "PairedRevision"
    assert by_path["spec.model.cache"]["default"] == {"type": "None"}
    assert by_path["spec.decode.drain"]["default"] == {"preStopDelay": "5s", "timeout": "2m"}


def test_crd_types_read_an_admitted_spec_by_its_field_names() -> None:
    spec = {"model": {"uri": "hf://a/b", "allowPatterns": ["*.json"]}, "decode": {"resources": {"cpu": 2}}}
    read = InferenceServiceSpec.model_validate(spec)
    assert (read.model.allow_patterns, read.decode.resources.cpu) == (["*.json"], "2")
    assert read.prefill is None
