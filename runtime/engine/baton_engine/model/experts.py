"""
Experts of a mixture-of-experts model: their number and sizes, and how a router chooses them for each token.

`baton_engine.ops.experts` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton_api.errors import SetupError

MOST_EXPERTS = 4_096
MOST_INTERMEDIATE = 1_048_576
"""Upper bounds of sizes, above those of any published model. A larger number indicates a damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Experts of the layers that have them. A layer with a dense MLP beside its experts adds both."""

    count: int
    chosen: int
    """Experts that compute one token."""
    intermediate: int
    """Size of one expert's intermediate states."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits whose largest values choose experts and weigh their results."""
    normalized: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of experts; a token chooses groups first."""
    chosen_groups: int = 1
    group_best: int = 1
    """Number of experts whose scores are added to a group's score."""
    corrected: bool = False
    """Whether a correction is added to scores that choose experts, but not to weights (DeepSeek-V3)."""
    weighs_inputs: bool = False
    """Whether an expert's input is weighted instead of its result (Llama 4)."""
    biased: bool = False
    """Whether the router and the experts have biases (gpt-oss)."""
    clamp: float | None = None
    """Limit of gate and up, with gate * sigmoid(slope * gate) * (up + 1). None: the MLP's activation."""
    slope: float = 1.0
    shared: int = 0
    """Intermediate size of the expert that computes all tokens, without a weight; 0 means no such expert."""
    layers: tuple[bool, ...] = ()
    """Whether each layer has experts; empty means that all layers have them."""

    def in_layer(self, layer: int) -> bool:
        return not self.layers or self.layers[layer]


def check_experts(experts: ExpertSpec, layers: int, source: str) -> None:
    """Validate the experts of a model with `layers` layers. Raises SetupError, which names `source`."""
    if not 1 <= experts.count <= MOST_EXPERTS:
        raise SetupError(f"{source}: the number of experts is {experts.count}, expected 1 to {MOST_EXPERTS}.")
    if not 1 <= experts.chosen <= experts.count:
        raise SetupError(
            f"{source}: each token uses {experts.chosen} experts, expected 1 to {experts.count}."
        )
    if not 1 <= experts.intermediate <= MOST_INTERMEDIATE:
        raise SetupError(
            f"{source}: the intermediate size of experts is {experts.intermediate}, expected 1 to "
            f"{MOST_INTERMEDIATE}."
        )
    if experts.shared < 0 or experts.shared > MOST_INTERMEDIATE:
        raise SetupError(
            f"{source}: the intermediate size of shared experts is {experts.shared}, expected 0 to "
            f"{MOST_INTERMEDIATE}."
        )
    _check_groups(experts, source)
    if experts.layers and len(experts.layers) != layers:
        raise SetupError(
            f"{source}: {len(experts.layers)} layers have or lack experts, but the model has {layers}."
        )


def _check_groups(experts: ExpertSpec, source: str) -> None:
    groups, size = experts.groups, experts.count // max(experts.groups, 1)
    if groups < 1 or experts.count % groups or experts.group_best > size:
        raise SetupError(f"{source}: {experts.count} experts cannot form {groups} groups.")
    if not 1 <= experts.chosen_groups <= groups or experts.chosen > experts.chosen_groups * size:
        raise SetupError(
            f"{source}: {experts.chosen} experts of a token cannot be in {experts.chosen_groups} of "
            f"{groups} groups."
        )


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a `config.json`. transformers renamed it. Raises KeyError."""
    for name in ("num_local_experts", "n_routed_experts"):
        if config.get(name) is not None:
            return int(config[name])
    return int(config["num_experts"])


def gguf_experts(metadata: Mapping[str, Any], intermediate: int) -> ExpertSpec | None:
    """
    Return the experts of a GGUF file whose weights are normalized, or None for a dense model.

    `intermediate` is the experts' size if the file has no `expert_feed_forward_length`.
    """
    count = int(metadata.get("expert_count", 0))
    if not count:
        return None
    return ExpertSpec(
        count=count,
        chosen=int(metadata["expert_used_count"]),
        intermediate=int(metadata.get("expert_feed_forward_length", intermediate)),
        normalized=True,
    )
