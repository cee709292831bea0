"""
Requests of the engine: token ids in, token ids out.

The engine does not handle text; the API applies templates, detokenizes and finds stop strings. A request
whose prompt is computed by a prefill worker has a `RemotePrefill`. A request that computes a prompt for a
decode worker has an `Export`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_api.hashing import root_hash
from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.tracing import StepSummary

if TYPE_CHECKING:
    from baton_engine.streams import Event


class GrammarMatcher(Protocol):
    """
    Computes the allowed next tokens of one request. Used on the engine's thread only.

    It keeps its state when a request is retracted, because it depends on the tokens and not on their KV.
    """

    @property
    def finished(self) -> bool:
        """Whether the output is complete, and only an end-of-sequence token may follow."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that are allowed where the output may end; sampling one ends the output."""
        ...

    def fill(self, mask: NDArray[np.int32]) -> bool:
        """
        Set bit `token % 32` of word `token // 32` for every allowed next token.

        Returns False if all tokens are allowed; the content of `mask` [ceil(V / 32)] is then undefined. May
        take a millisecond, and releases the GIL. Raises a BatonError if no token is allowed.
        """
        ...

    def push(self, token: int) -> None:
        """
        Advance by a token that was sampled by this worker, or by the worker that computed the prompt.

        Raises a BatonError if the token is not allowed.
        """
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter. Requests hold it until they end, even if it is unloaded; then its memory is freed."""

    name: str
    """Name in requests, as `model`."""
    path: str
    """Location from which it was loaded, as given."""
    digest: str
    """Digest of its files. Prompts with adapters of equal digests share their blocks."""
    rank: int
    weights: Any
    """As `Model.prepare_adapter` returned it."""


class Pooling(enum.StrEnum):
    """How the final hidden states of a prompt are pooled into one vector."""

    MEAN = "mean"
    """The mean of all tokens' states."""
    LAST = "last"
    """The last token's state."""
    CLS = "cls"
    """The first token's state, of an encoder."""
    SCORE = "score"
    """The scores that an encoder's head computes of the first token's state."""


