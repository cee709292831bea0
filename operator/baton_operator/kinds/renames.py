"""
Field names of 0.1.0: read where an object still has them, and named in its status.

The API server drops fields that the schema does not know when it reads an object that an older version
stored. The schema therefore keeps the old names as deprecated fields without defaults, and this module moves
their values to the new names. It goes away with the next version of the API.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import model_validator
from pydantic.fields import FieldInfo

from baton_operator.kinds.part import Duration, Part

Object = dict[str, Any]


class Stored(Part):
    """A part that the operator reads from objects which an older version may have stored."""

    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, given: Any) -> Any:
        return with_new_names(cls, given) if isinstance(given, dict) else given


def with_new_names(kind: type[Part], given: Mapping[str, Any]) -> Object:
    """Return the object `given` of type `kind` with today's field names."""
    return _moved(kind, given, "")[0]


def old_names(kind: type[Part], given: Mapping[str, Any], path: str) -> list[str]:
    """
    Return the old names that set something in `given`, each with its new name.

    An old field at its default sets nothing: the API server of 0.1.0 stored all defaults.
    """
    return [f"{old} is now {new}" for old, new in _moved(kind, given, f"{path}.")[1]]


def fields(kind: type[Part]) -> dict[str, FieldInfo]:
    """The fields of a part, by the names that people write."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def part_of(annotation: Any) -> type[Part] | None:
    """The part that a field holds, or a list of it holds."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next(filter(None, map(part_of, typing.get_args(annotation))), None)


@functools.cache
def _parts_of(kind: type[Part]) -> Mapping[str, type[Part]]:
    """The fields that hold parts. Cached: every plan reads all stored revisions."""
    parts = ((name, part_of(field.annotation)) for name, field in fields(kind).items())
    return {name: part for name, part in parts if part is not None}


def _moved(kind: type[Part], given: Mapping[str, Any], path: str) -> tuple[Object, list[tuple[str, str]]]:
    """
    Return the object with new names, and the pairs of names that mattered.

    The API server fills in the default of a new field also where only the old one was written. An old value
    therefore counts unless the new field has another value than its default.
    """
    written = any(_takes(given, old.split(".")) for old in kind.renamed_fields)
    moved: Object = copy.deepcopy(dict(given)) if written else dict(given)
    renamed = []
    for old, new in kind.renamed_fields.items() if written else ():
        value = _take(moved, old.split("."))
        if value is None:
            continue
        field = _field(kind, new)
        if _same(value, field.default):
            continue
        if _same(_read(moved, new.split(".")), field.default) or _read(moved, new.split(".")) is None:
            _put(moved, new.split("."), value)
            renamed.append((path + old, path + new))
    for name, part, number, below in _parts(kind, moved):
        where = f"{path}{name}." if number is None else f"{path}{name}[{number}]."
        converted, more = _moved(part, below, where)
        renamed += more
        if number is None:
            moved[name] = converted
        else:
            moved[name] = [*moved[name][:number], converted, *moved[name][number + 1 :]]
    return moved, renamed


def _parts(kind: type[Part], given: Object) -> Iterator[tuple[str, type[Part], int | None, Object]]:
    """The objects below, with the field and the place in a list."""
    for name, part in _parts_of(kind).items():
        value = given.get(name)
        if isinstance(value, dict):
            yield name, part, None, value
        elif isinstance(value, list):
            yield from (
                (name, part, number, one) for number, one in enumerate(value) if isinstance(one, dict)
            )


def _field(kind: type[Part], path: str) -> FieldInfo:
    *parents, last = path.split(".")
    for name in parents:
        part = part_of(fields(kind)[name].annotation)
        assert part is not None, path
        kind = part
    return fields(kind)[last]


def _same(value: Any, default: Any) -> bool:
    """Whether a value, as old or new objects write it, is the default."""
    if isinstance(default, Duration) and isinstance(value, int | str):
        try:
            return Duration(value) == default
        except ValueError:
            return False
    return bool(value == default)


def _takes(given: Mapping[str, Any], path: list[str]) -> bool:
    """Return whether `_take` would change the object."""
    name, *rest = path
    if not rest:
        return name in given
    below = given.get(name)
    return isinstance(below, dict) and (not below or _takes(below, rest))


def _take(given: Object, path: list[str]) -> Any:
    """Remove a value and the objects that held nothing else."""
    name, *rest = path
    if not rest:
        return given.pop(name, None)
    below = given.get(name)
    if not isinstance(below, dict):
        return None
    value = _take(below, rest)
    if not below:
        del given[name]
    return value


def _read(given: Object, path: list[str]) -> Any:
    value: Any = given
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _put(given: Object, path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        given = given.setdefault(name, {})
    given[last] = value
