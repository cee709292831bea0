"""
The contract between the process that holds a client's connection and the scheduler.

`PickRequest` and `Grant` are values that may cross a process boundary. The body is not among them: choosing a
worker needs the prompt's chunks, not the prompt.

Queue, fair share, quotas, demand and usage count a request by its `RequestCost`.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from baton_api.prompt_report import PromptReport
from baton_api.request_classes import CLASSES, DEFAULT_CLASS
from baton_api.workers import EngineKind
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN, PromptChunks
from baton_router.tenants.tenants import TenantLimits

ANSWER_WEIGHT = 3.0
"""Cost of an answer token against a prompt token, for fair share."""


class RequestCost(msgspec.Struct, frozen=True):
    """
    The numbers of a request that decide its cost.

    With `n` and several prompts it is as many answers at once, each of which may reach the limit.
    """

    prompts: int = 1
    other_bytes: int = 0
    """Of its prompts but the first one, which alone decides where it goes."""
    choices: int = 1
    """Requested answers; 0 for a request that generates nothing."""
    answer_limit: int | None = None
    """The most tokens of each choice; None if the request does not say."""

    def others(self, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
        """Tokens of its prompts but the first one."""
        return math.ceil(self.other_bytes / bytes_per_token)

    def answer_tokens(self, usual: float) -> float:
        """Expected tokens of all choices; `usual` are those of an answer."""
        return self.choices * (usual if self.answer_limit is None else min(self.answer_limit, usual))

    def most_answer_tokens(self, usual: float, steps: float = 0.0) -> int:
        """
        The most tokens that all choices can have: what is charged for an answer that nobody has counted.

        Without a limit, a choice has the `usual` number, or one for each of the worker's `steps` meanwhile.
        """
        each = max(usual, steps) if self.answer_limit is None else self.answer_limit
        return self.choices * math.ceil(each)

    def fair_share(self, prompt_tokens: float, usual: float) -> float:
        """The charge to the tenant's share; `prompt_tokens` are those to compute."""
        return prompt_tokens + ANSWER_WEIGHT * self.answer_tokens(usual)


ONE_ANSWER = RequestCost()
"""One prompt and one answer, without a limit."""


class WorkerLoss(msgspec.Struct, frozen=True):
    """How a worker was lost while it had a request."""

    crashed: bool = False
    """The worker died or hung, perhaps because of the request."""
    at_prefill: bool = False
    """The prefill worker is to blame, not the decode worker."""
    prefill_crashed: bool = False
    """The prefill worker died with the request before the decode worker was lost."""


UNREACHABLE = WorkerLoss()
"""The worker was lost before it had the request, or by no fault of it."""


class RequestEnd(msgspec.Struct, frozen=True):
    """How a request has ended."""

    complete: bool
    """Whether its response was whole."""
    tokens: int | None = None
    """Generated tokens; None if nobody counted them."""
    cached: int | None = None
    """Cached tokens of its prompt, where only the end of the response reports them."""
    charged: int = 0
    """Tokens of prompts and choices that count for the tenant's quota."""


class DirectRoute(msgspec.Struct, frozen=True):
    """
    The decode workers that a gateway can send a request to; the router only chooses.

    Without the router on the way, only a decode worker that fetches the prompt itself can have a prefill
    worker.
    """

    endpoints: tuple[str, ...] | None = None
    """Allowed decode workers, each as `IP:PORT` or `IP`. None: all."""

    def reaches(self, worker: str) -> bool:
        """Whether the decode worker with this name, its `host:port`, may be chosen."""
        if self.endpoints is None:
            return True
        return worker in self.endpoints or worker.rpartition(":")[0].strip("[]") in self.endpoints