Vector = NDArray[np.float32]
"""[N], as pooled: not normalized."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the n - 1 tokens after the first one of a prompt of n tokens."""

    logprobs: NDArray[np.float32]
    """[n - 1] logprobs of the prompt's tokens."""
    ranks: NDArray[np.int64]
    """[n - 1] ranks of the prompt's tokens in the vocabulary by logprob; 1 is the most likely token."""
    top_ids: NDArray[np.int64]
    """[n - 1, k] most likely tokens, in descending order."""
    top: NDArray[np.float32]
    """[n - 1, k] logprobs of `top_ids`."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop id was sampled, the server found a stop string, or the request wanted a vector only."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """Queue and compute time of a prompt that this worker computed."""

    queue_s: float
    """Until the request was admitted."""
    compute_s: float
    """From admission to the first token, including work for other requests in the same passes."""


TierTokens = tuple[tuple[str, int], ...]
"""Tokens of prompts by the name of a tier."""


class Output(msgspec.Struct, frozen=True):
    """The output of one step for one request. Made for each token, so no dataclass: these are slower."""

    request_id: str
    tokens: tuple[TokenChoice, ...] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended the request; it is the last of `tokens`."""
    cached_tokens: int = 0
    """
    Prompt tokens that no worker computed for this request: with the first output and the last one; else 0.
    """
    peer_tokens: int = 0
    """Those of `cached_tokens` that the worker that computed the rest read from another worker."""
    tier_tokens: TierTokens = ()
    """Those of `cached_tokens` that it restored, by tier."""
    tail: bytes = b""
    """With the first token: chain hash of the prompt's last full block; empty without one."""
    fallback: str = ""
    """
    With the first token: why `Request.remote` did not fetch the prompt, mostly a value of
    `baton_api.prompt_report.Fallback`; else empty.
    """
    error: Exception | None = None
    """With `FinishReason.ERROR`: a BatonError for the client."""
    relay: RelayRecord | None = None
    """With the first token of a prompt that a prefill worker computed."""
    timing: PromptTiming | None = None
    """With the first token of a prompt that this worker computed."""
    prompt_output: Vector | PromptLogprobs | None = None
    """The requested output about the prompt: with the first token, or with the end if none is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRecord:
    """Size, route and timing of one transferred prompt: for the dashboard and the metrics."""

    prefill_worker: str
    prompt_tokens: int
    computed_tokens: int
    """By the prefill worker; the remaining ones were in its prefix cache."""
    local_tokens: int
    """Prefix in this worker's cache, whose blocks were not transferred."""
    blocks: int
    bytes: int
    transport: str
    """Such as `nixl/ucx shm`, `nixl/ucx tcp`, `loopback`."""
    transfer_s: float
    """Seconds in which at least one read was under way."""
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """One prompt to be fetched by a `RemotePrefill`; all block ids are of the local pool."""

    request_id: str
    tokens: Sequence[int]
    start_block: int
    """Number of leading blocks that hold the cached prefix."""
    parent: bytes
    """Chain hash of block `start_block - 1`; the root hash if `start_block` is 0."""
    blocks: tuple[int, ...]
    """Local blocks to fill, from position `start_block` on."""
    sampling: SamplingParams
    salt: str
    trace: str = ""
    """`traceparent` of the request; empty if it is not traced."""
    adapter: LoadedAdapter | None = None
    """The prefill worker must have an adapter with this digest."""
    tenant: str = ""
    """`Request.tenant`."""
    within_s: float = math.inf
    """Seconds after which a read of a `CachedPrefix` has no point."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """
    The result of a fetch. The engine receives exactly one for each `RemotePrefill.start`.

    Then a peer may still write to `unsafe` blocks, but to no others. They are quarantined until
    `Engine.settled` names them.
    """

    request_id: str
    arrived: int
    """Leading blocks of `Fetch.blocks` that are complete and verified."""
    first: TokenChoice | None = None
    """The first token; None if blocks are missing, and this worker computes the rest of the prompt."""
    cached_tokens: int = 0
    peer_tokens: int = 0
    """Those of `cached_tokens` that the prefill worker read from another worker."""
    tier_tokens: TierTokens = ()
    """Those of `cached_tokens` that the prefill worker restored, by tier."""
    relay: RelayRecord | None = None
    unsafe: frozenset[int] = frozenset()
    reason: str = ""
    """Why the fetch failed: for the log and, as a short label, for the metrics."""
    transport: str = ""
    """Transport by which blocks were read; empty if none were."""


class RemotePrefill(Protocol):
    """
    Fetches a prompt's KV blocks. Called on the engine's thread; must not block.

    The result is passed to `Engine.fetched`, from any thread.
    """

    def start(self, fetch: Fetch, unused: Event) -> None:
        """Start a fetch. Until `unused`, a pass of ended requests may still write to its blocks."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel the fetch of an aborted request; report a `FetchResult` once its unsafe blocks are known."""
        ...


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Cached blocks that another worker may read."""

    blocks: tuple[int, ...]
    written: Event
    """The device may not have written them before it."""


class CachedPrefix(RemotePrefill, Protocol):
    """
    Leading blocks of a prompt that another worker, or a tier of this one, has cached. Fetches them, computes
    nothing, and has no first token.
    """

    @property
    def name(self) -> str:
        """`PEER`, or the name of the tier."""
        ...

    @property
    def blocks(self) -> int:
        """Number of leading blocks after which it has no more."""
        ...

    def read_within_s(self, blocks: int, compute_s: float) -> float:
        """
        Return the seconds that a read of `blocks` blocks may take, which take `compute_s` to compute.

        0: they are computed, because that is predicted to be sooner.
        """
        ...


class Export(Protocol):
    """Receives the computed blocks of a prompt. Called on the engine's thread; must not block."""

    def computed(self, request_id: str, tokens: int, blocks: Sequence[int], written: Event) -> None:
        """
        Announce that the KV of the first `tokens` prompt tokens is in the first blocks of `blocks`.

        The device may not have written it before `written`. Called once at admission, with the length of the
        cached prefix or 0, and after each chunk. The blocks do not change from then on until
        `Engine.release(request_id)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the engine: one sequence. `scheduling.sequence.Sequence` is what it knows of it."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    adapter: LoadedAdapter | None = None
    """None: the base model."""
    hashes: Sequence[bytes] | None = None
    """Chain hashes of the prompt's full blocks under `root`; several requests may share them. None: `submit`
    computes them, which takes 18 ms for 131k tokens and must not run on the event loop."""
    matcher: GrammarMatcher | None = None
    """Enforces `sampling.constraint` and `sampling.thinking`; set if and only if one of these is set."""
    pooling: Pooling | None = None
    """If set, the only output is the prompt's vector, and no token is sampled."""
    client_id: str = ""
    """The client's id of the HTTP request, for the log."""
    trace: str = ""
    """`traceparent` that the prefill worker receives."""
    step_summary: StepSummary | None = None
    """Collects the duration of the request's passes, if it is traced."""
    prediction: tuple[int, ...] = ()
    """Tokens of a text that the client expects as the answer: a source of drafts."""
    tenant: str = ""
    """Tenant, or request of a client, whose sequences take turns with those of others."""
    patient: bool = False
    """Whether the request is background work: it is scheduled after all others, and retracted for them."""
    remote: RemotePrefill | None = None
    cached_prefix: CachedPrefix | None = None
    """Not together with `remote`."""
    export: Export | None = None
    """If set, `max_tokens` is 1 and the blocks are held after the end until `Engine.release`."""

    @property
    def root(self) -> bytes:
        """Parent hash of the first block. It depends on everything but the tokens that decides the blocks."""
        return root_hash(self.salt, "" if self.adapter is None else self.adapter.digest)

    @property
    def generates(self) -> bool:
        return self.pooling is None and self.sampling.max_tokens > 0

    @property
    def wants_prompt_output(self) -> bool:
        """Whether the request wants a vector or logprobs of its prompt."""
        return self.pooling is not None or self.sampling.prompt_logprobs is not None
