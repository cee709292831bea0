"""Files generated from code: written, checked, and deleted when they are obsolete."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_api.generated_files import settle


def test_generated_files_are_written_once_and_others_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "deep" / "new.yaml", tmp_path / "old.yaml"
    old.write_text("of before")
    texts = {new: "as it should be"}
    assert settle(texts, [old], check=True) == 1
    printed = capsys.readouterr().err
    assert str(new) in printed and str(old) in printed and old.exists() and not new.exists()
    assert settle(texts, [old], check=False) == 0
    assert new.read_text() == "as it should be" and not old.exists()
    assert settle(texts, [new], check=True) == 0
    new.write_text("by hand")
    assert settle(texts, [new], check=True) == 1
