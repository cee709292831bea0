"""Where a worker keeps what it can make or fetch again: the built-in model, the native library."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str]) -> Path:
    """BATON_CACHE, or baton's place among the user's caches; a user without a home has the temporary one."""
    if chosen := environment.get("BATON_CACHE"):
        return Path(chosen).expanduser()
    if caches := environment.get("XDG_CACHE_HOME"):
        return Path(caches) / "baton"
    return Path(environment.get("HOME") or tempfile.gettempdir()) / ".cache" / "baton"


def bundled_folder(environment: Mapping[str, str]) -> Path | None:
    """BATON_BUNDLED: a folder, never written to, with built-in models that came with a container's image."""
    folder = environment.get("BATON_BUNDLED")
    return Path(folder) if folder else None
