"""Where a worker keeps what it can make or fetch again: the built-in model, the native library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return BATON_CACHE, or Baton's folder in the user's cache.

    A user without a home directory gets a folder in the temporary directory that is named after the user id.
    Any local user can create that name first, so `owned` decides whether a library found there is loaded.
    """
    if chosen := environment.get("BATON_CACHE"):
        return Path(chosen).expanduser()
    if caches := environment.get("XDG_CACHE_HOME"):
        return Path(caches) / "baton"
    if home := environment.get("HOME"):
        return Path(home) / ".cache" / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def owned(path: Path, *, user: int | None = None) -> bool:
    """Return whether only `user` (default: this process's) and root can change `path` itself.

    The folder that holds the path is not looked at: a volume of Kubernetes is often writable for all.
    Raises OSError if the path cannot be read.
    """
    status = path.lstat()
    return status.st_uid in (os.getuid() if user is None else user, 0) and not status.st_mode & 0o022


def bundled_folder(environment: Mapping[str, str]) -> Path | None:
    """BATON_BUNDLED: a folder, never written to, with built-in models that came with a container's image."""
    folder = environment.get("BATON_BUNDLED")
    return Path(folder) if folder else None
