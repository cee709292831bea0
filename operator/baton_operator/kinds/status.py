"""Conditions: what is so and what is not, in the form that `kubectl wait` knows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Part


class Condition(Part):
    """One statement about an object."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """What it is about."""

    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""

    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, in one word for programs."""

    message: Annotated[str, Field(max_length=32_768)] = ""
    """Why, in words for people, with the way out."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The metadata.generation that it is about."""

    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    """When its status last changed."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
