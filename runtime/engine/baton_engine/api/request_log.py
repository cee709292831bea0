"""
Log lines of `--log-requests`: one after a request is read, one after it ends.

By default, they contain numbers and names. Only the highest level logs text, because text is private. Text is
truncated and quoted as JSON, so that it cannot forge log lines.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton_api.sampling import SamplingParams
from baton_engine.api.exchange import Exchange
from baton_engine.api.work import Work
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.settings import WorkerSettings

log = logging.getLogger(__name__)

SAMPLING_LEVEL = 1
TEXT_LEVEL = 2

VALUE_LIMIT = 200
"""Maximum characters of one sampling parameter."""


@dataclass(slots=True)
class AnswerLog:
    """Log of one request while it is answered."""

    exchange: Exchange
    left: int
    """Characters of the answers that may still be logged; 0 disables text."""
    texts: dict[int, list[str]] = field(default_factory=dict)

    def add(self, choice: int, text: str) -> None:
        if self.left > 0 and text:
            self.texts.setdefault(choice, []).append(text[: self.left])
            self.left -= len(text)

    def ended(self, reasons: Iterable[str], tokens: int) -> None:
        parts = [f"request {self.exchange.request_id} ended", f"finish={','.join(reasons)}"]
        parts.append(f"completion={tokens}")
        for number, pieces in sorted(self.texts.items()):
            parts.append(f"answer[{number}]={_quoted(''.join(pieces))}")
        log.info("%s", " ".join(parts))


class RequestLog:
    """Logs requests according to the settings."""

    def __init__(self, settings: WorkerSettings, tokenizer: Tokenizer) -> None:
        self._wanted = settings.log_requests
        self._level = settings.log_requests_level
        self._length = settings.log_requests_length
        self._tokenizer = tokenizer

    def read(self, exchange: Exchange, work: Work) -> AnswerLog | None:
        """Log a request that was read. Returns None if request logging is disabled."""
        if not self._wanted:
            return None
        prompts, parameters = work.prompts, work.parameters
        parts = [f"request {exchange.request_id} read", f"id={work.shape.id}", f"path={exchange.path}"]
        if exchange.client:
            parts.append(f"client={exchange.client}")
        parts += [
            f"prompts={len(prompts)}",
            f"tokens={sum(len(prompt.tokens) for prompt in prompts)}",
            f"n={parameters.n}",
            f"max_tokens={max(prompt.max_tokens for prompt in prompts)}",
            f"stream={'yes' if parameters.streaming.wanted else 'no'}",
        ]
        if self._level >= SAMPLING_LEVEL:
            parts += [f"seed={parameters.seed}", *_changed(parameters.sampling)]
        texts = self._level >= TEXT_LEVEL
        if texts:
            left = self._length
            for number, prompt in enumerate(prompts):
                # Most tokens have at least one character, so `left` tokens suffice.
                text = self._tokenizer.decode(prompt.tokens[:left], skip_special_tokens=False)[:left]
                parts.append(f"prompt[{number}]={_quoted(text)}")
                left -= len(text)
                if left <= 0:
                    break
        log.info("%s", " ".join(parts))
        return AnswerLog(exchange, self._length if texts else 0)


def _changed(sampling: SamplingParams) -> Iterable[str]:
    """Yield the parameters that differ from their defaults, except seed and max_tokens."""
    for parameter in dataclasses.fields(sampling):
        value = getattr(sampling, parameter.name)
        if parameter.name in ("seed", "max_tokens") or value == parameter.default:
            continue
        if parameter.name == "constraint":
            value = value.kind  # the source may be private
        elif isinstance(value, frozenset):
            value = sorted(value)
        yield f"{parameter.name}={str(value)[:VALUE_LIMIT]}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
