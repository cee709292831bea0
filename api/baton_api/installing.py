"""
The command that installs an optional part of Baton, for where this copy came from.

The program is called `baton`, and the distribution `batonserve`: `baton` on the package index is another
project. A checkout is not on the index at all. So messages do not spell a command themselves:
`command("chat")` reads how this copy was installed (direct_url.json of PEP 610) and returns one that works.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "batonserve"
"""Name on the package index, and in the metadata of installed packages."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where this copy came from: the package index, unless one of the fields is set."""

    checkout: str = ""
    """Folder whose files are used in place."""
    url: str = ""
    """A wheel, a folder or a repository from which a copy was installed."""

    def requirement(self, extras: str) -> str:
        """The argument of pip that adds these extras, such as `chat` or `router,gateway`."""
        if self.checkout:
            return f"-e {shlex.quote(f'{self.checkout}[{extras}]')}"
        return shlex.quote(f"{DISTRIBUTION}[{extras}]{f' @ {self.url}' if self.url else ''}")


def command(extras: str, *options: str) -> str:
    """Return a shell command, such as `pip install 'batonserve[chat]'`. Options of pip precede the name."""
    return " ".join((*_installer(), *options, _source().requirement(extras)))


def recorded(direct_url: str) -> Source:
    """Return the source that the text of a direct_url.json records; it is empty for a package of an index."""
    if not direct_url:
        return Source()
    record = json.loads(direct_url)
    if record.get("dir_info", {}).get("editable"):
        return Source(checkout=unquote(urlsplit(record["url"]).path))
    if repository := record.get("vcs_info"):
        return Source(url=f"{repository['vcs']}+{record['url']}@{repository['commit_id']}")
    return Source(url=record["url"])


def _source() -> Source:
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        # On PYTHONPATH alone: api/baton_api/ of a checkout, or a folder of packages without one.
        folder = Path(__file__).parents[2]
        return Source(checkout=str(folder)) if (folder / "pyproject.toml").exists() else Source()
    return recorded(found.read_text("direct_url.json") or "")


def _installer() -> tuple[str, ...]:
    """The pip of this Python: by its plain name if the shell finds that one, or uv's where there is none."""
    here = Path(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return "uv", "pip", "install", "--python", shlex.quote(str(here))
    found = shutil.which("pip")
    if found and Path(found).parent == here.parent:
        return "pip", "install"
    return shlex.quote(str(here)), "-m", "pip", "install"
