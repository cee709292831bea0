"""One window for all tests of a module: it takes longer to open than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.browser import MISSING, Browser, browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(f"{MISSING} is not installed")
    with browsing() as window:
        yield window
