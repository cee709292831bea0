"""
A request as it arrived, with what it is routed by: model, prompt chunks, class and objective.

The body stays the bytes that arrived. The router reads it only to choose workers; an invalid body goes to a
worker, which rejects it in its own words.
"""

from __future__ import annotations

import array
import math
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
from baton_api.resuming import BODY as RESUMPTION
from baton_http.replies import Scope
from baton_http.sse import EventStream, ResponseStream
from baton_http.upstream import Headers
from baton_router.cache import prompt_chunks
from baton_router.cache.prompt_chunks import PromptChunks, PromptMessage
from baton_router.proxy.resume_state import MessageStream, ResumableStream
from baton_router.scheduling.direct_route import DirectRoute
from baton_router.scheduling.picker import PickRequest
from baton_router.tenants.tenants import CLASSES, DEFAULT_TENANT, Tenant

NO_CHUNKS = PromptChunks((), ())

CHAT = "/v1/chat/completions"

STREAMS: dict[str, type[EventStream]] = {
    CHAT: ResumableStream,
    "/v1/completions": ResumableStream,
    "/generate": EventStream,
    "/v1/responses": ResponseStream,
    anthropic.MESSAGES: MessageStream,
}
"""Paths whose streams end with something; others end with the last byte."""

_ABSENT = msgspec.Raw(b"")


class AnswerOptions(msgspec.Struct):
    """The fields of a body that say how long its answer is, and when it is to come."""

    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    resumption: msgspec.Raw = msgspec.field(default=_ABSENT, name=RESUMPTION)

    @property
    def tokens_ahead(self) -> int | None:
        """Number of the token that brings the first byte at the latest; None if the body does not set it."""
        if self.stream is True:
            return 1
        return self.answer_tokens

    @property
    def answer_tokens(self) -> int | None:
        """The most that the answer may have; None if it does not say."""
        raw = self.max_completion_tokens or self.max_tokens or self.max_output_tokens
        return raw if type(raw) is int and raw > 0 else None


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


class ChatBody(AnswerOptions, kw_only=True):
    """The same of a conversation as it should be."""

    messages: list[PromptMessage]
    model: str | None = None
    cache_salt: Any = None
    tools: msgspec.Raw = _ABSENT


_body = msgspec.json.Decoder(RequestBody)
_chat = msgspec.json.Decoder(ChatBody)
_messages = msgspec.json.Decoder(list[PromptMessage])


class RoutedRequest:
    """One request. Raises InvalidRequest if its body is not JSON, or claims to be a router's."""

    __slots__ = (
        "_digest",
        "answer_tokens",
        "body",
        "events",
        "explain",
        "headers",
        "model",
        "path",
        "prompt",
        "streams",
        "target",
        "tenant",
        "tokens_ahead",
        "urgency",
    )

    def __init__(self, scope: Scope, body: bytes, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Raises ModelNotFound, too, for a model that is not the tenant's to use."""
        query = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = scope["headers"]
        self.body = body
        self._digest = digest(body)
        self.path = path = scope["path"]
        salt = tenant.salt
        self.model, self.prompt, options = _parse_chat(body, salt) if path == CHAT else _parse_any(body, salt)
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
        self.tokens_ahead = options.tokens_ahead
        """Number of the token that brings the first byte of the answer at the latest; None if unknown."""
        self.streams = options.stream is True
        self.answer_tokens = options.answer_tokens
        self.urgency = request_class(self.headers, tenant)
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
        kind, objective_s = self.urgency
        limits = tenant.limits
        return PickRequest(
            self.model,
            self.prompt,
            excluded,
            tenant.id,
            kind,
            None if limits is DEFAULT_TENANT.limits else limits,
            objective_s,
            self.streams,
            self.answer_tokens,
            len(self.body),
            waited_s is not None,
            resumed,
            waited_s or 0.0,
            self._digest,
            self.explain,
            direct,
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


def _parse_chat(body: bytes, salt: str) -> tuple[str | None, PromptChunks, AnswerOptions]:
    """Return the model, the prompt and the answer options, in one pass over the body."""
    try:
        chat = _chat.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_any(body, salt)  # says what is wrong, if it is not JSON
    root = _root(salt, chat.cache_salt, chat.model)
    return chat.model, prompt_chunks.chunk_messages(chat.messages, chat.tools, root), chat


def _parse_any(body: bytes, salt: str) -> tuple[str | None, PromptChunks, AnswerOptions]:
    """Return the model, the prompt in any shape, and the answer options."""
    try:
        read = _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The JSON body of your request is nested too deeply.") from error
    model = read.model if isinstance(read.model, str) else None
    return model, _prompt(read, _root(salt, read.cache_salt, model)), read


def _root(salt: str, cache_salt: object, model: str | None) -> int:
    """Where the names of the prompt's chunks begin: apart wherever a worker keeps blocks apart."""
    if isinstance(cache_salt, str):
        salt = client_salt(salt, cache_salt)
    return prompt_chunks.root_name(salt, model or "")


def _prompt(body: RequestBody, root: int) -> PromptChunks:
    if body.messages:
        try:
            messages = _messages.decode(body.messages)
            if body.system is not None:
                messages.insert(0, PromptMessage("system", body.system))
            return prompt_chunks.chunk_messages(messages, body.tools, root)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return prompt_chunks.chunk_text(bytes(body.messages), root)
    raw = body.prompt or body.input
    return prompt_chunks.chunk_text(_text(raw), root) if raw else NO_CHUNKS


def _text(raw: msgspec.Raw) -> bytes:
    """A prompt's text; of several the first one's, since the others share no prefix with what follows it."""
    try:
        prompt: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(raw)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
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
    kind, objective_s = tenant.default_class, None
    for name, value in raw:
        if name == CLASS:
            kind = value.decode("latin-1").strip().lower()
            _check_class(kind, tenant)
        elif name == OBJECTIVE:
            objective_s = _seconds(value)
    return kind, objective_s


def _check_class(kind: str, tenant: Tenant) -> None:
    if kind not in CLASSES:
        raise InvalidRequest(f"{headers.CLASS} must be one of {', '.join(CLASSES)}.", param=headers.CLASS)
    if kind not in tenant.classes:
        raise Forbidden(f"send requests of the class {kind}", tenant.name)


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
