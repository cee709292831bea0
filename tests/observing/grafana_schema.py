"""
Build a JSON schema of dashboards from the TypeScript types that Grafana publishes in `@grafana/schema`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("@grafana/schema@11.6.16", "ts-json-schema-generator@2.4.0", "typescript@5.9.3")
FETCH_S = 300.0
TYPES = Path(__file__).parent / "grafana" / "types.ts"


def grafana_schema(folder: Path) -> dict[str, Any]:
    """Return the schema. Skips the test if npm is missing or cannot install the packages."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    (folder / "package.json").write_text("{}")
    done = _run(folder, "npm", "install", "--no-audit", "--no-fund", *PACKAGES)
    if done.returncode:
        pytest.skip(f"npm has no {', '.join(PACKAGES)}: {done.stderr[-300:]}")
    (folder / "types.ts").write_text(TYPES.read_text())
    flags = ("--type", "Checked", "--no-type-check", "--expose", "none", "--no-top-ref")
    done = _run(folder, "npx", "ts-json-schema-generator", "--path", "types.ts", *flags)
    assert done.returncode == 0, done.stderr
    schema: dict[str, Any] = json.loads(done.stdout)
    return schema


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=FETCH_S)
