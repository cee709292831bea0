"""
Any other server with OpenAI's API, such as llama.cpp, TGI or Ollama: one request, forwarded as it is.

Its prompts are reported by the usage in its answers, its streams cannot be resumed, and it is never part of a
pair.
"""

from __future__ import annotations

import msgspec

from baton_api.prompt_report import PromptReport
from baton_api.workers import EngineKind, Load, Role
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange
from baton_router.engines.bodies import openai_error
from baton_router.engines.checks import WorkerApi
from baton_router.engines.engine_request import BAD, EngineRequest, ResumeState
from baton_router.engines.spec import EngineSpec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answers = msgspec.json.Decoder(_Answer)


class OpenAiEngine:
    """Implements `engine_request.EngineDriver`. Drivers of pairs add to it what differs."""

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        worker, body = attempt.grant.decode, attempt.request.body
        return await attempt.upstreams.get(worker).request(
            attempt.head.for_worker(worker, len(body)), body, attempt
        )

    def stream(self, attempt: EngineRequest) -> EventStream | None:
        return attempt.request.events() if attempt.request.events is not None else None

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        tokens, cached = usage_of(opening)
        return estimated_report(tokens, cached) if tokens else None

    def client_body(self, attempt: EngineRequest, body: bytes) -> bytes:
        return body if attempt.status < BAD else openai_error(attempt.status, body, attempt.request.path)

    def cached_tokens(self, attempt: EngineRequest) -> int | None:
        return None

    def resume_state(self, attempt: EngineRequest) -> ResumeState | None:
        return None


def usage_of(body: bytes) -> tuple[int, int | None]:
    """Tokens of the prompt and cached ones, by the usage of a whole answer; 0 and None without one."""
    try:
        usage = _answers.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0, None
    if usage is None:
        return 0, None
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, details.cached_tokens if details is not None else None


def estimated_report(
    tokens: int,
    cached: int | None,
    *,
    compute_s: float = 0.0,
    transfer_s: float = 0.0,
    remote: bool = False,
    tail: str = "",
    fallback: str = "",
) -> PromptReport:
    """The report of a prompt whose times the router has measured; 0 is unknown."""
    return PromptReport(
        tokens=tokens,
        cached=None if cached is None else min(cached, tokens),
        held=0,
        queue_s=0.0,
        compute_s=compute_s,
        transfer_s=transfer_s,
        remote=remote,
        tail=tail,
        fallback=fallback,
        estimated=True,
    )


class OpenAiChecks:
    """Implements `checks.EngineChecks`: such servers report only their models."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api

    async def load(self) -> tuple[Load, str]:
        models = await self._api.models()
        if not models:
            return Load(role=self._api.role, model="", engine=EngineKind.OPENAI), "it serves no model"
        load = Load(
            role=self._api.role,
            model=models[0].id,
            names=tuple(model.id for model in models),
            max_model_len=models[0].max_model_len or 0,
            engine=EngineKind.OPENAI,
        )
        if self._api.role is Role.PREFILL:
            return load, "its engine is not one whose workers form pairs: list it with --worker"
        return load, ""


SPEC = EngineSpec(
    title="a server of the OpenAI API",
    signatures=[("/v1/models", lambda reply: "data" in reply)],
    checks=OpenAiChecks,
    driver=lambda rng: OpenAiEngine(),
    pairs=False,
)
