"""The cache is where the user wants it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from baton_engine.folders import cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        pytest.param({"BATON_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a", id="named"),
        pytest.param({"BATON_CACHE": "~/a"}, str(Path.home() / "a"), id="named in the home"),
        pytest.param({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/baton", id="among the caches"),
        pytest.param({"HOME": "/c"}, "/c/.cache/baton", id="in the home"),
        pytest.param({}, f"{tempfile.gettempdir()}/.cache/baton", id="without a home"),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder)
