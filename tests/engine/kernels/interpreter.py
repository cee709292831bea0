"""
Triton's interpreter, without what it repeats: more than half of its time, and none of its arithmetic.

It replaces the functions of `triton.language` at each launch, and looks for them again at each call of a
function of a kernel, though they are replaced already.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

ROW_OUTPUTS = 64
"""Of a program that multiplies one row, in whole models: each program takes milliseconds."""


@functools.cache
def builtins_of(place: object) -> list[str]:
    """Names of a module's or a class's functions that a launch replaces; asked before they are."""
    return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]


def replace_builtins(place: object, builder: object, scope: Any) -> None:
    for name in builtins_of(place):
        if tl.core.is_builtin(member := getattr(place, name)):
            interpreter._patch_attr(place, name, member, builder, scope)


class Replacing:
    """Replaces what a launch needs once: its scope has changes from its begin to its end."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._launch = interpreter._LangPatchScope()
        self._modules: set[str] = set()

    def __call__(self, function: Any) -> Any:
        named = function.__globals__.values()
        modules = {module.__name__ for module in (tl, tl.core) if any(module is one for one in named)}
        if not self._launch._changes:
            self._launch, self._modules = self._replace(function), modules
            return self._launch
        if not modules <= self._modules:
            self._launch._changes += self._replace(function)._changes
            self._modules |= modules
        return interpreter._LangPatchScope()


Shape = tuple[int, ...]


class Types:
    """The types and sizes of tensors, computed once for each shape."""

    def __init__(self) -> None:
        self._block, self._tensor = tl.block_type.__init__, tl.tensor.__init__
        self._number = interpreter._get_np_dtype
        self._numbers: dict[str, Any] = {}
        self._blocks: dict[tuple[str, Shape], dict[str, Any]] = {}
        self._tensors: dict[Shape, dict[str, Any]] = {}

    def block(self, own: tl.block_type, element_ty: tl.dtype, shape: Iterable[Any]) -> None:
        """`block_type.__init__`."""
        key = element_ty.name, tuple(tl.core._unwrap_if_constexpr(size) for size in shape)
        if key not in self._blocks:
            self._block(own, element_ty, shape)
            self._blocks[key] = {name: getattr(own, name) for name in ("shape", "numel", "name")}
        own.__dict__.update(self._blocks[key], element_ty=element_ty)

    def tensor(self, own: tl.tensor, handle: Any, type: tl.dtype) -> None:
        """`tensor.__init__`."""
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in self._tensors:
            self._tensor(own, handle, type)
            self._tensors[shape] = {name: getattr(own, name) for name in ("shape", "numel")}
        own.__dict__.update(self._tensors[shape], handle=handle, type=type, dtype=type.scalar)

    def number(self, of: tl.dtype) -> Any:
        """`_get_np_dtype`."""
        name = of.scalar.name
        if name not in self._numbers:
            self._numbers[name] = self._number(of)
        return self._numbers[name]


def install() -> None:
    """For this process. Private names of the Triton that `constraints.txt` pins are used."""
    types = Types()
    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = Replacing(interpreter._patch_lang)
    interpreter._get_np_dtype = types.number
    tl.block_type.__init__ = lambda own, element_ty, shape: types.block(own, element_ty, shape)
    tl.tensor.__init__ = lambda own, handle, type: types.tensor(own, handle, type)
