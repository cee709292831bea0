"""`POST /v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import __version__, limits
from baton_api.errors import InvalidRequest
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.server import parameters
from baton_engine.server.choice import Choice
from baton_engine.server.fields import Fields, shown
from baton_engine.server.logprobs import Name, chat_logprobs, prompt_logprobs, token_name
from baton_engine.server.messages import read_messages
from baton_engine.server.parameters import not_served
from baton_engine.server.served import Served
from baton_engine.server.streaming import Streaming
from baton_engine.server.transcript import Piece, Transcript
from baton_engine.server.usage import Usage
from baton_engine.server.work import Work, fit, read_max_tokens

NOT_SERVED = ("tools", "functions", "function_call", "audio", "web_search_options", "echo")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
RESERVED = frozenset({
    "messages", "conversation", "tools", "functions", "documents", "template", "chat_template", "loop",
    "tokenize", "tokenizer", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "unk_token", "pad_token", "raise_exception", "strftime_now", "namespace", "range", "dict",
})  # fmt: skip
"""What a template gets from this server alone."""


def prepare(fields: Fields, served: Served) -> Work:
    """Check, render and tokenise. Takes a while for long conversations: not for the event loop."""
    messages = _messages(fields, served)
    alternatives = _alternatives(fields)
    common = parameters.parse(fields, alternatives, served.vocabulary, served.defaults)
    _check_the_rest(fields)
    tokens = _tokens(fields, served, messages)
    wanted, wanted_param = read_max_tokens(fields, "max_completion_tokens", "max_tokens")
    prompt = fit(
        tokens,
        wanted,
        served.max_model_len,
        param="messages",
        wanted_param=wanted_param,
        truncate=served.settings.allow_auto_truncate,
    )
    parameters.check_min_tokens(common, prompt.max_tokens)
    shape = ChatShape(
        tokenizer=served.tokenizer,
        model=served.name,
        streaming=common.streaming,
        alternatives=alternatives,
        name=token_name(served.tokenizer, common.tokens_as_ids),
        prompt=prompt.tokens,
        prompt_alternatives=common.sampling.prompt_logprobs,
        prompt_ids=prompt.tokens if common.return_token_ids else None,
        metadata=fields.mapping("metadata"),
    )
    return Work((prompt,), common, shape)


def prompt_tokens(fields: Fields, served: Served) -> tuple[int, ...]:
    """The prompt that `prepare` would make of this conversation, however long it is: for /tokenize."""
    return _tokens(fields, served, _messages(fields, served))


def _messages(fields: Fields, served: Served) -> list[dict[str, str]]:
    template = served.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            f"The model {served.name!r} has no chat template; use /v1/completions.", param="messages"
        )
    return read_messages(fields, template)


def _tokens(fields: Fields, served: Served, messages: list[dict[str, str]]) -> tuple[int, ...]:
    text = _render(fields, served.tokenizer, messages)
    return tuple(served.tokenizer.encode(text, add_special_tokens=False))


@dataclass(slots=True, kw_only=True)
class ChatShape:
    """Chat completions and their chunks."""

    tokenizer: Tokenizer
    model: str
    streaming: Streaming
    alternatives: int | None
    name: Name
    prompt: Sequence[int]
    prompt_alternatives: int | None
    """Of each token of the prompt, if it is to be told of."""
    prompt_ids: Sequence[int] | None
    """If the request wants token ids."""
    metadata: Mapping[str, str] | None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)
    """Choices whose first chunk was written."""

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        chunks: list[dict[str, Any]] = []
        index = choice.index
        if index not in self._opened:
            self._opened.add(index)
            opening = {"role": "assistant", "content": ""}
            chunks.append({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
        shows_tokens = self.alternatives is not None or self.prompt_ids is not None
        if piece.text or (piece.tokens and shows_tokens):
            chunk = {
                "index": index,
                "delta": {"content": piece.text},
                "logprobs": self._logprobs(piece),
                "finish_reason": None,
            }
            chunks.append(chunk | self._token_ids(piece))
        if piece.finish is not None:
            chunks.append({"index": index, "delta": {}, "logprobs": None} | _end(choice.transcript))
        return b"".join(
            self.streaming.event(self._envelope("chat.completion.chunk", [chunk]), usage) for chunk in chunks
        )

    def closing(self, usage: Usage) -> bytes:
        return self.streaming.closing(self._envelope("chat.completion.chunk", []), usage)

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        body = self._envelope("chat.completion", [self._choice(choice, whole) for choice, whole in choices])
        body["usage"] = usage.body()
        if self.metadata is not None:
            body["metadata"] = self.metadata
        if self.prompt_ids is not None:
            body["prompt_token_ids"] = self.prompt_ids
        scores = choices[0][0].scores
        if self.prompt_alternatives is not None and scores is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, self.prompt, scores, self.prompt_alternatives
            )
        return body

    def _choice(self, choice: Choice, whole: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": whole.text,
            "refusal": None,
            "annotations": [],
        }
        body = {"index": choice.index, "message": message, "logprobs": self._logprobs(whole)}
        return body | _end(choice.transcript) | self._token_ids(whole)

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": "default",
            "system_fingerprint": f"baton-{__version__}",
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        return chat_logprobs(self.tokenizer, piece.tokens, self.alternatives, self.name)

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        return {} if self.prompt_ids is None else {"token_ids": [choice.token for choice in piece.tokens]}


def _end(transcript: Transcript) -> dict[str, Any]:
    return {
        "finish_reason": transcript.finish,
        "matched_stop": transcript.matched,
        "stop_reason": transcript.stop_reason,
    }


def _alternatives(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", *limits.TOP_LOGPROBS.range)
    if top is not None and not wanted:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs"
        )
    return (top or 0) if wanted else None


def _check_the_rest(fields: Fields) -> None:
    """Fields that are known and change nothing here, or that are not served."""
    parameters.refuse_not_served(fields, NOT_SERVED)
    tool_choice = fields.get("tool_choice")
    if tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
    for modality in fields.array("modalities", 8) or ():
        if modality != "text":
            raise not_served("modalities")
    fields.boolean("parallel_tool_calls")
    fields.boolean("store")
    fields.choice("service_tier", TIERS)
    fields.choice("verbosity", ("low", "medium", "high"))
    fields.text("user")
    fields.text("safety_identifier", limits.SAFETY_IDENTIFIER.most)
    fields.text("prompt_cache_key")
    _check_metadata(fields)


def _check_metadata(fields: Fields) -> None:
    metadata = fields.mapping("metadata") or {}
    if len(metadata) > limits.METADATA.most:
        most = limits.METADATA.most
        fields.wrong_value("metadata", f"Expected at most {most} pairs, but got {len(metadata)}")
    inner = Fields(metadata, "metadata")
    for key in metadata:
        if len(key) > limits.METADATA_KEY.most:
            most = limits.METADATA_KEY.most
            fields.wrong_value("metadata", f"a key has at most {most} characters, not {len(key)}")
        inner.require(key)
        inner.text(key, limits.METADATA_VALUE.most)


def _render(fields: Fields, tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    continued = fields.boolean("continue_final_message")
    prompted = fields.boolean("add_generation_prompt", not continued)
    if continued and prompted:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude one another.",
            param="continue_final_message",
        )
    if continued and messages[-1]["role"] != "assistant":
        fields.wrong_value("continue_final_message", "the last message is not the assistant's")
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=prompted,
        continue_final_message=continued,
        **_template_kwargs(fields, tokenizer.chat_template or ""),
    )


def _template_kwargs(fields: Fields, template: str) -> dict[str, Any]:
    """The variables of `template` that the request sets; those that it does not mention are dropped."""
    given = fields.mapping("chat_template_kwargs") or {}
    if len(given) > limits.TEMPLATE_KWARGS.most:
        most = limits.TEMPLATE_KWARGS.most
        fields.wrong_value("chat_template_kwargs", f"Expected at most {most}, but got {len(given)}")
    for name in given:
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            fields.wrong_value("chat_template_kwargs", f"{shown(name)} cannot be set by a request")
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is not None:
        given = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | given
    known = set(re.findall(r"\w+", template)) - RESERVED
    return {name: value for name, value in given.items() if name in known}
