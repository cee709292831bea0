"""Where a copy came from decides the command that adds extras to it."""

from __future__ import annotations

import json

import pytest

from baton_api.installing import recorded

URL = "https://git.example/baton"


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        pytest.param(None, "'batonserve[router,jwt]'", id="index"),
        pytest.param(
            {"url": "file:///home/me/my%20copy", "dir_info": {"editable": True}},
            "-e '/home/me/my copy[router,jwt]'",
            id="checkout",
        ),
        pytest.param(
            {"url": "file:///src", "dir_info": {}},
            "'batonserve[router,jwt] @ file:///src'",
            id="copied folder",
        ),
        pytest.param(
            {"url": "file:///tmp/batonserve.whl", "archive_info": {}},
            "'batonserve[router,jwt] @ file:///tmp/batonserve.whl'",
            id="wheel",
        ),
        pytest.param(
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "0a1b2c", "requested_revision": "main"}},
            f"'batonserve[router,jwt] @ git+{URL}@0a1b2c'",
            id="repository",
        ),
    ],
)
def test_requirement_is_of_the_place_that_the_copy_came_from(record: object, wanted: str) -> None:
    assert recorded(json.dumps(record) if record else "").requirement("router,jwt") == wanted
