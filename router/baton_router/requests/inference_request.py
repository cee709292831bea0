"""
What is asked of a model: the request as it arrived, with the fields by which it is routed.

The body stays the bytes that arrived. The router reads it only to choose workers; an invalid body goes to a
worker, which rejects it in its own words.
"""

from __future__ import annotations

import array
import math
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest as digest

from baton_api import anthropic, headers
from baton_api.errors import (
    MISSING_REQUIRED_PARAMETER,
    UNSUPPORTED_PARAMETER,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
)
from baton_api.hashing import client_salt
from baton_api.json_text import check_values
from baton_api.limits import ALL_CHOICES
from baton_api.request_classes import CLASSES
from baton_api.stream_comments import BODY as RESUMPTION
from baton_http.replies import Scope
from baton_http.sse import EventStream, GenerateStream, ResponseStream
from baton_http.upstream import Headers
from baton_router.cache import prompt_chunks
from baton_router.cache.prompt_chunks import PromptChunks, PromptMessage
from baton_router.requests.picker import DirectRoute, PickRequest, RequestCost
from baton_router.requests.resumable_stream import MessageStream, ResumableStream
from baton_router.tenants.tenants import DEFAULT_TENANT, Tenant

NO_CHUNKS = PromptChunks((), ())

CHAT = "/v1/chat/completions"

STREAMS: dict[str, type[EventStream]] = {
    CHAT: ResumableStream,
    "/v1/completions": ResumableStream,
    "/generate": GenerateStream,
    "/v1/responses": ResponseStream,
    anthropic.MESSAGES: MessageStream,
}
"""Paths whose streams end with something; others end with the last byte."""

MOST_TOKENS = 2**31 - 1
"""More tokens than any model has context for: more than that means as many as there are."""

LONG_IDS_BYTES = 256 * 1024
"""JSON of token ids that is not decoded: for that of 4 MB, the event loop would serve nobody for 40 ms."""

_ABSENT = msgspec.Raw(b"")


class AnswerOptions(msgspec.Struct):
    """The fields of a body that say how long its answer is, and when it is to come."""

    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    resumption: msgspec.Raw = msgspec.field(default=_ABSENT, name=RESUMPTION)

    @property
    def answer_tokens(self) -> int | None:
        """The most that each choice may have; None if it does not say."""
        return _limit(self.max_completion_tokens, self.max_tokens, self.max_output_tokens)

    @property
    def width(self) -> int:
        """Choices for each prompt."""
        return max(_count(self.n), _count(self.best_of))


