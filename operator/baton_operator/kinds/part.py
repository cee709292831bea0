"""
What every part of a custom resource is: named as Kubernetes names things, closed, bounded, described.

Bounds are more than politeness. The API server weighs what its rules may cost by the longest list and the
longest text that a schema admits, and refuses a schema without them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    """An object of the schema. Its docstring, and those of its fields, are what `kubectl explain` shows."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",  # a newer API server may know more; what people write is checked by the schema
        use_attribute_docstrings=True,
    )


Kind = TypeVar("Kind", bound=type[Part])


class Rule:
    """One condition in the Common Expression Language, checked by the API server on every write."""

    def __init__(self, expression: str, message: str, field: str = "") -> None:
        """`field` is the path that the error names, from the object that has the rule."""
        self.expression = expression
        self.message = message
        self.field = field

    @property
    def schema(self) -> dict[str, str]:
        """As an entry of `x-kubernetes-validations`."""
        where = {"fieldPath": self.field} if self.field else {}
        return {"rule": self.expression, "message": self.message, **where}


def rules(*given: Rule) -> Any:
    """A class decorator: objects of this kind must keep to these."""

    def with_rules(kind: Kind) -> Kind:
        checked: list[Any] = [one.schema for one in given]
        kind.model_config["json_schema_extra"] = {"x-kubernetes-validations": checked}
        kind.model_rebuild(force=True)
        return kind

    return with_rules


Label = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name of RFC 1123."""

Subdomain = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]

Text = Annotated[str, Field(min_length=1, max_length=1024)]

LabelKey = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]

ResourceName = LabelKey
"""Of a device plugin, such as nvidia.com/gpu."""

Percent = Annotated[int, Field(ge=0, le=100)]

Seconds = Annotated[int, Field(ge=0, le=604_800)]

Duration = Annotated[str, Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$")]
"""Such as 2s, 50ms or 1m30s."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(given: str) -> float:
    """
    Seconds of a Duration.

    >>> duration_s("1m30s"), duration_s("50ms"), duration_s("2.5s")
    (90.0, 0.05, 2.5)
    """
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m|h)", given))


Quantity = Annotated[
    str,
    Field(
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$",
        json_schema_extra={"x-kubernetes-int-or-string": True},
    ),
    BeforeValidator(lambda given: str(given) if isinstance(given, int) else given),
]
"""Kubernetes' numbers with units: 500m, 16Gi, 2."""

Anything = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""An object that the API server checks elsewhere, when it is used."""

Labels = Annotated[dict[LabelKey, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
