"""The generated page of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_cli import reference


def test_the_page_in_the_repository_is_current() -> None:
    assert reference.main(["--check"]) == 0


def test_a_page_that_is_not_current_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "PAGE", tmp_path / "reference" / "settings.md")
    assert reference.main(["--check"]) == 1
    assert "settings.md is not current: run `make fix`." in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_every_setting_has_flag_default_and_variable() -> None:
    page = reference.page()
    assert "### `--kv-cache-memory` SIZE" in page
    assert "Default: `smollm2`. Environment: `BATON_MODEL`." in page
    assert "Environment: `BATON_ROUTER_HEALTH_INTERVAL_S`." in page
