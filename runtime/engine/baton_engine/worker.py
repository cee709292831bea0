"""
Assembly of one worker: loads the checkpoint, allocates the KV cache, and starts engine and transfer.

This module derives all sizes from the settings and the machine, and logs them. `baton_engine.service` adds
the role's services and the HTTP API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from baton_api import __version__
from baton_api.errors import SetupError
from baton_api.sampling import SamplingParams
from baton_api.setting_types import show_size
from baton_api.workers import Load, Role
from baton_engine import lending, machine
from baton_engine.adapters import AdapterRegistry, registry_of
from baton_engine.captured_passes import PassModel
from baton_engine.client import AsyncEngine
from baton_engine.devices import device_of, free_bytes, short, taken_bytes, warn_if_unmeasured
from baton_engine.engine import Engine
from baton_engine.grammar.grammars import Grammars
from baton_engine.graphs import CaptureLimits, GraphPasses, capture_limits, head_with_graphs, with_graphs
from baton_engine.kv.cache import (
    BLOCK_SIZE,
    KVCache,
    MemoryBudget,
    block_bytes,
    open_cache,
)
from baton_engine.kv.events import KvEvents
from baton_engine.kv.publisher import KvPublisher
from baton_engine.model.checkpoint import Checkpoint, load_spec
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.draft_head import DraftHead
from baton_engine.model.embedder import Embedder, NoEmbeddings, embedder_of
from baton_engine.model.encoder import EncoderSpec, encoder_spec, load_encoder
from baton_engine.model.loading import LoadedWeights, load_model
from baton_engine.model.native_decoder import NativeDecoder
from baton_engine.model.progress import SILENT, Progress
from baton_engine.model.resolve import resolve, served_names
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.ops.choice import dtype_of, kv_dtype, runs_kernels
from baton_engine.ops.native.products import ONE_ORDER
from baton_engine.parallel.loading import check_parallel, load_parallel
from baton_engine.parallel.parallel_head import ParallelHead
from baton_engine.parallel.ranks import ParallelModel
from baton_engine.requests import Pooling, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec
from baton_engine.speculation.head_drafts import StateKeeper
from baton_engine.speculation.loading import check_draft, load_draft, speculation_tokens, with_head
from baton_engine.tiers.opening import check_tiers, close_tiers, open_tiers
from baton_engine.tiers.tier import EngineTier
from baton_engine.tracing import WorkerTracing, tracing_of
from baton_engine.transfer import Transfer
from baton_engine.transfer.handshake import Compatibility, Identity
from baton_engine.transfer.kinds import create_transfer
from baton_engine.working_memory import DevicePeak, working_memory

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Seconds for which the engine's thread may keep the GIL while the event loop waits for it. Python's default
of 5 ms would delay every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One engine and its resources, which `open_worker` opens and closes."""

    settings: WorkerSettings
    name: str
    epoch: str
    """Random id of this start of the worker."""
    checkpoint: Checkpoint
    spec: ModelSpec
    tokenizer: Tokenizer
    grammars: Grammars
    embedder: Embedder | NoEmbeddings
    encoder: EncoderSpec | None
    """The encoder, which generates no text. None: a decoder."""
    adapters: AdapterRegistry
    cache: KVCache
    engine: Engine
    client: AsyncEngine
    compatibility: Compatibility
    transfer: Transfer | None
    """None for role `both`, which does not transfer blocks."""
    publisher: KvPublisher | None
    """Publishes the content of the prefix cache, if `settings.kv_events` is set."""
    tracing: WorkerTracing | None
    """Creates spans, if `settings.tracing_endpoint` is set."""
    weights: LoadedWeights | None
    """None: an encoder, or a model of several ranks."""
    fatal: asyncio.Future[str]
    """The reason of a failure that only a new process can recover from."""

    @property
    def model_name(self) -> str:
        """The model name in responses."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All model names that requests may use."""
        return served_names(self.settings.served_model_name, self.checkpoint, self.settings.model)

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.epoch, self.model_name, self.compatibility)

    def load(self, *, control: str = "", draining: bool = False) -> Load:
        """Return the response of `GET /load`."""
        snapshot = self.engine.snapshot()
        return Load(
            role=self.settings.role,
            model=self.model_name,
            name=self.name,
            names=self.model_names,
            adapters=self.adapters.names,
            max_model_len=self.engine.limits.max_model_len,
            running=snapshot.running,
            queued=snapshot.queued,
            queued_tokens=snapshot.queued_tokens,
            step_s=snapshot.decode_step_s,
            free_blocks=snapshot.available_blocks,
            total_blocks=snapshot.total_blocks,
            block_size=snapshot.block_size,
            draining=draining,
            control=control,
            epoch=self.epoch,
            compatibility=self.compatibility.digest,
            kv_events=self.publisher.endpoint if self.publisher else "",
            kv_replay=self.publisher.replay_endpoint if self.publisher else "",
            version=__version__,
            peers=self.settings.kv_peers and self.settings.role is not Role.BOTH,
        )

    def control_load(self) -> tuple[int, int]:
        """Return queued tokens and free blocks, for heartbeats of control connections."""
        snapshot = self.engine.snapshot()
        return snapshot.queued_tokens, snapshot.available_blocks

    def kv_batches(self) -> int:
        """Return the number of published batches of KV events."""
        return self.publisher.last + 1 if self.publisher is not None else 0

    async def warm_up(self) -> None:
        """Serve a request, so that a ready worker has served one. Raises SetupError if it fails."""
        prompt = (self.tokenizer.bos_id or 0,) * (BLOCK_SIZE + 1)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        pooling = None if self.encoder is None else Pooling.CLS
        request = Request(f"warm-up-{self.epoch}", prompt, sampling, pooling=pooling)
        tokens = 0
        async for output in self.client.generate(request):
            tokens += len(output.tokens) + (output.prompt_output is not None)
            if output.error is not None:
                raise output.error
        if not tokens:
            raise SetupError(f"{self.name} generated no token at warm-up; see its log for the reason.")


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    checkpoint: Checkpoint
    spec: ModelSpec
    tokenizer: Tokenizer
    embedder: Embedder | NoEmbeddings
    encoder: EncoderSpec | None
    model: Model
    weights_digest: str
    weights_bytes: int
    """Those of the draft model included."""
    draft: Model | None = None
    weights: LoadedWeights | None = None
    """As in `Worker`."""
    head: Checkpoint | None = None
    """That of an EAGLE-3 head."""


