"""A pair computes prompts with LoRA adapters if both workers have the same one, and otherwise locally."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from baton_api.prompt_report import Fallback
from baton_engine.adapters import AdapterRegistry
from baton_engine.model.decoder import Model
from baton_engine.model.lora import read_lora
from baton_engine.requests import LoadedAdapter, Output
from tests.decode.pair import Pair, Side, open_pair, tokens
from tests.decode.real_model import real_side
from tests.engine.lora_adapters import make_adapter
from tests.engine.models import VOCAB, make_model

PROMPT = [(3 + 11 * position + position**2) % VOCAB for position in range(61)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    base = make_model(root / "base")
    for seed, name in enumerate(("pirate", "poet")):
        make_adapter(root / name, base, seed=seed, r=4 + seed)
    return root


def loaded(model: Model, path: Path, name: str = "pirate") -> LoadedAdapter:
    weights = read_lora(path, model.spec, 16)
    return LoadedAdapter(name, str(path), weights.digest, weights.rank, model.prepare_adapter(weights))


async def ask(pair: Pair, adapter: LoadedAdapter | None, *, side: Side | None = None) -> list[Output]:
    request = dataclasses.replace(pair.request(PROMPT, remote=side is None, max_tokens=9), adapter=adapter)
    outputs = await (side or pair.decode).generate(request)
    assert outputs[-1].error is None
    return outputs


@pytest.fixture
def sides(root: Path) -> tuple[Side, Side, Side]:
    """A prefill worker, a decode worker and a single worker."""
    prefill, decode, one_worker = (
        real_side(name, root / "base", 16) for name in ("prefill", "decode", "single")
    )
    return prefill, decode, one_worker


async def test_adapter_pair_equals_one_worker(root: Path, sides: tuple[Side, Side, Side]) -> None:
    prefill, decode, one_worker = sides
    adapters = AdapterRegistry(lambda name, path: loaded(prefill.model, Path(path), name), 2)
    await adapters.load("other-name", str(root / "pirate"))
    async with open_pair(prefill, decode, adapters=adapters) as pair:
        await one_worker.open()
        for adapter in (loaded(decode.model, root / "pirate"), None):
            outputs = await ask(pair, adapter)
            assert outputs[0].relay is not None
            mine = adapter and loaded(one_worker.model, root / "pirate")
            single = await ask(pair, mine, side=one_worker)
            assert tokens(outputs) == tokens(single)
            assert outputs[0].tokens == single[0].tokens
        await one_worker.close()


@pytest.mark.parametrize("has", ["", "poet"])
async def test_adapter_missing_on_the_prefill_worker(
    root: Path, sides: tuple[Side, Side, Side], has: str
) -> None:
    """Without it, or with other files under its name, the decode worker computes the prompt."""
    prefill, decode, one_worker = sides
    adapters = AdapterRegistry(lambda name, path: loaded(prefill.model, Path(path), name), 2)
    if has:
        await adapters.load("pirate", str(root / has))
    async with open_pair(prefill, decode, adapters=adapters) as pair:
        await one_worker.open()
        adapter = loaded(decode.model, root / "pirate")
        request = dataclasses.replace(pair.request(PROMPT, max_tokens=9), adapter=adapter)
        outputs = await decode.generate(request)
        assert (outputs[0].relay, outputs[0].fallback) == (None, Fallback.REJECTED)
        assert tokens(outputs) == tokens(
            await ask(pair, loaded(one_worker.model, root / "pirate"), side=one_worker)
        )
        await one_worker.close()
