"""The docs' captured screens are what the commands show."""

from __future__ import annotations

import pytest

from docs.generators.screens import FOLDER, SCREENS, drawn


@pytest.mark.parametrize("name", SCREENS)
def test_screens_in_the_docs_are_current(name: str) -> None:
    text = drawn(name)
    assert (FOLDER / f"{name}.svg").read_text() == text, "run python -m docs.generators.screens"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8000", "")
