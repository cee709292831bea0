"""Weights of revisions, from flags and from a changing file."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_api.errors import SetupError
from baton_router.scheduling.revision_weights import RevisionWeights
from baton_router.settings import parse_weight

WRONG = ["", "=1", "abc", "abc=", "abc=ten", "abc=-1", "abc=nan", "abc=inf"]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_weight_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 6f1c2ab9=10"):
        parse_weight(text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 2.0  # longer than a file is not looked at
        return self.now


def test_weights_file_overrides_flags_and_is_reread(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("# the canary\nnew = 10\n\n")
    weights = RevisionWeights(["old=90", "new=1"], str(file), Clock())
    assert weights() == {"old": 90.0, "new": 10.0}
    file.write_text("new=50\nold=50.5\n")
    assert weights() == {"old": 50.5, "new": 50.0}


def test_invalid_weights_file_keeps_the_weights_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights"
    file.write_text("new=10\n")
    weights = RevisionWeights((), str(file), Clock())
    file.write_text("new=20\nold=many\n")
    assert weights() == {"new": 10.0}
    assert f"{file}, line 2: Invalid weight: 'old=many'" in caplog.text
    file.unlink()
    assert weights() == {"new": 10.0}
    file.write_text("new=30\n")
    assert weights() == {"new": 30.0}


def test_missing_weights_file_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        RevisionWeights((), str(tmp_path / "weights"))
