"""
Client libraries in environments of their own, because two majors of one SDK do not fit into one.

An environment is a folder of packages, made by uv beside other things that can be fetched again, and put
in its place whole. Where it cannot be made, the test is skipped and the reason names the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton_engine.machine import cache_folder
from tests.conformance.deployment import TIMEOUT_S

INSTALL_S = 300.0


def run_client(script: Path, address: str, packages: tuple[str, ...] = ()) -> str:
    """Return a script's output, run with these packages; it must end well and print no warnings."""
    if script.suffix == ".sh":
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        command = ["sh", str(script), address]
        environment = dict(os.environ)
    else:
        # The base interpreter sees nothing of the environment that the tests run in.
        command = [_base_python(), "-s", str(script), address]
        environment = {**os.environ, "PYTHONPATH": str(client_environment(packages))}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, env=environment)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr[-3000:]}"
    return ended.stdout


def client_environment(packages: tuple[str, ...]) -> Path:
    """The folder that has these packages, which are named with their versions."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    place = cache_folder(os.environ) / "clients" / "-".join([*packages, version])
    if not place.is_dir():
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if uv is None:
            pytest.skip(f"uv is not installed, which would fetch {', '.join(packages)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            target = Path(folder) / "packages"
            command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(target)]
            created = subprocess.run(
                [*command, *packages], capture_output=True, text=True, timeout=INSTALL_S, env=_index()
            )
            if created.returncode != 0:
                pytest.skip(f"{', '.join(packages)} could not be installed: {created.stderr.strip()[-300:]}")
            try:
                target.rename(place)
            except OSError:
                if not place.is_dir():  # another process may have been first
                    raise
    return place


def _base_python() -> str:
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _index() -> dict[str, str]:
    """uv does not read pip's configuration; a mirror that is set there is meant for it too."""
    environment = dict(os.environ)
    if not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(environment):
        if (index := environment.get("PIP_INDEX_URL", "")) == "":
            resolved = subprocess.run(
                [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
                capture_output=True,
                text=True,
            )
            index = resolved.stdout.strip()
        if index:
            environment["UV_DEFAULT_INDEX"] = index
    return environment
