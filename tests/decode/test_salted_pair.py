"""Two workers of one pair keep the prompts of two tenants apart: by the salt that goes with a request."""

from __future__ import annotations

import dataclasses

from baton_engine.requests import Output
from tests.decode.pair import Pair, Side, fake_side, open_pair, tokens

PROMPT = list(range(3, 53))


async def ask(pair: Pair, salt: str, side: Side | None = None) -> list[Output]:
    """Return the outputs for the prompt with this salt, from `side` or from the pair."""
    request = pair.request(PROMPT, remote=side is None)
    return await (side or pair.decode).generate(dataclasses.replace(request, salt=salt))


def cached(outputs: list[Output]) -> int:
    return outputs[0].cached_tokens


async def test_salted_pair_other_salt_is_recomputed_on_both_sides() -> None:
    prefill, decode = fake_side("prefill"), fake_side("decode")
    async with open_pair(prefill, decode) as pair:
        first = await ask(pair, "a")
        relay = first[0].relay
        assert relay is not None and (cached(first), relay.local_tokens) == (0, 0)
        whole = (len(PROMPT) - 1) // decode.cache.block_size * decode.cache.block_size
        assert cached(await ask(pair, "a")) == whole
        for salt in ("b", ""):
            other = await ask(pair, salt)
            assert other[0].relay is not None and cached(other) == 0
            assert tokens(other) == tokens(first)
            assert cached(await ask(pair, salt)) == whole
        # The prefill worker's cache is separated by salt as well.
        for salt, held in (("a", whole), ("b", whole), ("", whole), ("c", 0)):
            assert cached(await ask(pair, salt, prefill)) == held, salt
