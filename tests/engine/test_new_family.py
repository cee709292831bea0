"""The documentation's way to add a model family, followed literally."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import baton_engine
from docs.generators.reference import ROOT
from tests.engine.greedy import by_transformers
from tests.engine.models import make_model
from tests.engine.test_decoder import TOLERANCE, oracle, prompt

PAGE = ROOT / "docs/contributing/model-families.md"
ANSWER = """
import json, sys
from pathlib import Path
from tests.engine.greedy import by_baton
from tests.engine.test_decoder import plain, prompt
answer, = by_baton(plain(Path(sys.argv[1])), [prompt(45, seed=1)], 64, chunk=7)
print(json.dumps([answer.tokens, answer.logprobs]))
"""
"""Runs in a process of its own, whose engine has the new family."""


@pytest.mark.slow
def test_family_of_the_documentation_answers_as_transformers(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(bool(line) for line in lines.splitlines()) == 12
    copied = tmp_path / "engine" / "baton_engine"
    shutil.copytree(Path(baton_engine.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "model" / "families" / "seed_oss.py").write_text(lines)
    folder = make_model(tmp_path / "model", "seed-oss")
    ran = subprocess.run(
        [sys.executable, "-c", ANSWER, str(folder)],
        env={"PYTHONPATH": f"{copied.parent}:{ROOT}", "PATH": "", "HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    tokens, logprobs = json.loads(ran.stdout)
    wanted = by_transformers(oracle(folder), prompt(45, seed=1), tokens)
    assert tokens == wanted.tokens
    assert logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
