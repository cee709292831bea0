"""Batch slots of a decode worker by the arguments in the spec, for engines that do not report them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from baton_operator.kinds.engine import EngineType
from baton_operator.kinds.inference_service import InferenceServiceSpec

FLAGS: Mapping[EngineType, str] = {"vLLM": "--max-num-seqs", "SGLang": "--max-running-requests"}


def decode_slots(spec: InferenceServiceSpec) -> int | None:
    """
    Return the slots; None if no argument names them.

    Arguments of the role override those of all workers.
    """
    flag = FLAGS.get(spec.engine.type)
    if flag is None:
        return None
    slots = None
    for argument, next_argument in itertools.pairwise([*spec.engine.args, *spec.decode.args, ""]):
        name, separator, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = value if separator else next_argument
            slots = int(value) if value.isdecimal() and int(value) else slots
    return slots
