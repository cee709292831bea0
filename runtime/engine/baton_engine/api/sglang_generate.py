"""
`POST /generate`: completions in SGLang's format.

Parameters are in `sampling_params` under SGLang's names. Each event of a stream contains the whole text so
far instead of the new part.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import InvalidRequest
from baton_api.messages import TokenChoice
from baton_engine.api import parameters
from baton_engine.api.answer_shape import Choice
from baton_engine.api.fields import Fields
from baton_engine.api.logprobs import FLOOR, scored
from baton_engine.api.prompts import read_prompts
from baton_engine.api.running import read_names
from baton_engine.api.served import Served
from baton_engine.api.streaming import DONE, Usage, data_event
from baton_engine.api.transcript import Piece
from baton_engine.api.work import Prompt, Work, fit, read_max_tokens
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import FinishReason

DEFAULT_MAX_TOKENS = 128

NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Names of SGLang that differ from those of `parameters`, with the latter."""

UNSUPPORTED = (
    "input_embeds", "image_data", "audio_data", "video_data", "lora_path", "lora_id", "token_ids_logprob",
    "custom_logit_processor", "return_hidden_states", "session_params",
)  # fmt: skip


def prepare(fields: Fields, served: Served) -> Work:
    """Validate and tokenize a request. Blocks for long prompts, so do not call it on the event loop."""
    source = _source(fields)
    given = read_prompts(fields, source, served)
    parameters.reject_unsupported(fields, UNSUPPORTED)
    alternatives = _alternatives(fields)
    start = _start_of_logprobs(fields) if alternatives is not None else None
    sampling = _sampling(fields, None if start is None else alternatives)
    common = parameters.parse(sampling, alternatives, served.vocabulary, served.defaults)
    if len(given) * common.n > limits.ALL_CHOICES.most:
        raise InvalidRequest(
            f"{len(given)} prompts with n={common.n} exceed the limit of {limits.ALL_CHOICES.most} choices.",
            param=sampling.param("n"),
        )
    options = fields.member("sampling_params")
    wanted, wanted_param = read_max_tokens(
        options, "max_new_tokens", "max_tokens", low=limits.MAX_TOKENS_OR_NONE.least
    )
    prompts = tuple(
        _fit(prompt.tokens, wanted, served, source, sampling.param(wanted_param)) for prompt in given
    )
    parameters.check_min_tokens(common, min(prompt.max_tokens for prompt in prompts))
    value = fields.get(source)
    names = read_names(fields)
    shape = SglangShape(
        id=names[0] if names else f"gen-{uuid.uuid4().hex}",
        tokenizer=served.tokenizer,
        alternatives=alternatives,
        start=start,
        shows_texts=fields.boolean("return_text_in_logprobs"),
        prompts=tuple(prompt.tokens for prompt in prompts),
        several=common.n > 1 or (isinstance(value, list) and isinstance(value[0], str | list)),
    )
    return Work(prompts, common, shape)


@dataclass(slots=True)
class OutputSoFar:
    """The output of one choice so far."""

    text: str = ""
    tokens: list[TokenChoice] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens


