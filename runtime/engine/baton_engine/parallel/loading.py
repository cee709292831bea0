"""Loads a model on several ranks: checks that it can be divided, and starts the ranks."""

from __future__ import annotations

import contextlib
import logging

import torch

from baton_api import logs
from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_engine.model.checkpoint import Checkpoint, load_weights
from baton_engine.model.decoder import create_decoder
from baton_engine.model.group import Group
from baton_engine.model.head_loading import with_eagle3
from baton_engine.model.progress import SILENT, Progress
from baton_engine.model.shards import Shard, check_degree, check_head_degree
from baton_engine.model.weights import WeightsSummary, show_formats, weights_digest
from baton_engine.ops.choice import kept_formats
from baton_engine.parallel.messages import Start
from baton_engine.parallel.ranks import TIMEOUT_S, ParallelModel, Ranks
from baton_engine.settings import WorkerSettings
from baton_engine.spec import HeadSpec, ModelSpec

log = logging.getLogger(__name__)


def check_parallel(settings: WorkerSettings, spec: ModelSpec, name: str, *, encodes: bool) -> None:
    """Raise SetupError if the ranks of `settings` cannot compute the model `name`. `encodes`: an encoder."""
    size = settings.tensor_parallel_size
    flag = f"--tensor-parallel-size {size}"
    if encodes:
        raise SetupError(f"{flag} does not support encoders such as {name}. Start more workers instead.")
    if settings.speculation == "draft":
        raise SetupError(f"{flag} does not support --speculation draft. Use mtp, eagle3, ngram or off.")
    if settings.enable_lora:
        raise SetupError(f"{flag} does not support --enable-lora. Use --tensor-parallel-size 1.")
    check_degree(spec, size, name)


def check_parallel_head(settings: WorkerSettings, head: HeadSpec, spec: ModelSpec) -> None:
    """Raise SetupError if the ranks of `settings`, which can compute a model of `spec`, cannot its head."""
    size, shard = settings.tensor_parallel_size, Shard(0, settings.tensor_parallel_size)
    check_head_degree(head, spec, size)
    if settings.role is not Role.BOTH and shard.parts(head.layer.kv_heads) != shard.parts(spec.kv_heads):
        raise SetupError(
            f"--tensor-parallel-size {size} does not support --role {settings.role} with the draft head "
            f"({head.kind}): it has {head.layer.kv_heads} key heads and the model {spec.kv_heads}, which are "
            "not divided alike. Choose a lower degree, or --role both."
        )


def load_parallel(
    settings: WorkerSettings,
    worker: str,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    stack: contextlib.ExitStack | contextlib.AsyncExitStack,
    eagle3: Checkpoint | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[ParallelModel, str, int]:
    """
    Load the model on all ranks, whose processes `stack` ends.

    `eagle3` has the weights of the head of `spec`, if that has a checkpoint of its own. An operation fails
    after `timeout_s` without a rank. Returns the model, the digest of all weights, and the
    bytes of rank 0's part. Raises SetupError.
    """
    if spec.draft_head is not None:
        check_parallel_head(settings, spec.draft_head, spec)
    size, kind = settings.tensor_parallel_size, str(dtype).removeprefix("torch.")
    quantize, formats = kept_formats(settings.quantize, spec, device, dtype, ranks=size)
    start = Start(
        rank=1,
        size=size,
        worker=worker,
        checkpoint=str(checkpoint.path),
        name=checkpoint.name,
        context=settings.max_model_len or spec.context,
        dtype=kind,
        quantize=settings.quantize,
        device=str(device),
        threads=torch.get_num_threads(),
        drafts=spec.draft_head is not None,
        eagle3=str(eagle3.path) if eagle3 is not None else "",
        store="",
        timeout_s=timeout_s,
        log_format=logs.for_children()[logs.VARIABLE],
    )
    ranks = Ranks(start, [_device(device, rank) for rank in range(size)])
    stack.callback(ranks.close)
    shard = Shard(0, size)
    weights = load_weights(
        checkpoint, spec, dtype, progress, quantize, shard, formats=formats, device=device, lazy=True
    )
    summary = WeightsSummary(with_eagle3(weights, eagle3, spec, dtype, device, shard))
    group = Group(shard, spec.vocab, torch.device(_device(device, 0)))
    part = create_decoder(shard.spec(spec), summary.weights, device, dtype, group)
    sizes = summary.formats
    log.info("Weights of rank 0: %s", show_formats(sizes))
    sampled = load_weights(checkpoint, spec, dtype, SILENT, quantize, sampled=True, formats=formats)
    digest = weights_digest(with_eagle3(sampled, eagle3, spec, dtype, torch.device("cpu")))
    return ParallelModel(spec, part, group, ranks, ranks.load()), digest, sizes.total()


def _device(first: torch.device, rank: int) -> str:
    return "cpu" if first.type == "cpu" else f"{first.type}:{(first.index or 0) + rank}"
