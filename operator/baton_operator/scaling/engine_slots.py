"""Batch slots of a decode worker by the spec, for engines that do not report them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_operator.kinds.engine import EngineType
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines.arguments import flag_name, last_value

FLAGS: Mapping[EngineType, str] = {"vLLM": "--max-num-seqs", "SGLang": "--max-running-requests"}

VLLM_DEFAULT, VLLM_CPU_DEFAULT = 256, 128
"""vLLM's smallest defaults (0.10 to 0.32). With 70 GiB of memory and more a GPU has 1024, except an A100."""

SGLANG_DEFAULT, SGLANG_SPECULATIVE_DEFAULT = 2048, 48
"""SGLang's smallest default (0.5), and the one with speculative decoding."""


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
    flag = FLAGS.get(spec.engine.type)
    if flag is None:
        return None
    arguments = [*spec.engine.args, *spec.decode.args]
    value = last_value(arguments, flag)
    if value.isdecimal() and int(value):
        return DecodeSlots(int(value), exact=True)
    return DecodeSlots(_default(spec, arguments), exact=False)


def _default(spec: InferenceServiceSpec, arguments: list[str]) -> int:
    if spec.engine.type == "SGLang":
        speculative = any(flag_name(one).startswith("--speculative") for one in arguments)
        return SGLANG_SPECULATIVE_DEFAULT if speculative else SGLANG_DEFAULT
    return VLLM_DEFAULT if spec.decode.resources.accelerators else VLLM_CPU_DEFAULT
