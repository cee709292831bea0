"""The generated reference pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from docs.generators import reference


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return reference.pages()


def test_pages_of_repository_are_current() -> None:
    assert reference.main(["--check"]) == 0


def test_check_names_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main([], tmp_path) == 0
    stale = tmp_path / "docs" / "reference" / "settings.md"
    stale.write_text("old")
    assert reference.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err == f"{stale} is not current. Run `make fix`.\n"


def test_setting_has_flag_default_and_variable(pages: Mapping[str, str]) -> None:
    page = pages["settings.md"]
    assert "### Workers: Device and memory" in page and "#### `--kv-cache-memory` SIZE" in page
    assert "#### `--cache-report/--no-cache-report`" in page
    assert "Default: `smollm2`. Environment: `BATON_MODEL`." in page
    assert "Environment: `BATON_ROUTER_HEALTH_INTERVAL_S`." in page


def test_reference_every_module_has_a_summary(pages: Mapping[str, str]) -> None:
    lines = pages["modules.md"].splitlines()
    modules = [line for line in lines if line.startswith("- `")]
    assert len(modules) > 50
    for line in modules:
        assert len(line.split(": ", 1)[1]) > 10, line
