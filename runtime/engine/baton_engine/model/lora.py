"""
LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds x A^T B^T, scaled, to linears of a model (https://arxiv.org/abs/2106.09685). Everything that
changes results and is not implemented is refused, so that no answer is approximate.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.rope import in_halves
from baton_engine.model.safetensors import FLOATS, read_header
from baton_engine.ops import LowRankLinear, LowRankOutputs
from baton_engine.spec import ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
"""Files of an adapter."""

FUSED = {"qkv": ("q", "k", "v"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}
"""Linears of a decoder layer, and the projections that each computes, in the order of its outputs. Names are
those of `TensorNames`."""

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of modules."""

HARMLESS = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "lora_dropout", "loftq_config", "lora_ga_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "task_type",
    )
)  # fmt: skip
"""Options of training, or that matter only with an option that is refused."""

READ = frozenset(
    (
        "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora",
    )
)  # fmt: skip

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` for which PEFT changes the weights of the base model too."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The part of one projection, in fp32. r: rank."""

    a: Tensor
    """[r, in]"""
    b: Tensor
    """[out, r], multiplied by the adapter's scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """One adapter, checked against a model."""

    digest: str
    """32 hexadecimal digits: a digest of both files."""
    rank: int
    """The largest rank of a projection."""
    layers: tuple[Mapping[str, LowRank], ...]
    """For each layer the adapted projections by their names in `TensorNames`."""


def read_lora(folder: Path, spec: ModelSpec, max_rank: int) -> LoraWeights:
    """
    Read and check the adapter in `folder`.

    Raises SetupError if it is damaged, made for another model, of a rank above `max_rank`, or has an option
    that is not implemented.
    """
    config = _read_config(folder / CONFIG)
    _check_options(folder, config)
    path = _weights_file(folder)
    header = read_header(path)
    shapes = projection_shapes(spec)
    targets = _targets(folder, config, shapes)
    wanted: dict[str, tuple[str, str]] = {}
    for module in targets:
        names = (f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight")
        _check_shapes(path, config, module, names, header, shapes[module][2:], max_rank)
        wanted[module] = names
    expected = {name for names in wanted.values() for name in names}
    if unknown := sorted(header.keys() - expected):
        raise SetupError(
            f"{path} has {len(unknown)} tensors that do not belong to the adapted linears of "
            f"{spec.architecture} with {spec.layers} layers, such as {unknown[0][:200]!r}. The adapter was "
            "made for another model or method. Supported: q, k, v, o, gate, up and down projections."
        )
    return _read_weights(
        folder, spec, config, {shapes[module][:2]: names for module, names in wanted.items()}
    )


def projection_shapes(spec: ModelSpec) -> dict[str, tuple[int, str, int, int]]:
    """
    Return layer, name in `TensorNames`, inputs and outputs of each module that adapters may target.

    The model has neither experts nor latent attention.
    """
    names = BY_ARCHITECTURE[spec.architecture].tensors
    n, f, d = spec.hidden, spec.intermediate, spec.head_dim
    sizes = {
        "q": (n, spec.heads * d),
        "k": (n, spec.kv_heads * d),
        "v": (n, spec.kv_heads * d),
        "output": (spec.heads * d, n),
        "gate": (n, f),
        "up": (n, f),
        "down": (f, n),
    }
    for linear, parts in FUSED.items():
        if linear not in sizes and getattr(names, linear):  # stacked in the family's checkpoints
            sizes[linear] = (n, sum(sizes.pop(part)[1] for part in parts))
    return {
        f"{names.layer.format(layer)}{getattr(names, part)}": (layer, part, *size)
        for layer in range(spec.layers)
        for part, size in sizes.items()
    }


def low_rank_linears(
    spec: ModelSpec, layer: Mapping[str, LowRank], dtype: torch.dtype, device: torch.device
) -> dict[str, LowRankLinear]:
    """Return the parts of one layer by the names of its linears, see `FUSED`. Others are omitted."""
    outputs = {part: size for _, part, _, size in projection_shapes(spec).values()}
    linears = {}
    for linear, parts in FUSED.items():
        start = rank = 0
        pieces, stacked = [], []
        for part in (linear,) if linear in outputs else parts:
            if (low_rank := layer.get(part)) is not None:
                pieces.append(LowRankOutputs(start, rank, low_rank.b.to(device, dtype).contiguous()))
                stacked.append(low_rank.a)
                rank += len(low_rank.a)
            start += outputs[part]
        if stacked:
            a = torch.cat(stacked).to(device, dtype).contiguous()
            linears[linear] = LowRankLinear(a, tuple(pieces))
    return linears


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise SetupError(
            f"{path.parent} is not an adapter: it has no {CONFIG}. Save adapters with PEFT's save_pretrained."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"Cannot read {path}: {error}.") from error
    if not isinstance(config, dict):
        raise SetupError(f"{path} is not a JSON object.")
    return config


def _check_options(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise SetupError(
            f"{folder}: peft_type is {config.get('peft_type')!r}, but only LORA adapters are supported."
        )
    if config.get("bias", "none") != "none":
        raise SetupError(
            f"{folder}: bias is {config['bias']!r}, but biases are not supported. Train with bias none."
        )
    initial = str(config.get("init_lora_weights", "")).lower()
    if initial.startswith(CHANGES_BASE):
        raise SetupError(
            f"{folder}: init_lora_weights is {initial!r}, which changes the base model too. Convert the "
            "adapter: save_pretrained with path_initial_model_for_weight_conversion."
        )
    if config.get("layers_pattern") not in (None, "", [], "layers", ["layers"]):
        raise SetupError(f"{folder}: layers_pattern is {config['layers_pattern']!r}; expected 'layers'.")
    for name, value in config.items():
        if name not in HARMLESS and name not in READ and value not in (None, False, [], {}, ""):
            raise SetupError(
                f"{folder}: {name} is {str(value)[:200]!r}, which is not supported. Merge the adapter into "
                "the weights of its model, or train it without this option."
            )


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_file():
        return path
    if (folder / "adapter_model.bin").is_file():
        raise SetupError(
            f"{folder} contains pickled weights (adapter_model.bin), which are not loaded: a pickle can run "
            "any code. Save the adapter with safe_serialization."
        )
    raise SetupError(f"{folder} has no {WEIGHTS}.")


def _targets(
    folder: Path, config: Mapping[str, Any], modules: Mapping[str, tuple[int, str, int, int]]
) -> list[str]:
    """Return the modules that PEFT would adapt. Raises SetupError if a target is not supported."""
    given = config.get("target_modules")
    if not isinstance(given, str | list) or not given:
        raise SetupError(f"{folder}: target_modules is {given!r}; expected names of modules or all-linear.")
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or None
    try:
        excluded = set(_matching(config.get("exclude_modules") or [], modules))
        targets = [module for module in _matching(given, modules) if module not in excluded]
    except (re.error, TypeError) as error:
        raise SetupError(f"{folder}: target_modules or exclude_modules is invalid: {error}.") from error
    if layers is not None and not isinstance(given, str):
        targets = [module for module in targets if modules[module][0] in layers]
    for target in given if isinstance(given, list) else ():
        if not any(_is_named(module, target) for module in modules):
            raise SetupError(
                f"{folder}: target_modules contains {str(target)[:200]!r}, not a supported linear of this "
                "model. Supported: q, k, v, o, gate, up and down projections."
            )
    if not targets:
        raise SetupError(f"{folder}: target_modules {str(given)[:200]!r} matches no linear of this model.")
    return targets


def _matching(given: str | Sequence[str], modules: Mapping[str, Any]) -> Iterator[str]:
    for module in modules:
        if isinstance(given, str):
            if given == "all-linear" or re.fullmatch(given, module):
                yield module
        elif any(_is_named(module, target) for target in given):
            yield module


def _is_named(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _check_shapes(
    path: Path,
    config: Mapping[str, Any],
    module: str,
    names: tuple[str, str],
    header: Mapping[str, Any],
    size: Sequence[int],
    max_rank: int,
) -> None:
    """Compare the tensors of one module with the configuration and the model. Raises SetupError."""
    rank = _of_pattern(path, config, "rank_pattern", "r", module)
    if not isinstance(rank, int) or rank < 1:
        raise SetupError(f"{path.parent}: the rank of {module} is {rank!r}; expected an integer >= 1.")
    if rank > max_rank:
        raise SetupError(
            f"{path.parent}: the rank of {module} is {rank}, but --max-lora-rank is {max_rank}. Set at least "
            f"--max-lora-rank {rank}."
        )
    inputs, outputs = size
    for name, shape in zip(names, ([rank, inputs], [outputs, rank]), strict=True):
        if name not in header:
            raise SetupError(
                f"{path} lacks the tensor {name}. The adapter is damaged, or was made for another model."
            )
        if header[name]["shape"] != shape:
            raise SetupError(
                f"{path}: tensor {name} has shape {header[name]['shape']}, but this model and the "
                f"configuration require {shape}. The adapter was made for another model."
            )
        if header[name]["dtype"] not in FLOATS:
            raise SetupError(
                f"{path}: tensor {name} has the unsupported dtype {header[name]['dtype']}. "
                f"Supported: {', '.join(FLOATS)}."
            )


def _of_pattern(path: Path, config: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return the option of `module`: of the first pattern that matches its name's end, or the default."""
    given = config.get(patterns) or {}
    try:
        for pattern, value in given.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except (re.error, AttributeError) as error:
        raise SetupError(f"{path.parent}: {patterns} is invalid: {error}.") from error
    return config.get(default, 8)


def _read_weights(
    folder: Path,
    spec: ModelSpec,
    config: Mapping[str, Any],
    wanted: Mapping[tuple[int, str], tuple[str, str]],
) -> LoraWeights:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    layers: list[dict[str, LowRank]] = [{} for _ in range(spec.layers)]
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    try:
        with path.open("rb") as stored:
            digest.update(hashlib.file_digest(stored, "sha256").digest())
        with safe_open(path, framework="pt") as file:
            for (layer, part), (a_name, b_name) in wanted.items():
                a, b = (file.get_tensor(name).to(torch.float32) for name in (a_name, b_name))
                if part in ("q", "k") and BY_ARCHITECTURE[spec.architecture].interleaved:
                    b = in_halves(b, spec.heads if part == "q" else spec.kv_heads, spec.rotated)
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise SetupError(f"{path}: {a_name} or {b_name} contains values that are not finite.")
                module = a_name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                layers[layer][part] = LowRank(a, b * _scale(path, config, module, len(a)))
    except (OSError, SafetensorError) as error:
        raise SetupError(f"Cannot read {path}: {error}.") from error
    rank = max(len(low_rank.a) for layer in layers for low_rank in layer.values())
    return LoraWeights(digest=digest.hexdigest()[:32], rank=rank, layers=tuple(layers))


def _scale(path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_pattern(path, config, "alpha_pattern", "lora_alpha", module)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise SetupError(f"{path.parent}: lora_alpha of {module} is {alpha!r}; expected a number.")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
