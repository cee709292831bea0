"""One run of a service for all tests of its telemetry."""

from __future__ import annotations

import pytest

from tests.observing.telemetry import Telemetry, collect


@pytest.fixture(scope="session")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> Telemetry:
    return collect(tmp_path_factory.mktemp("observed"))