@dataclass(slots=True, kw_only=True)
class SglangShape:
    """Objects with `text`, `output_ids` and `meta_info`, also as events of a stream."""

    id: str
    tokenizer: Tokenizer
    alternatives: int | None
    start: int | None
    """Index of the first prompt token with a logprob in the response."""
    shows_texts: bool
    prompts: Sequence[Sequence[int]]
    several: bool
    """Whether the response is an array."""
    began: float = field(default_factory=time.monotonic)
    _gained: dict[int, OutputSoFar] = field(default_factory=dict)

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        gained = self._gained.setdefault(choice.index, OutputSoFar())
        gained.add(piece)
        body = self._body(choice, gained.text, gained.tokens, piece.finish)
        return data_event(body | {"index": choice.index} if self.several else body)

    def closing(self, usage: Usage) -> bytes:
        return DONE

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> Any:
        bodies = [self._body(choice, piece.text, piece.tokens, piece.finish) for choice, piece in choices]
        return bodies if self.several else bodies[0]

    def _body(
        self, choice: Choice, text: str, tokens: Sequence[TokenChoice], finish: FinishReason | None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": _finish(finish, choice),
            "prompt_tokens": len(self.prompts[choice.prompt]),
            "completion_tokens": choice.transcript.count,
            "cached_tokens": choice.cached_tokens,
            "weight_version": "default",
            "e2e_latency": time.monotonic() - self.began,
        }
        if self.alternatives is not None:
            meta |= self._logprobs("input", self._of_prompt(choice))
            meta |= self._logprobs("output", tokens)
        return {"text": text, "output_ids": [token.token for token in tokens], "meta_info": meta}

    def _of_prompt(self, choice: Choice) -> list[TokenChoice]:
        """Return the prompt's tokens from `start` on. The first token of the prompt has no logprob."""
        if self.start is None or choice.scores is None:
            return []
        prompt = self.prompts[choice.prompt]
        return [TokenChoice(token=prompt[0]), *scored(prompt, choice.scores)][self.start :]

    def _logprobs(self, key: str, tokens: Sequence[TokenChoice]) -> dict[str, Any]:
        rows = {f"{key}_token_logprobs": [self._entry(choice.logprob, choice.token) for choice in tokens]}
        if not self.alternatives:
            return rows
        tops = [[self._entry(logprob, token) for token, logprob in choice.top] for choice in tokens]
        return rows | {f"{key}_top_logprobs": [top[: self.alternatives] or None for top in tops]}

    def _entry(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        text = self.tokenizer.token_text(token) if self.shows_texts else None
        return None if logprob is None else max(logprob, FLOOR), token, text


def _finish(finish: FinishReason | None, choice: Choice) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish is FinishReason.STOP:
        return {"type": finish, "matched": choice.transcript.matched}
    return {"type": finish, "length": choice.transcript.count}


def _source(fields: Fields) -> str:
    """Return the field with the prompts. Raises InvalidRequest if both are set."""
    if fields.get("input_ids") is None:
        return "text"
    if fields.get("text") is not None:
        raise InvalidRequest("'text' and 'input_ids' cannot be combined. Remove one of them.", param="text")
    return "input_ids"


def _sampling(fields: Fields, prompt_logprobs: int | None) -> Fields:
    """Return `sampling_params` with translated names, and the parameters of the outer object."""
    given: Mapping[str, Any] = fields.mapping("sampling_params") or {}
    renamed = {NAMES.get(name, name): value for name, value in given.items()}
    outer = {"stream": fields.boolean("stream"), "stream_options": None, "prompt_logprobs": prompt_logprobs}
    return Fields(renamed | outer, "sampling_params")


def _alternatives(fields: Fields) -> int | None:
    wanted = fields.boolean("return_logprob")
    top = fields.integer("top_logprobs_num", *limits.TOP_LOGPROBS.range) or 0
    return top if wanted else None


def _start_of_logprobs(fields: Fields) -> int | None:
    """Read `logprob_start_len`. None: logprobs of the output only."""
    start = fields.integer("logprob_start_len", -1, limits.TOKENS)
    if start is None or start < 0:
        return None
    if fields.boolean("stream"):
        raise InvalidRequest(
            "Logprobs of the prompt are not available when 'stream' is enabled.", param="logprob_start_len"
        )
    return start


def _fit(
    tokens: tuple[int, ...], wanted: int | None, served: Served, param: str, wanted_param: str
) -> Prompt:
    return fit(
        tokens,
        wanted,
        served.max_model_len,
        param=param,
        wanted_param=wanted_param,
        default=DEFAULT_MAX_TOKENS,
        truncate=served.settings.allow_auto_truncate,
    )
