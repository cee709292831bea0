"""The page's modules that decide (scale, layout, words, what is news), by the test runner of node itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).parent / "modules"
SECONDS = 300

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("module", sorted(MODULES.glob("*.test.mjs")), ids=lambda path: path.name)
def test_module(module: Path) -> None:
    assert NODE is not None
    run = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", str(module)], capture_output=True, text=True, timeout=SECONDS
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# pass 0" not in run.stdout
