"""
TensorRT-LLM's protocol (`trtllm-serve`): the context server first, then the generation server with what it
returned.

The prefill worker gets the request with `disaggregated_params` of the type "context_only". It computes the
prompt and the first token, and returns where its KV blocks are, the token and the prompt's token ids. The
decode worker gets all of these in place of the text, with the type "generation_only".

Workers of both roles are the same servers, with a `cache_transceiver_config`. They do not report whether they
have one: without it a prefill worker fails the request, and the decode worker computes the prompt.

Health checks read `/health`, `/v1/models` and `/prometheus/metrics`, which a worker has with
`return_perf_metrics`. `/metrics` is left to its collector: it returns each record once.

Sources, of 1.3: `tensorrt_llm/serve/openai_disagg_service.py`, `tensorrt_llm/serve/openai_server.py` and
`tensorrt_llm/serve/openai_protocol.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from baton_api.errors import InvalidRequest
from baton_api.prompt_report import Fallback, PromptReport
from baton_api.workers import TRTLLM_OWNER, EngineKind, Load
from baton_http.upstream import UpstreamExchange
from baton_router.engines.bodies import openai_error, read_options, with_members
from baton_router.engines.checks import OK, WorkerApi, layout_text, total
from baton_router.engines.engine_request import BAD, EngineRequest
from baton_router.engines.openai import OpenAiEngine, estimated_report, usage_of
from baton_router.engines.spec import EngineSpec
from baton_router.engines.vllm import COMPLETIONS, GENERATING, VllmBody, salt_members

PARAMS = "disaggregated_params"

REQUESTS = range(2**40, 2**63)
"""Numbers of requests that several workers share; smaller ones are a worker's own."""

UNFINISHED = ("length", "not_finished")
"""`finish_reason` of a prompt whose answer the decode worker has to generate."""

RUNNING = "trtllm_num_requests_running"
WAITING = "trtllm_num_requests_waiting"


class TrtllmBody(VllmBody):
    """The members of a request's body that decide how its workers are driven: its API follows vLLM's."""

    disaggregated_params: Any = None

    @property
    def reserved(self) -> Mapping[str, object]:
        return {PARAMS: self.disaggregated_params}


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: dict[str, Any] | None = None


class _ContextAnswer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[Any] | None = None
    usage: dict[str, Any] | None = None


class _Version(msgspec.Struct):
    version: str = ""


_bodies = msgspec.json.Decoder(TrtllmBody)
_answers = msgspec.json.Decoder(_ContextAnswer)
_versions = msgspec.json.Decoder(_Version)
_objects = msgspec.json.Decoder(dict[str, Any])


def with_salt(body: bytes, options: TrtllmBody, salt: str) -> bytes:
    """
    The body with a tenant's cache salt; as it is without one.

    Raises InvalidRequest for `/v1/completions`: TensorRT-LLM refuses `cache_salt` there.
    """
    if salt and options.prompt is not None:
        raise InvalidRequest(
            "TensorRT-LLM cannot separate the caches of tenants for /v1/completions. "
            "Use /v1/chat/completions."
        )
    return with_members(body, salt_members(salt, options))


def context_members(options: TrtllmBody, number: int) -> dict[str, Any]:
    """The members of the prefill worker's request."""
    members: dict[str, Any] = {
        PARAMS: {"request_type": "context_only", "disagg_request_id": number},
        "stream": False,
    }
    if options.stream_options is not None:
        members["stream_options"] = None
    return members


def generation_members(answer: bytes, path: str, number: int) -> dict[str, Any]:
    """
    The members that replace the prompt in the decode worker's request, by the prefill worker's answer.

    Empty if the answer ended with the prompt, so that nothing is handed over. Raises DecodeError for an
    answer without them.
    """
    context = _answers.decode(answer)
    choice = context.choices[0] if len(context.choices) == 1 else _Choice()
    if choice.disaggregated_params is None or not context.prompt_token_ids:
        raise msgspec.ValidationError(f"it returned no {PARAMS}")
    if choice.finish_reason not in UNFINISHED:
        return {}
    params = {**choice.disaggregated_params, "request_type": "generation_only", "disagg_request_id": number}
    if "ctx_usage" in params:  # not in older versions, which refuse what they do not know
        params["ctx_usage"] = context.usage
    prompt = "prompt" if path == COMPLETIONS else "prompt_token_ids"
    return {PARAMS: params, prompt: context.prompt_token_ids}


