"""Loads the draft model of a worker, and finds its draft head."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_engine.lending import Seat
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights, read_json
from baton_engine.model.decoder import Model, create_model
from baton_engine.model.head_loading import head_of, is_eagle3
from baton_engine.model.progress import Progress
from baton_engine.model.resolve import resolve
from baton_engine.model.weights import WeightsSummary, show_formats
from baton_engine.ops.choice import kept_formats
from baton_engine.ops.native import support
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec, Quantize

log = logging.getLogger(__name__)


def check_draft(settings: WorkerSettings, spec: ModelSpec, name: str) -> None:
    """Raise SetupError if `settings` contradict each other, or the model `name` generates no text."""
    kind = settings.speculation
    if kind not in ("draft", "eagle3") and settings.draft_model:
        raise SetupError(
            f"--draft-model {settings.draft_model} has no effect with --speculation {kind}. Set "
            "--speculation draft, or eagle3 for an EAGLE-3 head, or omit the draft model."
        )
    if kind in ("draft", "eagle3") and not settings.draft_model:
        what = "a draft model" if kind == "draft" else "the folder of an EAGLE-3 head"
        raise SetupError(f"--speculation {kind} requires {what}. Set --draft-model.")
    if kind in ("draft", "eagle3", "mtp") and spec.headless:
        raise SetupError(
            f"--speculation {kind} has no effect: {name} generates no text. Omit it and --draft-model."
        )


def with_head(
    settings: WorkerSettings,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> tuple[ModelSpec, Checkpoint | None]:
    """
    Return the spec of a model with the draft head of `settings`, and the head's checkpoint if it has its own.

    A prefill worker has the head too: it computes the head's keys and values of prompts, which are part of
    their blocks. Raises SetupError if there is no head, or it does not fit the model.
    """
    if settings.speculation not in ("mtp", "eagle3"):
        if settings.speculation == "auto" and spec.draft_layers:
            log.info("%s declares an MTP layer: with --speculation mtp, drafts come from it", checkpoint.name)
        return spec, None
    own = resolve(settings.draft_model, progress) if settings.speculation == "eagle3" else None
    head = head_of(spec, checkpoint, own)
    log.info("Draft head: %s", head)
    if device.type == "cpu" and settings.tensor_parallel_size == 1 and support.supports(spec, dtype):
        log.warning(
            "--speculation %s is slower than none on a CPU: its kernels compute no draft heads, so torch "
            "computes the model. Use --speculation auto.",
            settings.speculation,
        )
    return replace(spec, draft_head=head), own


def speculation_tokens(settings: WorkerSettings, exact_rows: bool) -> int:
    """
    Maximum draft tokens of a sequence in a pass; 0 if the worker computes none.

    `exact_rows`: whether the bits of a token's logits do not depend on the other tokens of its pass. A worker
    for prompts alone generates nothing.
    """
    if settings.role is Role.PREFILL or settings.speculation == "off":
        return 0
    if settings.speculation == "auto" and not exact_rows:
        return 0
    return settings.speculation_tokens


def load_draft(
    settings: WorkerSettings,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    seat: Seat | None,
) -> tuple[Model | None, int]:
    """
    Load the draft model for a model of `spec`. Returns it, if there is one, and the bytes of its weights.

    A prefill worker generates no answers, so it loads none: it may have the settings of the decode workers.
    Raises SetupError if the draft model does not fit the model.
    """
    if settings.speculation != "draft" or settings.role is Role.PREFILL:
        return None, 0
    checkpoint = resolve(settings.draft_model, progress)
    if not checkpoint.is_gguf and is_eagle3(read_json(checkpoint.path / "config.json")):
        raise SetupError(
            f"{checkpoint.name} is an EAGLE-3 head, not a model. Set --speculation eagle3, on prefill "
            "workers too."
        )
    draft = load_spec(checkpoint)
    if draft.headless or draft.vocab != spec.vocab:
        size = "no head" if draft.headless else f"a vocabulary of {draft.vocab} tokens"
        raise SetupError(
            f"The draft model {checkpoint.name} has {size}, and the model has a vocabulary of {spec.vocab} "
            "tokens. Use a smaller generative model of the same family."
        )
    context = settings.max_model_len or spec.context
    if draft.context < context:
        raise SetupError(
            f"The draft model {checkpoint.name} has a context of {draft.context} tokens, the model has "
            f"{context}. Set --max-model-len {draft.context}, or use another draft model."
        )
    choice: Quantize = "off" if settings.quantize == "off" else "keep"
    quantize, formats = kept_formats(choice, draft, device, dtype)
    summary = WeightsSummary(
        load_weights(checkpoint, draft, dtype, progress, quantize, formats=formats, device=device, lazy=True)
    )
    model = create_model(draft, summary.weights, device, dtype, seat=seat)
    sizes = summary.formats
    log.info("Draft model: %s, %s, %s", checkpoint.name, draft.architecture, show_formats(sizes))
    return model, sizes.total()
