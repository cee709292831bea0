"""
`POST /v1/completions`: continues one or several prompts, given as text or token ids.

With `echo`, the response contains the text of the prompt and the offset of each of its tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton_api import __version__, limits
from baton_api.errors import InvalidRequest
from baton_engine.api import parameters
from baton_engine.api.answer_shape import Choice
from baton_engine.api.fields import Fields
from baton_engine.api.logprobs import (
    Name,
    completion_logprobs,
    echoed_logprobs,
    joined,
    mean_logprob,
    prompt_logprobs,
    token_name,
)
from baton_engine.api.parameters import Parameters
from baton_engine.api.prompts import PromptInput, read_prompts
from baton_engine.api.served import Served
from baton_engine.api.streaming import HOLE, Streaming, TextEvents, Usage
from baton_engine.api.transcript import Piece
from baton_engine.api.work import Prompt, Work, fit, read_max_tokens
from baton_engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    tokens: Sequence[int]
    text: str
    offsets: Sequence[int]
    """Offset in `text` of each of `tokens`; empty if logprobs are not requested."""


def echo_of(given: PromptInput, tokens: Sequence[int], tokenizer: Tokenizer, *, located: bool) -> Echo:
    """
    Return the echo of a prompt. `tokens` are the model's input, which may be a truncation of `given`.

    A prompt that was given as text is echoed unchanged; token ids are decoded. `located` adds offsets.
    """
    if given.text is not None and tuple(tokens) == given.tokens:
        return Echo(tokens, given.text, tokenizer.offsets(given.text) if located else ())
    stream = tokenizer.stream()
    pieces, offsets, length = [], [], 0
    for token in tokens:
        offsets.append(length)
        pieces.append(stream.push(token))
        length += len(pieces[-1])
    pieces.append(stream.flush())
    return Echo(tokens, "".join(pieces), offsets if located else ())


DEFAULT_MAX_TOKENS = 16


def prepare(fields: Fields, served: Served) -> Work:
    """Validate and tokenize a request. Blocks for long prompts, so do not call it on the event loop."""
    prompts = read_prompts(fields, "prompt", served)
    alternatives = fields.integer("logprobs", *limits.LOGPROBS.range)
    common = parameters.parse(fields, alternatives, served.vocabulary, served.defaults)
    parameters.reject_unsupported(fields, ("suffix", *parameters.CHAT_ONLY))
    fields.text("user")
    echo = fields.boolean("echo")
    n, shown, prompt_alternatives = common.n, common.alternatives, common.sampling.prompt_logprobs
    common = _choosing(fields, common)
    if echo and alternatives is not None:
        common = _scoring(common, alternatives)
    if len(prompts) * common.n > limits.ALL_CHOICES.most:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {common.n} completions each exceed the maximum of "
            f"{limits.ALL_CHOICES.most} choices.",
            param="n" if common.n == n else "best_of",
        )
    wanted, _ = read_max_tokens(fields, "max_tokens", low=0)
    works = tuple(_fit(tokens, wanted, served) for tokens, _ in prompts)
    parameters.check_min_tokens(common, min(prompt.max_tokens for prompt in works))
    located = alternatives is not None
    shape = CompletionShape(
        tokenizer=served.tokenizer,
        name=token_name(served.tokenizer, common.tokens_as_ids),
        model=served.answering(fields.text("model")),
        streaming=common.streaming,
        n=n,
        alternatives=shown,
        echo_alternatives=alternatives or 0,
        prompt_alternatives=prompt_alternatives,
        prompts=tuple(prompt.tokens for prompt in works),
        echoes=tuple(
            echo_of(given, prompt.tokens, served.tokenizer, located=located)
            for given, prompt in zip(prompts, works, strict=True)
        )
        if echo
        else None,
        shows_ids=common.return_token_ids,
    )
    return Work(works, common, shape)


def _choosing(fields: Fields, common: Parameters) -> Parameters:
    """Apply `best_of`: generate this many completions, with the logprobs that rank them."""
    best_of = fields.integer("best_of", *limits.BEST_OF.range) or common.n
    if best_of < common.n:
        fields.wrong_value("best_of", f"{best_of} is below 'n', which is {common.n}")
    if best_of == common.n:
        return common
    if common.streaming.wanted:
        fields.wrong_value(
            "best_of", "completions are ranked at their end, so 'stream' is not supported; omit 'stream'"
        )
    logprobs = common.sampling.logprobs or 0
    return replace(common, n=best_of, sampling=replace(common.sampling, logprobs=logprobs))


def _scoring(common: Parameters, alternatives: int) -> Parameters:
    """Request logprobs of the prompt."""
    most = max(alternatives, common.sampling.prompt_logprobs or 0)
    return replace(common, sampling=replace(common.sampling, prompt_logprobs=most))


@dataclass(slots=True, kw_only=True)
class CompletionShape:
    """Text completions and chunks, which have the same format."""

    tokenizer: Tokenizer
    name: Name
    model: str
    streaming: Streaming
    n: int
    """Number of returned choices per prompt: the best ones with `best_of`."""
    alternatives: int | None
    """Alternatives of each generated token. None: no logprobs."""
    echo_alternatives: int
    """Alternatives of each token of an echoed prompt."""
    prompt_alternatives: int | None
    """Alternatives of each prompt token in `prompt_logprobs`. None: no `prompt_logprobs`."""
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[Echo] | None
    """The prompts to return before the answers. None without `echo`."""
    shows_ids: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)
    """Indexes of the choices whose first chunk was written."""
    _texts: dict[int, TextEvents] = field(default_factory=dict)
    """By index, the chunks that are no more than a text."""

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        if choice.index in self._texts and piece.finish is None:
            return self._texts[choice.index].event(piece.text) if piece.text else b""
        chunks: list[dict[str, Any]] = []
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            if self.alternatives is None and not self.shows_ids and not self.streaming.continuous_usage:
                chunk = {"index": choice.index, "text": HOLE, "logprobs": None, "finish_reason": None}
                self._texts[choice.index] = TextEvents(self.streaming.event(self._envelope([chunk]), usage))
            if self.echoes is not None or self.shows_ids:
                opening = {
                    "index": choice.index,
                    "text": self._echo(choice.prompt),
                    "logprobs": self._echoed(choice),
                    "finish_reason": None,
                }
                chunks.append(opening | self._of_prompt(choice))
        shows_tokens = self.alternatives is not None or self.shows_ids
        if piece.text or piece.finish is not None or (piece.tokens and shows_tokens):
            chunks.append(self._body(piece.text, piece, choice))
        return b"".join(self.streaming.event(self._envelope([chunk]), usage) for chunk in chunks)

    def resume(self, answer: str, created: int) -> None:
        self.id, self.created = answer, created

    def closing(self, usage: Usage) -> bytes:
        return self.streaming.closing(self._envelope([]), usage)

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        bodies = [
            self._whole(choice, piece) | {"index": index}
            for index, (choice, piece) in enumerate(self._best(choices))
        ]
        return self._envelope(bodies) | {"usage": usage.body()}

    def _best(self, choices: Sequence[tuple[Choice, Piece]]) -> Iterator[tuple[Choice, Piece]]:
        """Yield the best `n` choices of each prompt, best first; without `best_of`, all in their order."""
        generated = len(choices) // len(self.prompts)
        for start in range(0, len(choices), generated):
            of_prompt = choices[start : start + generated]
            if generated > self.n:
                of_prompt = sorted(of_prompt, key=lambda entry: mean_logprob(entry[1].tokens), reverse=True)
            yield from of_prompt[: self.n]

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        body = self._body(self._echo(choice.prompt) + piece.text, piece, choice) | self._of_prompt(choice)
        echoed = self._echoed(choice)
        if echoed is not None:
            body["logprobs"] = joined(echoed, body["logprobs"])
        if self.prompt_alternatives is not None and choice.scores is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, self.prompts[choice.prompt], choice.scores, self.prompt_alternatives
            )
        return body

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
            before = len(self._echo(choice.prompt))
            offsets = [before + offset for offset in piece.offsets]
            body["logprobs"] = completion_logprobs(self.name, piece.tokens, offsets, self.alternatives)
        if self.shows_ids:
            body["token_ids"] = [chosen.token for chosen in piece.tokens]
        if piece.finish is not None:
            transcript = choice.transcript
            body |= {"matched_stop": transcript.matched, "stop_reason": transcript.stop_reason}
        return body

    def _echo(self, prompt: int) -> str:
        return "" if self.echoes is None else self.echoes[prompt].text

    def _echoed(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Return the logprobs of an echoed prompt, if requested."""
        if self.echoes is None or self.alternatives is None or choice.scores is None:
            return None
        echo = self.echoes[choice.prompt]
        return echoed_logprobs(self.name, echo.tokens, choice.scores, echo.offsets, self.echo_alternatives)

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[choice.prompt]} if self.shows_ids else {}


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
