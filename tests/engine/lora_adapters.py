"""LoRA adapters with random weights, made by PEFT itself, so that a folder is just what a user would have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, base: Path, *, seed: int = 1, targets: str | Sequence[str] = "all-linear", **options: Any
) -> Path:
    """An adapter of the model in `base`; `options` go to its configuration. Neither matrix is 0."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given = targets if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=given, **options)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    adapted.save_pretrained(folder)
    return folder
