"""
How the native library multiplies bfloat16 and 8-bit numbers: by the fastest way, as each is timed once.

The name of an instruction does not tell its rate: on some processors `vdpbf16ps` is slower than float32
products of widened numbers. The choice depends on the number of rows, by `CLASSES`. The rates are stored in
the user's cache, in a file named after the library and the processor; measuring them takes some
milliseconds. BATON_PRODUCTS names a way of each kind that is used instead, from as few rows on as it has.

"pairs" and "widened" give the same bits. "amx" sums in another order, so `Products.sums` belongs to the
compatibility of KV blocks. Quantized weights are multiplied with rows of 8 bits: "octets" and "octets-amx"
sum integers, and give the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.machine import cache_folder, trusted
from baton_engine.ops.native import library

log = logging.getLogger(__name__)

CLASSES = {"1 row": 1, "2 to 4": 4, "5 to 12": 8, "more": 48}
"""Classes of products by their rows, in the order of products.h, and the rows with which they are timed."""

BASIC, BASIC_OCTETS = "pairs", "octets"
"""The ways of both kinds that every processor has for any number of rows."""

ONE_ORDER = "in pairs"
"""`Products.sums` of all ways of bfloat16 but AMX."""

INTEGERS = "in integers"
"""How the ways of 8-bit numbers sum."""

Rates = Mapping[str, tuple[float, ...]]
"""Operations per second of one thread by way and class. 0: the processor does not have the way, or not for
so few rows."""


@dataclass(frozen=True, slots=True)
class Products:
    """The way of each class of products, and what it was chosen by."""

    chosen: tuple[str, ...]
    """Of bfloat16."""
    chosen_octets: tuple[str, ...]
    """Of 8-bit numbers."""
    rates: Rates
    sums_of: Mapping[str, str]
    """How a way sums. Ways with equal sums give equal bits."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ways' numbers in the kernels, those of bfloat16 first."""
        names = list(self.rates)
        return tuple(names.index(way) for way in (*self.chosen, *self.chosen_octets))

    @property
    def sums(self) -> str:
        """How the products sum, such as "in pairs". Workers with other sums have other KV blocks."""
        each = [self.sums_of[way] for way in self.chosen]
        if len(set(each)) == 1:
            return each[0]
        return ", ".join(f"{sums} with {name}" for name, sums in zip(CLASSES, each, strict=True))

    @property
    def exact_rows(self) -> bool:
        """Whether the bits of a row do not depend on the number of rows."""
        return len({self.sums_of[way] for way in self.chosen}) == 1

    def __str__(self) -> str:
        def measured(nth: int, chosen: str) -> str:
            exact = self.sums_of[chosen] == INTEGERS
            rates = [
                (way, each[nth] / 1e9)
                for way, each in self.rates.items()
                if each[nth] and (self.sums_of[way] == INTEGERS) is exact
            ]
            return ", ".join(f"{way} {rate:.0f}" for way, rate in rates)

        def classes(chosen: tuple[str, ...]) -> str:
            return "; ".join(
                f"{name}: {way} ({measured(nth, way)})"
                for nth, (name, way) in enumerate(zip(CLASSES, chosen, strict=True))
            )

        return (
            f"bfloat16 products by rows, in GFLOP/s of a thread: {classes(self.chosen)}. "
            f"8-bit products: {classes(self.chosen_octets)}"
        )


def products_of(kernel_library: ctypes.CDLL, environment: Mapping[str, str]) -> Products:
    """
    Choose the ways. Measures the rates if they are not stored yet, and logs them once in a process.

    Reads BATON_PRODUCTS, BATON_CACHE, XDG_CACHE_HOME and HOME. Raises SetupError if BATON_PRODUCTS is no way
    of this processor, or two of one kind.
    """
    return _products(kernel_library, environment.get("BATON_PRODUCTS", ""), cache_folder(environment))


@functools.cache
def _products(kernel_library: ctypes.CDLL, named: str, folder: Path) -> Products:
    kernel_library.baton_way_sums.restype = ctypes.c_char_p
    names = _ways(kernel_library)
    products = choose(_rates(kernel_library, names, folder), _sums(kernel_library, names), named)
    log.info("%s%s", products, " (BATON_PRODUCTS)" if named else "")
    return products