class TrtllmEngine(OpenAiEngine):
    """Implements `engine_request.EngineDriver`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        grant, body = attempt.grant, attempt.request.body
        options = read_options(body, _bodies) if attempt.request.path in GENERATING else None
        if options is not None:
            salted = with_salt(body, options, attempt.request.tenant.salt)
            moved: dict[str, Any] = {}
            if grant.prefill and options.pairs:
                moved = await self._prefill(attempt, options, salted)
            body = with_members(salted, moved)
        head = attempt.head.for_worker(grant.decode, len(body))
        return await attempt.upstreams.get(grant.decode).request(head, body, attempt)

    async def _prefill(self, attempt: EngineRequest, options: TrtllmBody, body: bytes) -> dict[str, Any]:
        """Let the prefill worker compute the prompt; empty if the decode worker has to."""
        number = self._rng.choice(REQUESTS)
        answer = await attempt.prefill(with_members(body, context_members(options, number)))
        if not answer:
            return {}
        try:
            members = generation_members(answer, attempt.request.path, number)
        except msgspec.DecodeError:
            attempt.fallback = Fallback.PROTOCOL
            return {}
        if members:
            attempt.prefill_s = attempt.clock() - attempt.started
            attempt.prompt_tokens, attempt.cached = usage_of(answer)
        return members

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        remote = bool(attempt.prefill_s)
        tokens, cached = (attempt.prompt_tokens, attempt.cached) if remote else usage_of(opening)
        if not tokens and attempt.fallback:
            tokens = attempt.grant.prompt_tokens  # a stream begins without its usage; the failure counts
        if not tokens:
            return None
        fallback = attempt.fallback or ""
        return estimated_report(tokens, cached, compute_s=attempt.prefill_s, remote=remote, fallback=fallback)

    def client_body(self, attempt: EngineRequest, body: bytes) -> bytes:
        if attempt.status >= BAD:
            return openai_error(attempt.status, body, attempt.request.path)
        return without_params(body) if attempt.prefill_s else body


def without_params(body: bytes) -> bytes:
    """
    An answer without where KV blocks are, which is the workers' own.

    One above `BUFFER_LIMIT` passes as it comes, and keeps its `disaggregated_params`.
    """
    try:
        answer = _objects.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    for choice in answer.get("choices") or ():
        choice.pop(PARAMS, None)
    answer.pop("prompt_token_ids", None)
    return msgspec.json.encode(answer)


class TrtllmChecks:
    """Implements `checks.EngineChecks`."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api

    async def load(self) -> tuple[Load, str]:
        unavailable_reason = await self._api.ready("/health")
        models = await self._api.models()
        if not models:
            raise msgspec.DecodeError("it serves no model")
        version = _versions.decode((await self._api.get("/version")).body).version
        reply = await self._api.get("/prometheus/metrics")
        text = reply.body.decode("utf-8", "replace") if reply.status == OK else ""
        load = Load(
            role=self._api.role,
            model=models[0].id,
            max_model_len=models[0].max_model_len or 0,
            running=int(total(text, RUNNING) or 0),
            queued=int(total(text, WAITING) or 0),
            control=self._api.upstream.name,
            compatibility=layout_text(EngineKind.TRTLLM, {"version": version, "model": models[0].id}),
            engine=EngineKind.TRTLLM,
            version=version,
        )
        return load, unavailable_reason


def _is_trtllm(models: Any) -> bool:
    entries = models.get("data")
    owners = [entry.get("owned_by") for entry in entries] if isinstance(entries, list) else []
    return TRTLLM_OWNER in owners


def single_body(path: str, body: bytes, salt: str) -> bytes:
    options = read_options(body, _bodies)
    # Other paths have no salt, and embeddings no cache.
    return body if options is None or path not in GENERATING else with_salt(body, options, salt)


SPEC = EngineSpec(
    title="TensorRT-LLM",
    signatures=[("/v1/models", _is_trtllm)],  # it serves vLLM's /version too
    checks=TrtllmChecks,
    driver=TrtllmEngine,
    tried="1.3",
    single_body=single_body,
)
"""Its protocol was read, not tried."""
