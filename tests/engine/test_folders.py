"""The cache is where the user wants it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from baton_engine.machine import cache_folder, owned


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        pytest.param({"BATON_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a", id="named"),
        pytest.param({"BATON_CACHE": "~/a"}, str(Path.home() / "a"), id="named in the home"),
        pytest.param({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/baton", id="among the caches"),
        pytest.param({"HOME": "/c"}, "/c/.cache/baton", id="in the home"),
        pytest.param({}, f"{tempfile.gettempdir()}/baton-{os.getuid()}", id="without a home"),
    ],
)
def test_cache_folder_follows_the_environment(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder)


@pytest.mark.parametrize(
    ("mode", "user", "expected"),
    [
        pytest.param(0o755, 0, True, id="own"),
        pytest.param(0o755, 1, False, id="of another user"),
        pytest.param(0o775, 0, False, id="a group may write"),
        pytest.param(0o757, 0, False, id="all may write"),
    ],
)
def test_owned_file_by_user_and_mode(tmp_path: Path, mode: int, user: int, expected: bool) -> None:
    """A file counts as owned if its user is the given one or root, and no other user can write it."""
    path = tmp_path / "library.so"
    path.touch()
    path.chmod(mode)
    me = os.getuid()
    if me == 0:
        os.chown(path, 12345, -1)
        me = 12345
    assert owned(path, user=me + user) is expected


def test_owned_symbolic_link_is_judged_itself(tmp_path: Path) -> None:
    """A link that another user placed is refused, whatever it points at: its own mode is 0777."""
    (tmp_path / "link").symlink_to("/bin/sh")
    assert not owned(tmp_path / "link")