class PickRequest(msgspec.Struct, frozen=True):
    """A request for workers."""

    model: str | None
    """None if unset: then any worker may serve it, and rejects it in its own words."""
    prompt: PromptChunks
    excluded: tuple[str, ...] = ()
    """Names of workers that lost or rejected this request."""
    tenant: str = ""
    """Tenant id."""
    priority_class: str = DEFAULT_CLASS
    limits: TenantLimits | None = None
    """Limits of the tenant; None if unlimited."""
    ttft_slo_s: float | None = None
    """Target time to first token; None if unset."""
    streams: bool = True
    """Whether the response is streamed, so that it begins when the prompt is computed."""
    cost: RequestCost = ONE_ANSWER
    size: int = 0
    """Size of the body in bytes."""
    retried: bool = False
    """Whether a worker had it before: then it goes first and is always admitted."""
    resumed: bool = False
    """Whether it resumes a broken stream."""
    waited_s: float = 0.0
    """Seconds since it first arrived, if they count."""
    digest: int = 0
    """Digest of the body, which recognizes a client's retry; 0 disables this."""
    explain: bool = False
    """Whether to return the costs of the options."""
    direct: DirectRoute | None = None
    """Set if a gateway sends the request to the decode worker itself; None if the router sends it."""

    @property
    def key(self) -> tuple[str, int]:
        """The tenant and the digest, by which a client's retry is recognized."""
        return self.tenant, self.digest

    @property
    def background(self) -> bool:
        """Whether no client waits for the answer."""
        return CLASSES[self.priority_class].background

    @property
    def none_left(self) -> str:
        """Why no worker is left for the request, where some serve its model."""
        if self.direct is not None and self.direct.endpoints is not None:
            listed = ", ".join(self.direct.endpoints) or "none"
            return f"No ready worker serves this model at the endpoints that the gateway allows: {listed}."
        return "Every worker that serves this model was tried for this request."


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a request. Its holder must release it, whatever happens."""

    number: int
    """Number of the decision in this scheduler."""
    decode: str
    """Name of the worker that answers, its `host:port`."""
    prefill: str
    """Name of the worker that computes the prompt; empty for local prefill."""
    control: str
    """Control address of the prefill worker."""
    summary: bytes
    """The decision, as a response header."""
    first_token_timeout_s: float = 0.0
    """Seconds to the first token after which another worker may be tried; 0 disables this."""
    step_s: float = 0.0
    """Seconds between tokens, as the worker reports; 0 if unknown."""
    has_alternative: bool = False
    """Whether another worker could serve the request."""
    first_token_s: float = 0.0
    """Predicted seconds from the decision to the first token; 0 if unknown."""
    costs: str = ""
    """The cheapest options with their costs, if requested."""
    engine: EngineKind = EngineKind.BATON
    """Engine of the workers."""
    block_size: int = 0
    """Tokens of a KV block, if blocks of the workers are named by their tokens; else 0."""
    adapter: str = ""
    """The request's model, if it is an adapter of the worker's model."""
    prompt_tokens: int = 0
    """Tokens of all prompts, estimated."""
    usual_tokens: float = 0.0
    """Tokens of an answer, as answers usually have."""


class Picker(Protocol):
    """
    Assigns requests to workers and learns from what happens to them.

    After `pick` come, in this order and at most once each: `began` or `full`, then perhaps `failed`, and in
    any case `release`. Only `pick` may wait.
    """

    async def pick(self, request: PickRequest) -> Grant:
        """
        The workers that have the request from now on.

        Raises ModelNotFound, PoisonRequest, or NotReady if no untried worker is left. Cancellation has no
        side effects.
        """
        ...

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        """The response has begun; `report` describes the prompt."""
        ...

    def failed(self, grant: Grant, loss: WorkerLoss = UNREACHABLE) -> None:
        """The worker was lost: unreachable, broken off, or silent for too long."""
        ...

    def full(self, grant: Grant) -> None:
        """The worker is healthy, but has no capacity for the request."""
        ...

    def release(self, grant: Grant, end: RequestEnd) -> None:
        """The request has ended."""
        ...
