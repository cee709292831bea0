"""
Messages between a worker's frontends and the process that computes, over `baton_http.link`.

A frontend numbers its requests. The tokens of one step that need no more than their ids travel in one message
for all streams; other outputs have one each. Each question to a frontend is answered by one `Reply`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from baton_api.messages import TokenChoice
from baton_api.sampling import Constraint, SamplingParams, Thinking
from baton_engine.metrics.exposition import Sample
from baton_engine.model.checkpoint import SamplingDefaults
from baton_engine.requests import FinishReason, Output, PromptLogprobs, PromptTiming, RelayRecord, TierTokens
from baton_engine.tracing import StepSummary
from baton_http.link import RemoteError


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages below."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may name."""

    name: str
    path: str
    digest: str
    rank: int


# --- From the process that computes ---


class Hello(Message, frozen=True):
    """What a frontend serves. The first message."""

    settings: bytes
    """`WorkerSettings`, pickled."""
    checkpoint: str
    """Path of the model's folder or file."""
    names: tuple[str, ...]
    max_model_len: int
    block_size: int
    created: int
    fetches: bool
    """Whether requests may name a prefill worker."""
    sampling: SamplingDefaults
    adapters: tuple[Adapter, ...]
    control: str
    """Path of the socket that serves all other paths."""
    worker: str


class Tokens(Message, frozen=True):
    """One token for each of several requests."""

    numbers: list[int]
    tokens: list[int]


class Outcome(Message, frozen=True):
    """An output that has more than a token, such as the first and the last one of each request."""

    number: int
    tokens: tuple[TokenChoice, ...] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None
    cached_tokens: int = 0
    peer_tokens: int = 0
    tier_tokens: TierTokens = ()
    error: RemoteError | None = None
    relay: RelayRecord | None = None
    timing: PromptTiming | None = None
    scores: PackedLogprobs | None = None
    tail: bytes = b""
    fallback: str = ""
    summary: StepSummary | None = None


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """`PromptLogprobs` as bytes."""

    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top: bytes
    alternatives: int

    @classmethod
    def of(cls, given: PromptLogprobs) -> PackedLogprobs:
        ids, top = given.top_ids.tobytes(), given.top.tobytes()
        return cls(given.logprobs.tobytes(), given.ranks.tobytes(), ids, top, given.top.shape[1])

    def unpacked(self) -> PromptLogprobs:
        shape = len(self.logprobs) // 4, self.alternatives
        return PromptLogprobs(
            np.frombuffer(self.logprobs, np.float32),
            np.frombuffer(self.ranks, np.int64),
            np.frombuffer(self.top_ids, np.int64).reshape(shape),
            np.frombuffer(self.top, np.float32).reshape(shape),
        )


class Accepted(Message, frozen=True):
    """The engine has accepted a request."""

    number: int


class Prepared(Message, frozen=True):
    """The constraint of a `Prepare` is compiled, or has an error."""

    number: int
    error: RemoteError | None


class Adapters(Message, frozen=True):
    """All adapters, after a change. Asked: the reply says that requests may name them."""

    number: int
    adapters: tuple[Adapter, ...]


class Report(Message, frozen=True):
    """Asks for metrics, and for the latest requests."""

    number: int


class AbortNamed(Message, frozen=True):
    """Asks to abort the requests with these names; all without names."""

    number: int
    names: tuple[str, ...] | None


class Drain(Message, frozen=True):
    """Asks to reject new requests. The reply comes when none is running."""

    number: int
    seconds: float


# --- From a frontend ---


class Serving(Message, frozen=True):
    """The frontend accepts connections."""


class Submit(Message, frozen=True):
    """A request, with the fields of `Request`."""

    number: int
    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str
    adapter: tuple[str, str] | None
    """Name and digest."""
    hashes: tuple[bytes, ...] | None
    prepared: int
    """Number of a `Prepared` constraint; 0: none."""
    client_id: str
    trace: str
    traced: bool
    """Whether the last output has a `StepSummary`."""
    prediction: tuple[int, ...]
    tenant: str
    patient: bool
    prefill: tuple[str, str, str] | None
    """Address of a prefill worker, ticket and request id."""


class Finish(Message, frozen=True):
    number: int


class Abort(Message, frozen=True):
    number: int


class Prepare(Message, frozen=True):
    number: int
    constraint: Constraint | None
    thinking: Thinking | None
    tenant: str


class Unprepare(Message, frozen=True):
    """The constraint is not needed any more: it is not compiled, or is forgotten."""

    number: int


class Reply(Message, frozen=True):
    """The answer to an asking message."""

    number: int
    aborted: int = 0
    samples: list[Sample] = []
    requests: list[dict[str, Any]] = []


ToFrontend = Hello | Tokens | Outcome | Accepted | Prepared | Adapters | Report | AbortNamed | Drain
Question = Report | AbortNamed | Adapters | Drain
FromFrontend = Serving | Submit | Finish | Abort | Prepare | Unprepare | Reply


def is_plain(output: Output) -> bool:
    """Return whether `output` is one token and nothing else."""
    if output.finish is not None or len(output.tokens) != 1:
        return False
    choice = output.tokens[0]
    return (
        choice.logprob is None
        and not choice.top
        and output.relay is None
        and output.timing is None
        and output.prompt_output is None
    )