@contextlib.asynccontextmanager
async def open_worker(settings: WorkerSettings, progress: Progress = SILENT) -> AsyncIterator[Worker]:
    """Start a worker and warm it up. Raises SetupError if settings, model or machine do not allow it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ranks = settings.tensor_parallel_size
    check_tiers(settings)
    torch.set_num_threads(max(1, (settings.threads or machine.usable_cores()) // ranks))
    device = device_of(settings.device, ranks)
    dtype = dtype_of(settings.dtype, device)
    epoch = uuid.uuid4().hex
    name = settings.name or f"{settings.role}-{settings.port or epoch[:8]}"
    log.info("%s starts: device %s, %s, %d threads", name, device, short(dtype), torch.get_num_threads())
    warn_if_unmeasured(device, ranks)

    async with contextlib.AsyncExitStack() as stack:
        at_start = free_bytes(device)
        loaded = await asyncio.to_thread(_load, settings, name, device, dtype, progress, stack)
        cache_dtype = kv_dtype(settings.kv_cache_dtype, loaded.spec, device, dtype)
        limits = _limits(settings, loaded, device)
        cache = _open_cache(settings, loaded, limits, dtype, cache_dtype, device, at_start)
        tracing = _open_tracing(settings, name, stack)
        publisher = _open_publisher(settings, cache, stack)
        grammars = stack.enter_context(contextlib.closing(Grammars(loaded.tokenizer)))
        transfer = await _open_transfer(settings, cache, loaded.model, f"{name}-{epoch[:8]}", stack)
        model, draft, head = _capture(settings, loaded, cache, limits, dtype, stack)
        compatibility = Compatibility.of(
            loaded.spec,
            dtype,
            loaded.weights_digest,
            kv_dtype=cache_dtype,
            products=loaded.model.sums if isinstance(loaded.model, NativeDecoder) else ONE_ORDER,
        )
        tiers = await _open_tiers(settings, loaded, cache, draft, compatibility, stack)
        client, fatal = _open_engine(loaded, model, cache, limits, publisher, draft, head, tiers, stack)
        worker = Worker(
            settings=settings,
            name=name,
            epoch=epoch,
            checkpoint=loaded.checkpoint,
            spec=loaded.spec,
            tokenizer=loaded.tokenizer,
            grammars=grammars,
            embedder=loaded.embedder,
            encoder=loaded.encoder,
            adapters=registry_of(settings, loaded.spec, loaded.model, loaded.checkpoint),
            cache=cache,
            engine=client.engine,
            client=client,
            compatibility=compatibility,
            transfer=transfer,
            publisher=publisher,
            tracing=tracing,
            weights=loaded.weights,
            fatal=fatal,
        )
        await worker.adapters.load_all(settings.lora_modules)
        await worker.warm_up()
        if worker.weights is not None:
            worker.weights.store()
        yield worker


def _open_cache(
    settings: WorkerSettings,
    loaded: _LoadedModel,
    limits: EngineLimits,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    at_start: int | None,
) -> KVCache:
    """Open the cache in the data type `cache_dtype`. That of a draft model has `dtype`."""
    gpu, model = device.type == "cuda", loaded.model
    working = capture_limits(settings, model).memory if gpu else 0

    def measure() -> int:
        part = model.part if isinstance(model, ParallelModel) else model
        return working_memory(part, limits, cache_dtype, device, DevicePeak(device)) if gpu else 0

    if isinstance(model, ParallelModel):
        model.connect(limits if gpu else None, cache_dtype, measure)
        largest = model.working
    else:
        largest = measure()
    if largest:
        log.info("The largest forward pass needs %s beside weights and KV cache", show_size(largest))
        working += largest
    free = free_bytes(device)
    memory = MemoryBudget(
        at_start=at_start,
        weights=loaded.weights_bytes,
        free=None if free is None else free - (loaded.weights.mapped_bytes if loaded.weights else 0),
        gpu=gpu,
        working=working,
    )
    if not isinstance(model, ParallelModel):
        beside = block_bytes(loaded.draft.spec, dtype) if loaded.draft else 0
        return open_cache(settings, loaded.spec, cache_dtype, device, memory, beside)
    part, memory = model.part.spec, model.budget(memory)
    beside = 0 if gpu else (settings.tensor_parallel_size - 1) * block_bytes(part, cache_dtype)
    return open_cache(settings, part, cache_dtype, device, memory, beside, model.open_cache)


def _open_tracing(
    settings: WorkerSettings, name: str, stack: contextlib.AsyncExitStack
) -> WorkerTracing | None:
    tracing = tracing_of(settings.tracing_endpoint, name)
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    return tracing


async def _open_transfer(
    settings: WorkerSettings, cache: KVCache, model: Model, agent: str, stack: contextlib.AsyncExitStack
) -> Transfer | None:
    if settings.role is Role.BOTH:
        return None
    others = model.pools if isinstance(model, ParallelModel) else None
    transfer = await create_transfer(settings.transfer, cache, agent, others)
    stack.push_async_callback(transfer.close)
    return transfer


def _capture(
    settings: WorkerSettings,
    loaded: _LoadedModel,
    cache: KVCache,
    limits: EngineLimits,
    dtype: torch.dtype,
    stack: contextlib.AsyncExitStack,
) -> tuple[Model, tuple[Model, KVCache] | None, tuple[StateKeeper, PassModel] | None]:
    """Capture decode passes. Returns the model, the draft model with its cache and the draft head, if any."""
    taken = partial(taken_bytes, cache.kv.device)
    before, began = taken(), time.monotonic()
    captures = capture_limits(settings, loaded.model)
    drafting = _head_of(loaded.model)
    if drafting is not None and limits.speculation_tokens:
        drafting.reserve(limits.results)
    model = with_graphs(loaded.model, cache, limits, captures, taken)

    def left(captures: CaptureLimits) -> CaptureLimits:
        memory = captures.memory - (taken() - before)
        seconds = max(0.0, captures.seconds - (time.monotonic() - began))
        return replace(captures, memory=memory, seconds=seconds, adapter_rank=0)  # drafts have none

    models: list[PassModel] = [model]
    draft, head = None, None
    if loaded.draft is not None:
        drafts = KVCache(loaded.draft.spec, cache.blocks, dtype, cache.kv.device)
        limits_of_draft = left(capture_limits(settings, loaded.draft))
        draft = with_graphs(loaded.draft, drafts, limits, limits_of_draft, taken), drafts
        models.append(draft[0])
    elif drafting is not None and limits.speculation_tokens:
        head = drafting, head_with_graphs(drafting, cache, limits, left(captures), taken)
        models.append(head[1])
    for captured in models:
        if isinstance(captured, GraphPasses):
            stack.callback(captured.close)
    return model, draft, head


def _head_of(model: Model) -> DraftHead | ParallelHead | None:
    if isinstance(model, ParallelModel):
        return ParallelHead(model.part.drafts, model.ranks) if model.part.drafts is not None else None
    return model.drafts if isinstance(model, Decoder) else None


async def _open_tiers(
    settings: WorkerSettings,
    loaded: _LoadedModel,
    cache: KVCache,
    draft: tuple[Model, KVCache] | None,
    compatibility: Compatibility,
    stack: contextlib.AsyncExitStack,
) -> list[EngineTier]:
    if settings.kv_memory_tier and loaded.encoder is not None:
        raise SetupError(
            f"--kv-memory-tier has no use with {loaded.checkpoint.name}, which generates no text."
        )
    paths = (loaded.checkpoint.path, None if loaded.head is None else loaded.head.path)
    drafts = 0 if draft is None else draft[1].kv.nbytes
    tiers = await asyncio.to_thread(open_tiers, settings, cache, drafts, *paths, compatibility.digest)
    stack.push_async_callback(asyncio.to_thread, close_tiers, tiers)
    return tiers


def _open_engine(
    loaded: _LoadedModel,
    model: Model,
    cache: KVCache,
    limits: EngineLimits,
    publisher: KvPublisher | None,
    draft: tuple[Model, KVCache] | None,
    head: tuple[StateKeeper, PassModel] | None,
    tiers: list[EngineTier],
    stack: contextlib.AsyncExitStack,
) -> tuple[AsyncEngine, asyncio.Future[str]]:
    """Start the engine; also return the future for the reason of a fatal failure."""
    loop = asyncio.get_running_loop()
    fatal: asyncio.Future[str] = loop.create_future()

    def settle(reason: str) -> None:
        if not fatal.done():
            fatal.set_result(reason)

    def on_fatal(reason: str) -> None:
        loop.call_soon_threadsafe(settle, reason)

    kv_events = KvEvents(publisher) if publisher is not None else None
    if isinstance(loaded.model, ParallelModel):
        loaded.model.ranks.watch(on_fatal)
    client = AsyncEngine(
        model, cache, limits, on_fatal=on_fatal, kv_events=kv_events, draft=draft, head=head, tiers=tiers
    )
    client.start()
    stack.push_async_callback(client.close)
    return client, fatal


def _load(
    settings: WorkerSettings,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    stack: contextlib.AsyncExitStack,
) -> _LoadedModel:
    checkpoint = resolve(settings.model, progress)
    encoder = encoder_spec(checkpoint)
    spec = load_spec(checkpoint) if encoder is None else encoder.model
    if settings.tensor_parallel_size > 1:
        check_parallel(settings, spec, checkpoint.name, encodes=encoder is not None)
    check_draft(settings, spec, checkpoint.name)
    kv_dtype(settings.kv_cache_dtype, spec, device, dtype)  # raises before the weights are loaded
    if settings.max_model_len > spec.context:
        raise SetupError(
            f"--max-model-len {settings.max_model_len} exceeds the context length of {checkpoint.name}, "
            f"{spec.context} tokens. Set at most that."
        )
    if encoder is not None:
        return _LoadedModel(checkpoint, *load_encoder(settings, checkpoint, encoder, device, dtype, progress))
    tokenizer = load_tokenizer(checkpoint, spec)
    spec = spec.served_to(settings.max_model_len or spec.context)
    spec, eagle3 = with_head(settings, spec, checkpoint, device, dtype, progress)
    embedder = embedder_of(checkpoint, settings.pooling, shortens=settings.matryoshka)
    if isinstance(embedder, Embedder):
        log.info("%s supports embeddings: %s", checkpoint.name, embedder)
    if settings.tensor_parallel_size > 1:
        parts = load_parallel(settings, name, checkpoint, spec, device, dtype, progress, stack, eagle3)
        return _LoadedModel(checkpoint, spec, tokenizer, embedder, None, *parts)
    threads, cores = torch.get_num_threads(), machine.usable_cores()
    seat = lending.take_seat(settings.shared_cores, threads, cores, settings.compute_share)
    weights = load_model(settings, checkpoint, spec, device, dtype, progress, seat, eagle3)
    draft, draft_size = load_draft(settings, spec, device, dtype, progress, seat)
    return _LoadedModel(
        checkpoint,
        spec,
        tokenizer,
        embedder,
        None,
        weights.model,
        weights.digest,
        weights.bytes + draft_size,
        draft,
        weights,
        eagle3,
    )


def _open_publisher(
    settings: WorkerSettings, cache: KVCache, stack: contextlib.AsyncExitStack
) -> KvPublisher | None:
    if not settings.kv_events:
        return None
    publisher = KvPublisher(
        settings.kv_events,
        settings.kv_replay,
        advertise=settings.advertise_host,
        topic=settings.kv_topic,
        block_size=cache.block_size,
        tokens=settings.kv_tokens,
    )
    log.info("KV events at %s, replayed at %s", publisher.endpoint, publisher.replay_endpoint)
    publisher.start()
    stack.callback(publisher.close)
    return publisher


def _limits(settings: WorkerSettings, loaded: _LoadedModel, device: torch.device) -> EngineLimits:
    on_cpu = device.type == "cpu"
    exact_rows = isinstance(loaded.model, NativeDecoder) and loaded.model.exact_rows
    # Without kernels, the host waits for the logits to select tokens: outside the limit of a wait for ranks.
    launches_ahead = (
        isinstance(loaded.model, Decoder | ParallelModel) and not on_cpu and runs_kernels(device.type)
    )
    limits = EngineLimits(
        max_model_len=settings.max_model_len or loaded.spec.context,
        chunk_tokens=settings.chunk_tokens or (512 if on_cpu else 4096),
        whole_prompts=loaded.encoder is not None,
        mixed_chunk_tokens=settings.mixed_chunk_tokens or (128 if on_cpu else 0),
        max_running=settings.max_running or (64 if on_cpu else 256),
        max_queued=settings.max_queued,
        local_prefill_tokens=settings.local_prefill_tokens,
        last_chunk_tokens=settings.last_chunk_tokens,
        quarantine_limit=settings.quarantine_limit,
        speculation_tokens=speculation_tokens(settings, exact_rows),
        overlap=settings.overlap and launches_ahead,
    )
    sizes = limits.chunk_tokens, limits.max_running, limits.max_model_len
    log.info("chunked_prefill_size=%d, max_running_requests=%d, context_len=%d", *sizes)
    return limits
