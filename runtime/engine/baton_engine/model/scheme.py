"""
How the weights of a safetensors checkpoint are quantized: `quantization_config` of its `config.json`.

Each supported method is one entry of `METHODS`. An option that would change the numbers and is not supported
causes an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton_api.errors import SetupError

WAY_OUT = "Use the bfloat16 checkpoint (with --quantize q8_0 for 8 bits), or a .gguf file."


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Quantization of a checkpoint's matrices."""

    method: Literal["fp8", "gptq", "awq", "int8", "int4"]
    """int8 and int4 are those of compressed-tensors."""
    bits: int
    group: int = 0
    """Inputs that share a scale. 0: all inputs of an output."""
    block: tuple[int, int] | None = None
    """fp8: outputs and inputs that share a scale. None: one scale for a tensor or for each output."""
    zero_offset: int = 0
    """gptq: the difference of a zero and its stored number."""

    @property
    def title(self) -> str:
        """The name in logs and errors."""
        return {"fp8": "FP8", "gptq": "GPTQ", "awq": "AWQ"}.get(self.method, self.method)


def scheme_of(config: Mapping[str, Any], source: str, others: Sequence[str] = ()) -> Scheme | None:
    """
    Return the quantization of a `config.json`, or None. Raises SetupError if it is not supported.

    `others` are methods that the model's family reads by itself.
    """
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise SetupError(f"{source}: quantization_config is {str(given)[:60]!r}, expected an object.")
    method = given.get("quant_method")
    if method in others:
        return None
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise SetupError(
            f"{source}: weights quantized by {str(method)[:60]!r} are not supported. "
            f"Supported: {', '.join(METHODS)}. {WAY_OUT}"
        )
    try:
        return read(given)
    except _UnsupportedOption as error:
        raise SetupError(f"{source}: {method} weights with {error}. {WAY_OUT}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{source}: quantization_config of {method} is damaged: {error!r}.") from error


class _UnsupportedOption(Exception):
    """An option with its value, and the supported values."""

    def __init__(self, name: str, value: object, supported: str) -> None:
        super().__init__(f"{name} {str(value)[:60]} are not supported. Supported: {supported}")


def _group(value: Any) -> int:
    """Return the group size; -1 and None are a whole row."""
    size = -1 if value is None else int(value)
    if size != -1 and size < 1:
        raise _UnsupportedOption("group_size", value, "-1 or at least 1")
    return max(size, 0)


def _four_bits(config: Mapping[str, Any], name: str = "bits") -> None:
    if config.get(name) != 4:
        raise _UnsupportedOption(name, config.get(name), "4")


def _fp8(config: Mapping[str, Any]) -> Scheme:
    if (kind := config.get("fmt", "e4m3")) != "e4m3":
        raise _UnsupportedOption("fmt", kind, "e4m3")
    block = config.get("weight_block_size")
    if block is None:
        return Scheme(method="fp8", bits=8)
    height, width = (int(size) for size in block)
    if min(height, width) < 1:
        raise _UnsupportedOption("weight_block_size", block, "two numbers of at least 1")
    return Scheme(method="fp8", bits=8, block=(height, width))


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _four_bits(config)
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _UnsupportedOption("checkpoint_format", form, "gptq, gptq_v2")
    return Scheme(
        method="gptq", bits=4, group=_group(config.get("group_size")), zero_offset=int(form == "gptq")
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    _four_bits(config, "w_bit" if "w_bit" in config else "bits")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _UnsupportedOption("version", version, "gemm")
    return Scheme(method="awq", bits=4, group=_group(config.get("group_size", config.get("q_group_size"))))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = list(config["config_groups"].values())
    weights = [group["weights"] for group in groups]
    if not weights or any(other != weights[0] for other in weights[1:]):
        raise _UnsupportedOption("config_groups", f"of {len(weights)} kinds", "one kind of weights")
    given = weights[0]
    kind, bits, strategy = given.get("type", "int"), given.get("num_bits"), given.get("strategy", "tensor")
    forms = {form for form in (config.get("format"), *(group.get("format") for group in groups)) if form}
    named = f"{kind}{bits} in {', '.join(sorted(forms)) or 'no format'}, by {strategy}"
    if (kind, bits) == ("float", 8) and forms <= {"float-quantized", "naive-quantized"}:
        if strategy in ("tensor", "channel"):
            return Scheme(method="fp8", bits=8)
        if strategy == "block":
            height, width = (int(size) for size in given["block_structure"])
            return Scheme(method="fp8", bits=8, block=(height, width))
    if given.get("actorder") not in (None, "weight", "static", False):
        raise _UnsupportedOption("actorder", given["actorder"], "none, weight")
    group = _group(given.get("group_size")) if strategy == "group" else 0
    if strategy in ("tensor", "channel", "group"):
        if (kind, bits) == ("int", 8) and forms <= {"int-quantized", "naive-quantized"}:
            return Scheme(method="int8", bits=8, group=group)
        if (kind, bits) == ("int", 4) and forms == {"pack-quantized"}:
            return Scheme(method="int4", bits=4, group=group)
    raise _UnsupportedOption(
        "config_groups",
        named,
        "float8 by tensor, channel or block; int8 and packed int4 by tensor, channel or group",
    )


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
