"""
The supported model families, in a module for each series of models.

To add a family, add it to `FAMILIES` of the module of its series, or add a module. Configuration, weights,
GGUF files, parser names and the documentation's table of models follow from it. A family with a new layer
option also adds a field to `ModelSpec` and its computation to `Decoder`; native kernels are used only for
options that they implement.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from baton_engine.model.family import ModelFamily


def _find() -> tuple[ModelFamily, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(family for name in names for family in import_module(f"{__name__}.{name}").FAMILIES)


FAMILIES = _find()

BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
HEADLESS = {family.headless: family for family in FAMILIES}
MULTIMODAL = {family.multimodal: family for family in FAMILIES if family.multimodal}
BY_GGUF = {family.gguf.architecture: family for family in FAMILIES if family.gguf is not None}
