"""
Generate prompts of a given number of tokens without the tokenizer of the server.

Prompts are random words, so two of them share only their intended prefix. Tokens per word and the overhead of
the chat template are measured once, from the `usage` of two responses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError

# fmt: off
WORDS = [
    "time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child",
    "eye", "woman", "place", "work", "week", "case", "point", "government", "company", "number", "group",
    "problem", "fact", "water", "room", "mother", "area", "money", "story", "month", "lot", "right",
    "study", "book", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend",
    "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name",
    "president", "team", "minute", "idea", "body", "information", "back", "parent", "face", "level",
    "office", "door", "health", "art", "war", "history", "party", "result", "change", "morning", "reason",
    "research", "girl", "guy", "moment", "air", "teacher", "force", "education",
]
# fmt: on

PREFIX_SEED = 1_000_003
"""Separates the seeds of prefixes and trace blocks from those of requests."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of requests, in tokens."""

    prompt: int
    output: int
    shared: int = 0
    """Tokens of the prefix that a group shares."""
    groups: int = 1
    """Number of different prefixes."""
    spread: float = 0.0
    """Relative variation of lengths (0-1)."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    prompt: str
    output: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Converts tokens to words, for one server and model."""

    tokens_per_word: float = 1.3
    template: float = 0.0
    """Tokens of a prompt in addition to its words."""

    @classmethod
    def learn(cls, few: tuple[int, int], many: tuple[int, int]) -> Measure:
        """
        Learn from two prompts: words, and tokens as the server counted them.

        >>> Measure.learn((10, 25), (110, 175))
        Measure(tokens_per_word=1.5, template=10.0)
        """
        tokens_per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(tokens_per_word, few[1] - tokens_per_word * few[0])

    def words(self, tokens: float) -> int:
        """Return the words for a number of tokens; at least 1."""
        return max(1, round(tokens / self.tokens_per_word))


def text(seed: int, words: int) -> str:
    """Return random words. Texts of different seeds share no prefix."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Prompts:
    """An endless iterator of requests. All randomness comes from `rng`."""

    def __init__(self, shape: Shape, measure: Measure, rng: random.Random) -> None:
        self._shape = shape
        self._measure = measure
        self._rng = rng

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> BenchRequest:
        shape, measure = self._shape, self._measure
        total = self._length(shape.prompt)
        shared = min(shape.shared, total)
        begin = ""
        if shared:
            group = self._rng.randrange(shape.groups)
            begin = text(PREFIX_SEED + group, measure.words(shared)) + " "
        rest = measure.words(max(1.0, total - shared - measure.template))
        return BenchRequest(begin + text(self._rng.getrandbits(48), rest), self._length(shape.output))

    def _length(self, middle: int) -> int:
        spread = self._shape.spread
        return max(1, round(middle * self._rng.uniform(1 - spread, 1 + spread)))


def of_blocks(blocks: tuple[int, ...], block_tokens: int, tokens: int, measure: Measure) -> str:
    """Return a prompt of blocks with `block_tokens` tokens, cut to `tokens`."""
    prompt = " ".join(text(PREFIX_SEED + (1 << 32) + block, measure.words(block_tokens)) for block in blocks)
    return " ".join(prompt.split(" ")[: measure.words(max(1.0, tokens - measure.template))])


BLOCK_TOKENS = 512
"""Tokens of a block of a trace."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    """Time since the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the blocks of its prompt, 512 tokens each."""


def rows(path: Path, minutes: float) -> Iterator[Row]:
    """
    Yield the requests in the first minutes of a trace in Mooncake's format. Raises SetupError.

    A line has `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`.
    Each id stands for 512 tokens; prompts with the same first ids share a prefix.
    """
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, f"{path}, line {number}")
                if row.at_s >= minutes * 60:
                    return
                yield row
    except OSError as error:
        raise SetupError(f"Cannot read the trace {path}: {error.strerror}.") from error


def _row(line: str, where: str) -> Row:
    try:
        given = json.loads(line)
        blocks = tuple(int(block) for block in given["hash_ids"])
        return Row(given["timestamp"] / 1e3, int(given["input_length"]), int(given["output_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{where} is not in Mooncake's format. Expected timestamp, input_length, output_length, hash_ids."
        ) from error