class RequestBody(AnswerOptions):
    """The fields of a body that decide where it goes."""

    model: Any = None
    cache_salt: Any = None
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    system: Any = None
    """Instructions, which Anthropic's API has apart from the messages."""
    text: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    sampling_params: Any = None
    """Of `/generate`: an object, or one for each prompt."""
    documents: Any = None
    text_1: Any = None
    text_2: Any = None

    @property
    def answer_tokens(self) -> int | None:
        given = self._sampling
        if not given:
            return _limit(self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        limits = [_limit(one.get("max_new_tokens"), one.get("max_tokens")) for one in given]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def width(self) -> int:
        return max(_count(self.n), _count(self.best_of), *(_count(one.get("n")) for one in self._sampling))

    @property
    def _sampling(self) -> list[dict[str, Any]]:
        given = self.sampling_params
        return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 1


def _limit(*values: object) -> int | None:
    """The first one that is a limit of tokens."""
    for value in values:
        if type(value) is int and value >= 0:
            return min(value, MOST_TOKENS)
    return None


class ChatBody(AnswerOptions, kw_only=True):
    """The same of a conversation as it should be."""

    messages: list[PromptMessage]
    model: str | None = None
    cache_salt: Any = None
    tools: msgspec.Raw = _ABSENT


_body = msgspec.json.Decoder(RequestBody)
_chat = msgspec.json.Decoder(ChatBody)
_messages = msgspec.json.Decoder(list[PromptMessage])


class InferenceRequest:
    """One request to a model. Raises InvalidRequest if its body is not JSON, too much, or a router's."""

    __slots__ = (
        "_digest",
        "body",
        "cost",
        "events",
        "explain",
        "headers",
        "model",
        "path",
        "priority_class",
        "prompt",
        "streams",
        "target",
        "tenant",
        "tokens_ahead",
        "ttft_slo_s",
    )

    def __init__(self, scope: Scope, body: bytes, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Raises ModelNotFound, too, for a model that is not the tenant's to use."""
        query = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = scope["headers"]
        self.body = body
        self._digest = digest(body)
        check_values(body)
        self.path = path = scope["path"]
        salt = tenant.salt
        parsed = _parse_chat(body, salt) if path == CHAT else _parse_any(body, salt)
        self.model, self.prompt, options, others = parsed
        if options.resumption:
            raise InvalidRequest(
                f"Unsupported parameter: {RESUMPTION!r}. Only a router may set where an answer continues.",
                param=RESUMPTION,
                code=UNSUPPORTED_PARAMETER,
            )
        if tenant.models is not None:
            _check_model(tenant.models, self.model)
        self.tenant = tenant
        self.events = STREAMS.get(path)
        self.streams = options.stream is True
        limit = options.answer_tokens
        self.tokens_ahead = 1 if self.streams else limit or None
        """Number of the token that brings the first byte of the answer at the latest; None if unknown."""
        self.cost = _cost(options.width, limit, others, generates=self.events is not None)
        self.priority_class, self.ttft_slo_s = request_class(self.headers, tenant)
        self.explain = False
        """Whether the scheduler reports the prices of the options."""

    def pick_request(
        self,
        excluded: tuple[str, ...] = (),
        waited_s: float | None = None,
        *,
        resumed: bool = False,
        direct: DirectRoute | None = None,
    ) -> PickRequest:
        """
        Return the message to the scheduler; `waited_s` is set if the request was picked for before.

        `direct` is set if a gateway sends the request to the decode worker.
        """
        tenant = self.tenant
        return PickRequest(
            model=self.model,
            prompt=self.prompt,
            excluded=excluded,
            tenant=tenant.id,
            priority_class=self.priority_class,
            limits=None if tenant.limits is DEFAULT_TENANT.limits else tenant.limits,
            ttft_slo_s=self.ttft_slo_s,
            streams=self.streams,
            cost=self.cost,
            size=len(self.body),
            retried=waited_s is not None,
            resumed=resumed,
            waited_s=waited_s or 0.0,
            digest=self._digest,
            explain=self.explain,
            direct=direct,
        )

    @property
    def resumable(self) -> bool:
        """Whether the worker reports the state that another worker needs to continue the answer."""
        return self.events is not None and issubclass(self.events, ResumableStream)


def _check_model(allowed: frozenset[str], model: str | None) -> None:
    """Require a tenant with a list of models to name one of them."""
    if model is None:
        raise InvalidRequest(
            "You must provide a model parameter.", param="model", code=MISSING_REQUIRED_PARAMETER
        )
    if model not in allowed:
        raise ModelNotFound(model, tuple(sorted(allowed)))


@dataclass(frozen=True, slots=True)
class OtherPrompts:
    """The prompts of a request but the first one."""

    count: int
    size: int
    """Bytes."""


ALONE = OtherPrompts(0, 0)


def _cost(width: int, limit: int | None, others: OtherPrompts, *, generates: bool) -> RequestCost:
    """`limit`: tokens of each choice. Raises InvalidRequest for more choices than a request may have."""
    prompts = 1 + others.count
    choices = prompts * width if generates else 0
    if choices > ALL_CHOICES.most:
        raise InvalidRequest(
            f"{prompts} prompts with {width} choices each exceed the maximum of {ALL_CHOICES.most} "
            "choices in a request.",
            param="n" if width > 1 else "prompt",
            code=ALL_CHOICES.code,
        )
    return RequestCost(prompts, others.size, choices, limit)


def _parse_chat(body: bytes, salt: str) -> tuple[str | None, PromptChunks, AnswerOptions, OtherPrompts]:
    """Return the model, the prompt, the answer options and other prompts, in one pass over the body."""
    try:
        chat = _chat.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_any(body, salt)  # says what is wrong, if it is not JSON
    root = _root(salt, chat.cache_salt, chat.model)
    return chat.model, prompt_chunks.chunk_messages(chat.messages, chat.tools, root), chat, ALONE


def _parse_any(body: bytes, salt: str) -> tuple[str | None, PromptChunks, AnswerOptions, OtherPrompts]:
    """Return the model, the prompt in any shape, the answer options and other prompts."""
    try:
        read = _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The JSON body of your request is nested too deeply.") from error
    model = read.model if isinstance(read.model, str) else None
    prompt, others = _prompt(read, _root(salt, read.cache_salt, model))
    return model, prompt, read, others


def _root(salt: str, cache_salt: object, model: str | None) -> int:
    """Where the names of the prompt's chunks begin: apart wherever a worker keeps blocks apart."""
    if isinstance(cache_salt, str):
        salt = client_salt(salt, cache_salt)
    return prompt_chunks.root_name(salt, model or "")


def _prompt(body: RequestBody, root: int) -> tuple[PromptChunks, OtherPrompts]:
    if body.messages:
        try:
            messages = _messages.decode(body.messages)
            if body.system is not None:
                messages.insert(0, PromptMessage("system", body.system))
            return prompt_chunks.chunk_messages(messages, body.tools, root), ALONE
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return prompt_chunks.chunk_text(bytes(body.messages), root), ALONE
    raw = body.prompt or body.input or body.text or body.input_ids
    if raw:
        text, others = _texts(raw)
        return prompt_chunks.chunk_text(text, root), others
    scored = [one for one in (body.documents, body.text_1, body.text_2) if one is not None]
    count = max((len(value) for value in scored if isinstance(value, list)), default=1)
    size = sum(len(msgspec.json.encode(value)) for value in scored)
    return NO_CHUNKS, OtherPrompts(count, size) if scored else ALONE


def _texts(raw: msgspec.Raw) -> tuple[bytes, OtherPrompts]:
    """The first prompt's text, and the others, which share no prefix with what follows the first."""
    if len(raw) > LONG_IDS_BYTES and (ids := _long_ids(bytes(raw))) is not None:
        return ids
    try:
        prompt: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(raw), ALONE
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return _text(prompt, raw), ALONE
    others = sum(len(_text(part, b"")) for part in prompt[1:])
    return _text(prompt[0], raw), OtherPrompts(len(prompt) - 1, others)


def _long_ids(raw: bytes) -> tuple[bytes, OtherPrompts] | None:
    """
    The same of one or several prompts of token ids, by their JSON; None if there is text in it.

    The sizes are those of the JSON, where an id has as many bytes as its digits and a comma.

    >>> _long_ids(b"[1,2,3]")
    (b'[1,2,3]', OtherPrompts(count=0, size=0))
    >>> _long_ids(b"[[1,2],[3],[4,5]]")
    (b'[[1,2]', OtherPrompts(count=2, size=11))
    """
    if not raw.startswith(b"[") or b'"' in raw or b"{" in raw:
        return None
    others = raw.count(b"[") - 2
    if others < 1:
        return raw, ALONE
    end = raw.find(b"]") + 1
    return raw[:end], OtherPrompts(others, len(raw) - end)


def _text(prompt: Any, raw: bytes) -> bytes:
    """The text of one prompt; `raw` if it is neither text nor token ids."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    try:
        return array.array("I", prompt).tobytes()  # token ids: four bytes each, as text has on average
    except (TypeError, OverflowError, ValueError):
        return bytes(raw)


CLASS = headers.CLASS.encode()
OBJECTIVE = headers.OBJECTIVE.encode()


def request_class(raw: Headers, tenant: Tenant) -> tuple[str, float | None]:
    """
    The class, and the seconds within which the first token is wanted, or None without one.

    Raises InvalidRequest for an invalid value, and Forbidden for a class that the tenant may not use.
    """
    priority_class, ttft_slo_s = tenant.default_class, None
    for name, value in raw:
        if name == CLASS:
            priority_class = value.decode("latin-1").strip().lower()
            _check_class(priority_class, tenant)
        elif name == OBJECTIVE:
            ttft_slo_s = _seconds(value)
    return priority_class, ttft_slo_s


def _check_class(priority_class: str, tenant: Tenant) -> None:
    if priority_class not in CLASSES:
        raise InvalidRequest(f"{headers.CLASS} must be one of {', '.join(CLASSES)}.", param=headers.CLASS)
    if priority_class not in tenant.classes:
        raise Forbidden(f"send requests of the class {priority_class}", tenant.name)


def _seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(
            f"{headers.OBJECTIVE} must be a number of milliseconds above 0.", param=headers.OBJECTIVE
        )
    return milliseconds / 1000
