"""
Requests of clients in a replay: sessions that begin at given times, and their behavior.

A session sends a request, perhaps waits, and sends the next one with the answer. Its seconds are those of the
workload; the player may run faster. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import xxhash

from baton_cli.bench import load

Message = dict[str, str]


class Asking(Protocol):
    """Actions of a session."""

    async def ask(self, messages: list[Message], tokens: int) -> str:
        """The answer, of so many tokens; empty if something went wrong, which is noted."""
        ...

    async def pause(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """One session and the second of its begin."""

    at_s: float
    session: Callable[[Asking], Awaitable[object]]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def words(seed: int, tokens: int) -> str:
    """Text that is the same for the same seed and shares nothing with that of another."""
    word = xxhash.xxh3_64_hexdigest(seed.to_bytes(8))
    return (word * (tokens * 4 // len(word) + 1))[: tokens * 4]


def mooncake(path: Path, minutes: float) -> Iterator[Arrival]:
    """The first minutes of a Mooncake trace, each block as a text of its own."""
    for row in load.rows(path, minutes):

        async def session(asking: Asking, row: load.Row = row) -> None:
            text = "".join(words(one, load.BLOCK_TOKENS) for one in row.blocks)
            await asking.ask([user(text[: 4 * row.prompt_tokens])], row.output_tokens)

        yield Arrival(row.at_s, session)


def system_prompts(rng: random.Random, minutes: float, per_s: float = 8.0) -> Iterator[Arrival]:
    """Fifty system prompts of 2,000 to 8,000 tokens, some far more popular than others (Zipf 1.1)."""
    sizes = [rng.randrange(2000, 8000) for _ in range(50)]
    weights = list(accumulate((rank + 1) ** -1.1 for rank in range(50)))
    for number, at_s in enumerate(_poisson(rng, minutes, per_s)):
        which = rng.choices(range(50), cum_weights=weights)[0]
        system = {"role": "system", "content": words(which, sizes[which])}

        async def session(asking: Asking, system: Message = system, number: int = number) -> None:
            await asking.ask([system, user(words(1_000_000 + number, 256))], 100)

        yield Arrival(at_s, session)


def chats(rng: random.Random, minutes: float, per_s: float = 1.2) -> Iterator[Arrival]:
    """Conversations of 2 to 12 turns with some seconds of thought between, and long answers."""
    for number, at_s in enumerate(_poisson(rng, minutes, per_s)):
        dice = random.Random(rng.random())

        async def session(asking: Asking, number: int = number, dice: random.Random = dice) -> None:
            messages = [user(words(number << 16, dice.randrange(500, 4000)))]
            for turn in range(dice.randrange(2, 13)):
                answer = await asking.ask(messages, dice.randrange(100, 600))
                more = words((number << 16) + turn + 1, dice.randrange(20, 300))
                messages = [*messages, {"role": "assistant", "content": answer}, user(more)]
                await asking.pause(dice.expovariate(1 / 5))

        yield Arrival(at_s, session)


def trees(rng: random.Random, minutes: float, per_s: float = 0.08) -> Iterator[Arrival]:
    """Trees of thought: four levels, each thought with four children, a whole level asked for at once."""
    for number, at_s in enumerate(_poisson(rng, minutes, per_s)):

        async def session(asking: Asking, number: int = number) -> None:
            level = [[user(words(number << 16, 3000))]]
            names = iter(range((number << 16) + 1, (number + 1) << 16))
            for _ in range(4):
                answers = await asyncio.gather(*(asking.ask(one, 150) for one in level))
                level = [
                    [*one, {"role": "assistant", "content": answer}, user(words(next(names), 40))]
                    for one, answer in zip(level, answers, strict=True)
                    for _ in range(4)
                ]

        yield Arrival(at_s, session)


def unique(rng: random.Random, minutes: float, per_s: float = 40.0) -> Iterator[Arrival]:
    """Prompts that share nothing."""
    for number, at_s in enumerate(_poisson(rng, minutes, per_s)):

        async def session(asking: Asking, number: int = number) -> None:
            await asking.ask([user(words(number, 500))], 16)

        yield Arrival(at_s, session)


LONG_PROMPTS = 8192, 64
LONG_ANSWERS = 512, 1024
"""Tokens of the prompt and of the answer."""

LONG_PROMPTS_PER_S = 2.0
LONG_ANSWERS_PER_S = 8.0

FLIP_S = 600.0


def _independent(at_s: float, number: int, sizes: tuple[int, int]) -> Arrival:
    prompt, answer = sizes
    text = 4 * prompt - len("</user>")  # a template's end, as in `model_worker.prompt_text`

    async def session(asking: Asking) -> None:
        await asking.ask([user(words(number, prompt)[:text])], answer)

    return Arrival(at_s, session)


def long_prompts(rng: random.Random, minutes: float) -> Iterator[Arrival]:
    """Prompts of 8,192 tokens with answers of 64."""
    for number, at_s in enumerate(_poisson(rng, minutes, LONG_PROMPTS_PER_S)):
        yield _independent(at_s, number, LONG_PROMPTS)


def long_answers(rng: random.Random, minutes: float) -> Iterator[Arrival]:
    """Prompts of 512 tokens with answers of 1,024."""
    for number, at_s in enumerate(_poisson(rng, minutes, LONG_ANSWERS_PER_S)):
        yield _independent(at_s, number, LONG_ANSWERS)


def mixed(rng: random.Random, minutes: float) -> Iterator[Arrival]:
    """Both of them, each half as often."""
    per_s = LONG_PROMPTS_PER_S + LONG_ANSWERS_PER_S
    for number, at_s in enumerate(_poisson(rng, minutes, per_s / 2)):
        yield _independent(
            at_s, number, LONG_PROMPTS if per_s * rng.random() < LONG_PROMPTS_PER_S else LONG_ANSWERS
        )


def flipping(rng: random.Random, minutes: float) -> Iterator[Arrival]:
    """Long prompts and long answers in turn, changing every ten minutes, at first after five."""
    for number, at_s in enumerate(_poisson(rng, minutes, LONG_ANSWERS_PER_S)):
        if int(at_s / FLIP_S + 0.5) % 2:
            yield _independent(at_s, number, LONG_ANSWERS)
        elif LONG_ANSWERS_PER_S * rng.random() < LONG_PROMPTS_PER_S:
            yield _independent(at_s, number, LONG_PROMPTS)


GENERATED: dict[str, Callable[[random.Random, float], Iterator[Arrival]]] = {
    "system_prompts": system_prompts,
    "chats": chats,
    "trees": trees,
    "unique": unique,
    "long_prompts": long_prompts,
    "long_answers": long_answers,
    "mixed": mixed,
    "flipping": flipping,
}


def arrivals(name: str, minutes: float, seed: int = 1) -> Iterator[Arrival]:
    """One of `GENERATED`, or a Mooncake trace by its path."""
    generator = GENERATED.get(name)
    return generator(random.Random(seed), minutes) if generator else mooncake(Path(name), minutes)


def _poisson(rng: random.Random, minutes: float, per_s: float) -> Iterator[float]:
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(per_s)) < 60 * minutes:
        yield at_s
