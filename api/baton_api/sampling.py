"""
Sampling parameters: one type for the API, the engine, and the messages between workers.

To add a number: a row in `baton_api.limits` (its range, in `SAMPLING_NUMBERS`), a field here, and its effect
in the engine's sampler. Parsing, the OpenAPI description, and the check of messages follow from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton_api import limits


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of an answer's text; the answer may end wherever the grammar may."""

    kind: str
    """json_schema, regex, ebnf, lark (llguidance's), structural_tag, or tools (a grammar with schemas)."""
    source: str
    """The regular expression, the grammar, or the structural tag or schema as JSON text."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that comes before the answer, and before its constraint holds."""

    start: tuple[int, ...]
    """Token ids that open it; empty if the prompt has opened it."""
    end: tuple[int, ...]
    """Token ids that close it."""
    budget: int | None = None
    """Maximum tokens of reasoning; then `end` is forced. None: no limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    How tokens are sampled and when generation ends. The API checks the ranges, not the engine.

    The random number for the token at position p of the sequence is a function of (seed, p) only. A request
    therefore gets the same tokens alone, in a batch, resumed, or from a pair of workers.
    """

    seed: int = 0
    """0 to 2**64 - 1. The API chooses one for a request without."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; the other two penalties over the output only."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias."""
    logprobs: int | None = None
    """Alternatives reported with each token (0 to 20). None reports no logprobs."""
    logprob_ids: tuple[int, ...] = ()
    """With `logprobs`: the alternatives to report, instead of the most likely ones."""
    prompt_logprobs: int | None = None
    """Alternatives reported with the logprob of each prompt token (0 to 20). None reports none. The worker
    computes such a prompt as a whole, because neither prefill workers nor the prefix cache keep logprobs."""
    max_tokens: int = 16
    """At least 1, or 0 with `prompt_logprobs`. The API has limited it to what the context leaves."""
    drawn: int = 0
    """Tokens at the end of the prompt that another worker generated for this request: they count as output,
    but not for `max_tokens`."""
    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens of output."""
    allowed_ids: tuple[int, ...] = ()
    """The only token ids that may be sampled. Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain."""
    stop_ids: frozenset[int] = frozenset()
    """End-of-sequence ids of the model and `stop_token_ids`. Empty with `ignore_eos`."""
    constraint: Constraint | None = None
    thinking: Thinking | None = None

    def first_token(self) -> SamplingParams:
        """The parameters that decide the first token only, for the prefill worker that samples it."""
        return replace(self, max_tokens=1, min_tokens=min(self.min_tokens, self.drawn + 1))

    def problem(self, vocabulary: int) -> str | None:
        """Return the error in parameters from another process, or None. `vocabulary`: number of tokens."""
        numbers = (getattr(self, limit.field) for limit in limits.SAMPLING_NUMBERS)
        finite = (*numbers, *(bias for _, bias in self.logit_bias))
        checks = {
            "a number that is not finite": all(math.isfinite(number) for number in finite),
            "a seed outside 64 bits": 0 <= self.seed < 2**64,
            "a negative top_k": self.top_k >= 0,
            "too many logprobs": self.logprobs is None or 0 <= self.logprobs <= limits.TOP_LOGPROBS.most,
            "a token outside the vocabulary": all(0 <= id < vocabulary for id in self._token_ids()),
            "a bad word without tokens": all(self.bad_words),
            "reasoning without an end": self.thinking is None or bool(self.thinking.end),
            **{
                f"a {limit.field} outside its range": self._within(limit) for limit in limits.SAMPLING_NUMBERS
            },
        }
        wrong = [name for name, holds in checks.items() if not holds]
        return f"the sampling has {wrong[0]}" if wrong else None

    def _within(self, limit: limits.Limit) -> bool:
        value = getattr(self, limit.field)
        return limit.least <= value <= limit.most and not (limit.open_below and value == limit.least)

    def _token_ids(self) -> Iterator[int]:
        """All token ids that the parameters name."""
        yield from (token for token, _ in self.logit_bias)
        yield from self.logprob_ids
        yield from self.stop_ids
        yield from self.allowed_ids
        for word in self.bad_words:
            yield from word
        if self.thinking is not None:
            yield from self.thinking.start
            yield from self.thinking.end
