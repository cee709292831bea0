"""
Base types of the custom resources: objects, validation rules, and strings with a format.

Every string and list is bounded. The API server estimates the cost of validation rules from the largest value
that a schema admits, and rejects a schema without bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema


class Part(BaseModel):
    """An object of the schema. `kubectl explain` shows its docstring and those of its fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",  # the API server rejects unknown fields; a newer one may know more fields
        use_attribute_docstrings=True,
    )


Kind = TypeVar("Kind", bound=type[Part])


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition in the Common Expression Language. The API server checks it on every write."""

    expression: str
    message: str
    field: str = ""
    """Path that the error names, relative to the object that has the rule."""

    shown: str = ""
    """Expression of a text for the end of the message: an invalid value."""

    @property
    def schema(self) -> dict[str, str]:
        """An entry of `x-kubernetes-validations`."""
        where = {"fieldPath": self.field} if self.field else {}
        whole = {"messageExpression": f"'{self.message}: ' + {self.shown}"} if self.shown else {}
        return {"rule": self.expression, "message": self.message, **whole, **where}


def rules(*given: Rule) -> Any:
    """Class decorator: add validation rules to a part."""

    def with_rules(kind: Kind) -> Kind:
        checked: list[Any] = [one.schema for one in given]
        kind.model_config["json_schema_extra"] = {"x-kubernetes-validations": checked}
        kind.model_rebuild(force=True)
        return kind

    return with_rules


Label = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A label of RFC 1123."""

Subdomain = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]
"""A subdomain of RFC 1123: the form of most names of Kubernetes."""

Text = Annotated[str, Field(min_length=1, max_length=1024)]

LabelKey = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]

Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class Duration(str):
    """
    A length of time, such as 30s, 50ms or 1m30s, in its shortest form.

    >>> Duration("60s"), Duration("0.05s"), Duration(90), Duration("1m30s").seconds
    ('1m', '50ms', '1m30s', 90.0)
    """

    __slots__ = ()

    PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"

    def __new__(cls, given: str | float) -> Duration:
        """`given`: text, or seconds. Raises ValueError."""
        seconds = given if isinstance(given, int | float) else cls._parsed(given)
        milliseconds = round(seconds * 1000)
        if not milliseconds:
            return super().__new__(cls, "0s")
        text = ""
        for unit, length in _SECONDS.items():
            count, milliseconds = divmod(milliseconds, round(length * 1000))
            text += f"{count}{unit}" if count else ""
        return super().__new__(cls, text)

    @property
    def seconds(self) -> float:
        return self._parsed(self)

    @property
    def whole_seconds(self) -> int:
        """Seconds, rounded up: Kubernetes and flags that count seconds take no parts."""
        return -int(-self.seconds // 1)

    @classmethod
    def _parsed(cls, text: str) -> float:
        if re.fullmatch(cls.PATTERN, text) is None:
            raise ValueError(
                f"Invalid duration: {text!r}. Expected numbers with units, such as 30s or 1m30s."
            )
        return sum(
            float(number) * _SECONDS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m|h)", text)
        )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(pattern=cls.PATTERN, max_length=32)
        return core_schema.no_info_after_validator_function(
            cls,
            text,
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )


def between(least: str, most: str) -> Any:
    """Bounds of a duration, which the API server checks."""
    rule = f"duration(self) >= duration('{least}') && duration(self) <= duration('{most}')"
    checked: list[Any] = [Rule(rule, f"must be between {least} and {most}").schema]
    return Field(json_schema_extra={"x-kubernetes-validations": checked})


QUANTITY = r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?"
"""Number and unit or exponent of a quantity."""

Quantity = Annotated[
    str,
    Field(
        max_length=32,
        pattern=rf"^{QUANTITY}$",
        json_schema_extra={"x-kubernetes-int-or-string": True},
    ),
    # The API server admits numbers: 2, and 1e9 without quotes.
    BeforeValidator(lambda given: str(given) if isinstance(given, int | float) else given),
]
"""A quantity of Kubernetes: 500m, 16Gi, 1e9, 2. Not negative."""

_QUANTITY = re.compile(QUANTITY)
_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def amount(quantity: str) -> Decimal:
    """
    Return a quantity as a number. Raises ValueError.

    >>> amount("1Gi") == 1024 * amount("1Mi"), amount("500m")
    (True, Decimal('0.500'))
    >>> amount("1e3") == amount("1k")
    True
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"Invalid quantity: {quantity!r}. Expected a number with a unit, such as 20Gi.")
    number, unit = match[1], match[2] or ""
    return Decimal(number) * _UNITS[unit] if unit in _UNITS else Decimal(number + unit)


Anything = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""An object without a schema. The API server checks it when the operator uses it."""

Labels = Annotated[dict[LabelKey, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


MESSAGE_LIMIT = 32_768


class Condition(Part):
    """One statement about an object, in the form that `kubectl wait --for=condition` reads."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Name of the condition."""

    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""

    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Cause of the status, in one word for programs."""

    message: Annotated[str, Field(max_length=MESSAGE_LIMIT)] = ""
    """Cause of the status and what to do, in words for people."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Value of metadata.generation for which the condition was determined."""

    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    """Time of the last change of `status`."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
