"""
Prompts of so many tokens, for a server whose tokenizer nobody here has.

A prompt is words by chance, so that no two share anything but the prefix that they are meant to share. How
many tokens a word has, and what a chat's template adds, the server's own usage tells once.
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
"""Keeps what prefixes and traces' blocks are made of apart from what requests are made of."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests are like, in tokens."""

    prompt: int
    output: int
    shared: int = 0
    """Of a prompt, how many its group shares."""
    groups: int = 1
    """How many different beginnings there are."""
    spread: float = 0.0
    """By what share lengths differ from the middle at most: 0 to 1."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    prompt: str
    output: int


@dataclass(frozen=True, slots=True)
class Measure:
    """From tokens to words, for one server and model."""

    tokens_per_word: float = 1.3
    template: float = 0.0
    """Tokens that a prompt has besides its words."""

    @classmethod
    def learn(cls, few: tuple[int, int], many: tuple[int, int]) -> Measure:
        """
        From two prompts: how many words, and how many tokens the server counted.

        >>> Measure.learn((10, 25), (110, 175))
        Measure(tokens_per_word=1.5, template=10.0)
        """
        each = (many[1] - few[1]) / (many[0] - few[0])
        return cls(each, few[1] - each * few[0])

    def words(self, tokens: float) -> int:
        """At least 1."""
        return max(1, round(tokens / self.tokens_per_word))


def text(seed: int, words: int) -> str:
    """The same for the same seed, and shares nothing with that of another."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Prompts:
    """Requests one after the other; all chance comes from `rng`."""

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


def of_blocks(blocks: tuple[int, ...], each: int, tokens: int, measure: Measure) -> str:
    """A prompt of `tokens`, each block of `each` tokens a text of its own; it ends within the last one."""
    whole = " ".join(text(PREFIX_SEED + (1 << 32) + one, measure.words(each)) for one in blocks)
    return " ".join(whole.split(" ")[: measure.words(max(1.0, tokens - measure.template))])


BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    at_s: float
    """Since the trace began."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of its beginning, 512 tokens each."""


def rows(path: Path, minutes: float) -> Iterator[Row]:
    """Those of the first `minutes`. Raises SetupError."""
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, f"{path}, line {number}")
                if row.at_s >= minutes * 60:
                    return
                yield row
    except OSError as error:
        raise SetupError(f"The trace {path} cannot be read: {error.strerror}.") from error


def _row(line: str, where: str) -> Row:
    try:
        given = json.loads(line)
        blocks = tuple(int(one) for one in given["hash_ids"])
        return Row(given["timestamp"] / 1e3, int(given["input_length"]), int(given["output_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{where} is no line of a Mooncake trace: timestamp, input_length, output_length, hash_ids."
        ) from error
