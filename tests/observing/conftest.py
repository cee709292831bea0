"""One service for all who look at what it told."""

from __future__ import annotations

import pytest

from tests.observing.whole_service import Told, tell


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return tell(tmp_path_factory.mktemp("observed"))
