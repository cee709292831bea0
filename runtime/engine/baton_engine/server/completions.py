"""`POST /v1/completions`: text or token ids in, their continuation out; several prompts at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import __version__, limits
from baton_api.errors import InvalidRequest
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.server import parameters
from baton_engine.server.choice import Choice
from baton_engine.server.fields import Fields
from baton_engine.server.logprobs import completion_logprobs
from baton_engine.server.prompts import read_prompts
from baton_engine.server.served import Served
from baton_engine.server.streaming import Streaming
from baton_engine.server.transcript import Piece
from baton_engine.server.usage import Usage
from baton_engine.server.work import Prompt, Work, fit, read_max_tokens

DEFAULT_MAX_TOKENS = 16


def prepare(fields: Fields, served: Served) -> Work:
    """Check and tokenise. Takes a while for long prompts: not for the event loop."""
    prompts = read_prompts(fields, "prompt", served.tokenizer)
    alternatives = fields.integer("logprobs", *limits.LOGPROBS.range)
    common = parameters.parse(fields, alternatives, served.vocabulary, served.defaults)
    parameters.refuse_not_served(fields, ("suffix",))
    fields.text("user")
    best_of = fields.integer("best_of", *limits.BEST_OF.range)
    if best_of is not None and best_of not in (0, common.n):
        raise InvalidRequest(
            f"'best_of' is {best_of} and 'n' is {common.n}: choosing among more completions than are "
            "returned is not served.",
            param="best_of",
            code="unsupported_parameter",
        )
    echo = fields.boolean("echo")
    if echo and alternatives is not None:
        raise InvalidRequest(
            "'echo' with 'logprobs' is not served: it needs the logprobs of the prompt.",
            param="echo",
            code="unsupported_parameter",
        )
    if len(prompts) * common.n > limits.ALL_CHOICES.most:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={common.n} are more than {limits.ALL_CHOICES.most} choices.",
            param="n",
        )
    wanted, _ = read_max_tokens(fields, "max_tokens", low=0)
    works = tuple(_fit(tokens, wanted, served) for tokens, _ in prompts)
    parameters.check_min_tokens(common, min(prompt.max_tokens for prompt in works))
    shape = CompletionShape(
        tokenizer=served.tokenizer,
        model=served.name,
        streaming=common.streaming,
        alternatives=alternatives,
        echoes=tuple(_text(text, tokens, served.tokenizer) for tokens, text in prompts) if echo else None,
        prompt_ids=tuple(prompt.tokens for prompt in works) if common.return_token_ids else None,
    )
    return Work(works, common, shape)


@dataclass(slots=True, kw_only=True)
class CompletionShape:
    """Text completions and their chunks, which are alike."""

    tokenizer: Tokenizer
    model: str
    streaming: Streaming
    alternatives: int | None
    echoes: Sequence[str] | None
    """The prompts' texts, if they are to stand before the answers."""
    prompt_ids: Sequence[Sequence[int]] | None
    """If the request wants token ids."""
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)
    """Choices whose first chunk was written."""

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        chunks: list[dict[str, Any]] = []
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            if self.echoes is not None or self.prompt_ids is not None:
                opening = {
                    "index": choice.index,
                    "text": self._echo(choice.prompt),
                    "logprobs": None,
                    "finish_reason": None,
                }
                chunks.append(opening | self._prompt_ids(choice.prompt))
        shows_tokens = self.alternatives is not None or self.prompt_ids is not None
        if piece.text or piece.finish is not None or (piece.tokens and shows_tokens):
            chunks.append(self._body(piece.text, piece, choice))
        return b"".join(self.streaming.event(self._envelope([chunk]), usage) for chunk in chunks)

    def closing(self, usage: Usage) -> bytes:
        return self.streaming.closing(self._envelope([]), usage)

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        bodies = [
            self._body(self._echo(choice.prompt) + whole.text, whole, choice)
            | self._prompt_ids(choice.prompt)
            for choice, whole in choices
        ]
        return self._envelope(bodies) | {"usage": usage.body()}

    def _envelope(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": f"baton-{__version__}",
        }

    def _body(self, text: str, piece: Piece, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": piece.finish,
        }
        if self.alternatives is not None:
            body["logprobs"] = completion_logprobs(
                self.tokenizer, piece.tokens, piece.offsets, self.alternatives
            )
        if self.prompt_ids is not None:
            body["token_ids"] = [chosen.token for chosen in piece.tokens]
        if piece.finish is not None:
            transcript = choice.transcript
            body |= {"matched_stop": transcript.matched, "stop_reason": transcript.stop_reason}
        return body

    def _echo(self, prompt: int) -> str:
        return "" if self.echoes is None else self.echoes[prompt]

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids[prompt]}


def _fit(tokens: tuple[int, ...], wanted: int | None, served: Served) -> Prompt:
    return fit(
        tokens,
        wanted,
        served.max_model_len,
        param="prompt",
        wanted_param="max_tokens",
        default=DEFAULT_MAX_TOKENS,
        truncate=served.settings.allow_auto_truncate,
    )


def _text(text: str | None, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(list(tokens)) if text is None else text
