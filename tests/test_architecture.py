"""docs/architecture.md lists the modules that a request passes, as a trace of a real request shows them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.engine.models import make_model
from tests.trace import trace_request

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
SUPPORTING = "Supporting modules"


def listed() -> dict[str, list[str]]:
    """The modules in the tables of the page, by heading."""
    _, _, text = PAGE.read_text().partition("## Modules that a request passes")
    sections = re.split(r"^### ", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: re.findall(r"^\| `(baton_[\w.]+)` \|", section, re.MULTILINE)
        for section in sections
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


async def test_architecture_lists_modules_of_a_real_request(model: Path) -> None:
    entered = list(await trace_request(model))
    sections = listed()
    supporting = set(sections.pop(SUPPORTING))
    steps = [module for modules in sections.values() for module in modules]
    assert len(steps) == len(set(steps)) > 40 and not supporting & set(steps)
    assert not [module for module in supporting if importlib.util.find_spec(module) is None]
    assert set(entered) - supporting - set(steps) == set(), "entered, but not on the page"
    assert set(steps) - set(entered) == set(), "on the page, but not entered"
    for step, modules in sections.items():
        assert modules == [module for module in entered if module in modules], step
