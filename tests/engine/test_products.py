"""The fastest way of bfloat16 products is chosen, from rates that are measured once."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_api.errors import SetupError
from baton_api.messages import Hello
from baton_engine.model.native_decoder import native_decoder
from baton_engine.ops.native import library, products
from baton_engine.ops.native.products import CLASSES, INTEGERS, ONE_ORDER, choose, products_of
from baton_engine.transfer.handshake import Compatibility, Identity, refusal
from tests.engine.random_weights import random_weights, tiny_spec

SUMS = {
    "pairs": ONE_ORDER,
    "widened": ONE_ORDER,
    "amx": "in tiles of AMX",
    "octets": INTEGERS,
    "octets-amx": INTEGERS,
}
NONE = (0, 0, 0, 0)
AMX = {
    "pairs": (60, 120, 120, 120),
    "widened": (0, 100, 140, 200),
    "amx": (0, 0, 800, 1600),
    "octets": (200, 400, 450, 450),
    "octets-amx": (0, 0, 0, 600),
}
NO_AMX = {**AMX, "amx": NONE, "octets-amx": NONE}
FAST_PAIRS = {**NO_AMX, "pairs": (100, 300, 300, 400)}
ONLY_PAIRS = {way: each if way in ("pairs", "octets") else NONE for way, each in AMX.items()}


@pytest.mark.parametrize(
    ("rates", "named", "chosen", "exact"),
    [
        pytest.param(AMX, "", ("pairs", "pairs", "amx", "amx"), False, id="AMX"),
        pytest.param(NO_AMX, "", ("pairs", "pairs", "widened", "widened"), True, id="slow instruction"),
        pytest.param(FAST_PAIRS, "", ("pairs",) * 4, True, id="fast instruction"),
        pytest.param(ONLY_PAIRS, "", ("pairs",) * 4, True, id="one way"),
        pytest.param(AMX, "pairs", ("pairs",) * 4, True, id="pairs by name"),
        pytest.param(AMX, "widened", ("pairs", "widened", "widened", "widened"), True, id="widened by name"),
        pytest.param(
            FAST_PAIRS, "widened", ("pairs", "widened", "widened", "widened"), True, id="slower by name"
        ),
    ],
)
def test_products_chosen_by_rates(
    rates: dict[str, tuple[float, ...]], named: str, chosen: tuple[str, ...], exact: bool
) -> None:
    result = choose(rates, SUMS, named)
    assert result.chosen == chosen
    assert result.exact_rows is exact
    assert (result.sums == ONE_ORDER) is exact


@pytest.mark.parametrize(
    ("rates", "named", "chosen"),
    [
        pytest.param(AMX, "", ("octets", "octets", "octets", "octets-amx"), id="tiles are faster"),
        pytest.param({**AMX, "octets-amx": (0, 0, 0, 400)}, "", ("octets",) * 4, id="tiles are slower"),
        pytest.param(NO_AMX, "", ("octets",) * 4, id="no tiles"),
        pytest.param(AMX, "octets", ("octets",) * 4, id="by name"),
        pytest.param(AMX, "pairs,octets", ("octets",) * 4, id="by names of both kinds"),
        pytest.param(AMX, "pairs", ("octets", "octets", "octets", "octets-amx"), id="of the other kind"),
    ],
)
def test_products_of_octets_are_chosen_by_rates_and_do_not_change_sums(
    rates: dict[str, tuple[float, ...]], named: str, chosen: tuple[str, ...]
) -> None:
    result = choose(rates, SUMS, named)
    assert result.chosen_octets == chosen
    assert result.sums == choose(rates, SUMS, f"{named},octets").sums
    assert result.numbers == tuple(map(list(rates).index, (*result.chosen, *result.chosen_octets)))


@pytest.mark.parametrize("named", ["amx", "quick", "PAIRS", "octets-amx", "pairs,amx"])
def test_products_named_way_that_is_missing_is_an_error(named: str) -> None:
    with pytest.raises(
        SetupError, match=f"BATON_PRODUCTS is '{named}', but this processor has pairs, widened and octets"
    ):
        choose(NO_AMX, SUMS, named)


@pytest.mark.parametrize(
    ("named", "both"),
    [("pairs,amx", "pairs and amx"), ("octets-amx,widened,octets", "octets-amx and octets")],
)
def test_products_two_named_ways_of_one_kind_are_an_error(named: str, both: str) -> None:
    with pytest.raises(SetupError, match=f"BATON_PRODUCTS is '{named}', but {both} are of one kind"):
        choose(AMX, SUMS, named)


def test_products_description_has_the_rates() -> None:
    rates = {way: tuple(rate * 1e9 for rate in each) for way, each in NO_AMX.items()}
    assert str(choose(rates, SUMS)) == (
        "bfloat16 products by rows, in GFLOP/s of a thread: 1 row: pairs (pairs 60); 2 to 4: pairs (pairs "
        "120, widened 100); 5 to 12: widened (pairs 120, widened 140); more: widened (pairs 120, widened "
        "200). 8-bit products: 1 row: octets (octets 200); 2 to 4: octets (octets 400); 5 to 12: octets "
        "(octets 450); more: octets (octets 450)"
    )


@pytest.fixture
def kernels() -> ctypes.CDLL:
    try:
        return library.load(os.environ)
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """An environment with an empty cache, for a process that has not chosen yet."""
    products._products.cache_clear()
    yield {**os.environ, "BATON_CACHE": str(tmp_path), "BATON_PRODUCTS": ""}
    products._products.cache_clear()


def test_products_are_measured_once_and_stored(kernels: ctypes.CDLL, fresh: dict[str, str]) -> None:
    measured = products_of(kernels, fresh)
    assert all(measured.rates["pairs"]) and all(measured.rates["octets"])
    (path,) = Path(fresh["BATON_CACHE"]).iterdir()
    stored = json.loads(path.read_text())
    assert {way: tuple(each) for way, each in stored.items()} == measured.rates
    stored["pairs"] = [1e15] * len(CLASSES)  # a later process reads this
    path.write_text(json.dumps(stored))
    products._products.cache_clear()
    assert products_of(kernels, fresh).chosen == ("pairs",) * len(CLASSES)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        '{"pairs": 3}',
        '{"pairs": [1, 1, 1]}',
        '{"pairs": ["x", 1, 1, 1]}',
        '{"other": [1]}',
    ],
)
def test_products_damaged_rates_are_measured_again(
    kernels: ctypes.CDLL, fresh: dict[str, str], damaged: str
) -> None:
    products_of(kernels, fresh)
    (path,) = Path(fresh["BATON_CACHE"]).iterdir()
    path.write_text(damaged)
    products._products.cache_clear()
    assert all(products_of(kernels, fresh).rates["pairs"])
    assert json.loads(path.read_text())


def test_products_without_a_cache_are_measured(
    kernels: ctypes.CDLL, fresh: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert all(
        products_of(kernels, {**fresh, "BATON_CACHE": str(tmp_path / "file" / "cache")}).rates["pairs"]
    )


def test_pair_with_other_sums_is_refused_with_the_remedy(kernels: ctypes.CDLL) -> None:
    """Of the same model on two workers, of which BATON_PRODUCTS is set on one."""

    def identity(named: str, dtype: torch.dtype) -> Identity:
        spec = tiny_spec()
        model = native_decoder(
            spec, random_weights(spec, dtype), dtype, {**os.environ, "BATON_PRODUCTS": named}
        )
        assert model is not None
        return Identity(named, "e", "m", Compatibility.of(spec, dtype, "w", products=model.sums))

    def answer(mine: str, theirs: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
        peer = identity(theirs, dtype)
        hello = Hello(
            protocol=int(peer.compatibility.labels["protocol"]),
            worker=peer.worker,
            epoch=peer.epoch,
            model=peer.model,
            digest=peer.compatibility.digest,
            labels=dict(peer.compatibility.labels),
        )
        return refusal(identity(mine, dtype), hello)

    assert answer("pairs", "widened") is None
    try:
        reason = answer("pairs", "amx")
    except SetupError as error:
        pytest.skip(error.message)
    assert (
        reason is not None and "products is in pairs here and" in reason and "BATON_PRODUCTS=pairs" in reason
    )
    assert answer("pairs", "amx", torch.float32) is None