def choose(rates: Rates, sums_of: Mapping[str, str], named: str = "") -> Products:
    """
    Choose the fastest way of each class, or one that is `named` where the processor has it for so few rows.

    `named`: at most one of each kind, separated by a comma. Raises SetupError if it does not have one at all,
    or if two are of one kind.
    """
    usable = [way for way, each in rates.items() if any(each)]
    wanted = [name for name in named.split(",") if name]
    if any(name not in usable for name in wanted):
        raise SetupError(
            f"BATON_PRODUCTS is {named[:40]!r}, but this processor has "
            f"{', '.join(usable[:-1])} and {usable[-1]}."
        )

    def best(exact: bool) -> tuple[str, ...]:
        kind = [way for way in rates if (sums_of[way] == INTEGERS) is exact]
        basic = BASIC_OCTETS if exact else BASIC
        own = list(dict.fromkeys(name for name in wanted if name in kind))
        if len(own) > 1:
            raise SetupError(
                f"BATON_PRODUCTS is {named[:40]!r}, but {' and '.join(own)} are of one kind. Name one."
            )
        if own:
            return tuple(own[0] if rate else basic for rate in rates[own[0]])
        return tuple(max(kind, key=lambda way: rates[way][nth]) for nth in range(len(CLASSES)))

    return Products(best(exact=False), best(exact=True), rates, sums_of)


def measure(kernel_library: ctypes.CDLL) -> Rates:
    """Time each way with each class of rows. Takes some milliseconds."""
    kernel_library.baton_rate.restype = ctypes.c_double
    return {
        way: tuple(
            kernel_library.baton_rate(ctypes.c_int64(number), ctypes.c_int64(rows))
            for rows in CLASSES.values()
        )
        for number, way in enumerate(_ways(kernel_library))
    }


def _ways(kernel_library: ctypes.CDLL) -> tuple[str, ...]:
    kernel_library.baton_way.restype = ctypes.c_char_p
    names: list[str] = []
    while name := kernel_library.baton_way(ctypes.c_int64(len(names))):
        names.append(name.decode())
    return tuple(names)


def _sums(kernel_library: ctypes.CDLL, names: tuple[str, ...]) -> dict[str, str]:
    return {
        way: kernel_library.baton_way_sums(ctypes.c_int64(number)).decode()
        for number, way in enumerate(names)
    }


def _rates(kernel_library: ctypes.CDLL, names: tuple[str, ...], folder: Path) -> Rates:
    """Return the stored rates of this library on this processor, or measure and store them."""
    about = f"{Path(kernel_library._name).name}\n{library.processor()}"
    path = folder / f"rates-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    if (stored := _stored(path, names)) is not None and _still_has(kernel_library, stored):
        return stored
    rates = measure(kernel_library)
    # Without a cache, each start measures. The file is written whole or not at all.
    with contextlib.suppress(OSError):
        if trusted(path):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                try:
                    json.dump(rates, file)
                    os.replace(file.name, path)
                except OSError:  # of a full disk
                    Path(file.name).unlink()
    return rates


def _still_has(kernel_library: ctypes.CDLL, rates: Rates) -> bool:
    """Return whether the ways are usable here: the process that stored them may have been allowed AMX."""
    kernel_library.baton_rate.restype = ctypes.c_double
    most = ctypes.c_int64(list(CLASSES.values())[-1])
    return all(
        bool(each[-1]) == bool(kernel_library.baton_rate(ctypes.c_int64(number), most))
        for number, each in enumerate(rates.values())
    )


def _stored(path: Path, names: tuple[str, ...]) -> Rates | None:
    """Return the rates of a file, or None if it does not have one of each way and class."""
    try:
        rates = (
            {way: tuple(map(float, each)) for way, each in json.loads(path.read_text()).items()}
            if trusted(path)
            else {}
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    whole = tuple(rates) == names and all(len(each) == len(CLASSES) for each in rates.values())
    return rates if whole and all(rates[BASIC]) and all(rates[BASIC_OCTETS]) else None
