"""
A request as the engine sees it: token ids in, token ids out.

The engine does not handle text: templates, detokenization and stop strings belong to the API. A request whose
prompt is computed by a prefill worker has a `RemotePrefill`; a request that computes a prompt for a decode
worker has an `Export`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.metrics.tracing import StepSummary


class GrammarMatcher(Protocol):
    """
    Which tokens may come next, told token by token. Belongs to one request; only its engine uses it.

    It survives retraction: it follows the tokens, not their KV.
    """

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end of sequence could follow."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that it allows where the answer may end; drawing one ends the answer."""
        ...

    def fill(self, mask: NDArray[np.int32]) -> bool:
        """
        Set bit `token % 32` of word `token // 32` for every token that may come next.

        False if all may; what `mask` [ceil(V / 32)] holds counts for nothing then. May take a millisecond;
        lets go of the interpreter's lock meanwhile. Raises a BatonError if the answer cannot go on.
        """
        ...

    def push(self, token: int) -> None:
        """
        The token was drawn, here or by the worker that computed the prompt.

        Raises a BatonError if it is not one of those that could come.
        """
        ...


class Pooling(enum.StrEnum):
    """Which final hidden states a vector for a whole prompt is made of."""

    MEAN = "mean"
    """The mean of all tokens' states."""
    LAST = "last"
    """The last token's."""


Vector = NDArray[np.float32]
"""[N], as it was pooled: not normalised."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of each token of a prompt of n but the first, what the model thought of it before it came."""

    logprobs: NDArray[np.float32]
    """[n - 1]"""
    ranks: NDArray[np.int64]
    """[n - 1] places among all tokens by logprob; 1 is the most likely one."""
    top_ids: NDArray[np.int64]
    """[n - 1, k] most likely tokens, the first one first."""
    top: NDArray[np.float32]
    """[n - 1, k] their logprobs."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop id was drawn, the server saw a stop string and said so, or a vector was all that was wanted."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """What one prompt took that was computed here."""

    queue_s: float
    """Until it was admitted."""
    compute_s: float
    """From there to its first token, all that shared the passes included."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought for one request."""

    request_id: str
    tokens: tuple[TokenChoice, ...] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended it; it is the last of `tokens`."""
    cached_tokens: int = 0
    """Prompt tokens that no worker computed for this request. Final from the first token on."""
    error: Exception | None = None
    """With `FinishReason.ERROR`: a BatonError for the client."""
    relay: RelayRecord | None = None
    """With the first token of a prompt that a prefill worker computed."""
    timing: PromptTiming | None = None
    """With the first token of a prompt that was computed here."""
    prompt_output: Vector | PromptLogprobs | None = None
    """What was asked about the prompt: with the first token, or with the end if none is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRecord:
    """How one prompt came over: the figures of `baton up`'s picture and of the metrics."""

    prefill_worker: str
    prompt_tokens: int
    computed_tokens: int
    """By the prefill worker; the rest came from its prefix cache."""
    local_tokens: int
    """Prefix that this worker held already, whose blocks were not moved."""
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
    """One prompt that a `RemotePrefill` is to bring; all block ids are positions in the local pool."""

    request_id: str
    tokens: Sequence[int]
    start_block: int
    """Blocks before it hold the prefix already."""
    parent: bytes
    """Chain hash of block `start_block - 1`, the root hash if 0."""
    blocks: tuple[int, ...]
    """Local blocks for positions `start_block` on; all of them are to be filled."""
    sampling: SamplingParams
    salt: str
    trace: str = ""
    """`traceparent` of the request, if it has one."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """
    How a fetch ended. The engine gets exactly one for each `RemotePrefill.start`.

    After it, only `unsafe` blocks may still be written by a peer; they are quarantined until
    `Engine.settled` names them.
    """

    request_id: str
    arrived: int
    """Leading blocks of `Fetch.blocks` that are whole and checked."""
    first: TokenChoice | None = None
    """The first token; None if the prompt did not come over whole and the rest is computed here."""
    cached_tokens: int = 0
    relay: RelayRecord | None = None
    unsafe: frozenset[int] = frozenset()
    reason: str = ""
    """Why `first` is None: goes to the log and, as a short label, to the metrics."""
    transport: str = ""
    """How its blocks were read; empty if none were."""


class RemotePrefill(Protocol):
    """
    Brings a prompt's KV blocks from elsewhere. Called on the engine thread; returns at once.

    The answer comes later through `Engine.fetched`, from any thread.
    """

    def start(self, fetch: Fetch) -> None: ...

    def cancel(self, request_id: str) -> None:
        """The request is aborted: answer with `FetchResult` as soon as what is unsafe is known."""
        ...


class Export(Protocol):
    """Told on the engine thread which of a prompt's blocks are computed. Returns at once."""

    def computed(self, request_id: str, tokens: int, blocks: Sequence[int]) -> None:
        """
        The KV of the first `tokens` prompt tokens is in the first blocks of `blocks`.

        Called once at admission, with the cached prefix or 0, and after each chunk. The blocks stay
        as they are until `Engine.release(request_id)`.
        """
        ...


@dataclass(slots=True)
class Request:
    """One sequence, from submission to the end. The engine thread owns what changes."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    hashes: Sequence[bytes] | None = None
    """Chain hashes of the prompt's full blocks under `salt`; several requests may share them. None: `submit`
    makes them, which takes 18 ms for 131k tokens: not for the event loop."""
    matcher: GrammarMatcher | None = None
    """Keeps to `sampling.constraint` and `sampling.thinking`; there if and only if one of them is."""
    pooling: Pooling | None = None
    """With it, the prompt's vector is the whole answer, and no token is drawn."""
    client_id: str = ""
    """What its client calls the request that this belongs to: for the log."""
    trace: str = ""
    """Its `traceparent`, for whoever is asked to compute its prompt."""
    step_summary: StepSummary | None = None
    """Gets what its passes take, if somebody wants to know."""
    patient: bool = False
    """Nobody waits for its answer: all others go before it, and it makes room for them."""
    remote: RemotePrefill | None = None
    export: Export | None = None
    """With it, `max_tokens` is 1 and the blocks are kept after the end until `Engine.release`."""
    output: list[int] = field(default_factory=list)
    """Tokens drawn so far."""
    computed: int = 0
    """Tokens of prompt + output whose KV stands in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    tail: bytes = b""
    """Chain hash of the prompt's last full block, once the engine has it; empty if there is none."""
    fallback: str = ""
    """Why `remote` did not bring the prompt, if it did not; mostly a word of `baton_api.reports.Fallback`."""

    @property
    def generates(self) -> bool:
        """Whether tokens are to follow the prompt."""
        return self.pooling is None and self.sampling.max_tokens > 0

    @property
    def wants_prompt_output(self) -> bool:
        """Whether something is asked about the prompt itself."""
        return self.pooling is not None or self.sampling.prompt_logprobs is not None

    @property
    def length(self) -> int:
        """Tokens of the whole sequence so far."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens whose KV has still to be computed: the prompt at first, then one at a time."""
        return self.length - self.computed
