"""Batch slots of a decode worker by the spec, for engines that do not report them."""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines import ENGINES
from baton_operator.manifests.engines.arguments import last_value


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """Batch slots of one worker."""

    count: int
    exact: bool
    """Whether an argument names them. If not, a worker has at least so many by the engine's defaults."""


def decode_slots(spec: InferenceServiceSpec) -> DecodeSlots | None:
    """Return the slots; None for engines that report them, or are not known. Arguments of the role override
    those of all workers.
    """
    slots = ENGINES[spec.engine.type].slots
    if slots is None:
        return None
    arguments = [*spec.engine.args, *spec.decode.args]
    value = last_value(arguments, slots.flag)
    if value.isdecimal() and int(value):
        return DecodeSlots(int(value), exact=True)
    return DecodeSlots(slots.default(spec, arguments), exact=False)
