"""
MkDocs hook: adds root documents to the site, expands navigation folders, and resolves links out of docs/.

Source files, examples and the chart are not part of the site. A link to one of them becomes a link below
`$SITE_SOURCE_URL` (such as https://git.example.org/baton/blob/main). Without that variable it becomes the
path as code. A link to a file that does not exist fails the strict build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ADOPTED = {
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Root documents, and their places on the site."""

LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
SOURCE = os.environ.get("SITE_SOURCE_URL", "").rstrip("/")
log = logging.getLogger("mkdocs.hooks.site_links")


def on_files(files: Files, config: Any) -> Files:
    """Add the root documents, and replace `folder/` in the navigation by the folder's pages."""
    for source, place in ADOPTED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    config["nav"] = expanded(config["nav"])
    return files


def expanded(nav: Any) -> Any:
    """The navigation with each folder as its README followed by its other pages."""
    if isinstance(nav, list):
        return [expanded(item) for item in nav]
    if isinstance(nav, dict):
        return {title: expanded(item) for title, item in nav.items()}
    if not nav.endswith("/"):
        return nav
    pages = sorted(path.name for path in (DOCS / nav).glob("*.md") if path.name != "README.md")
    return [f"{nav}README.md", *(f"{nav}{page}" for page in pages)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, and those of root documents."""
    place = page.file.src_uri
    source = next((ROOT / name for name, adopted in ADOPTED.items() if adopted == place), DOCS / place)

    def resolved(link: re.Match[str]) -> str:
        text, path, anchor = link["text"], link["path"], link["anchor"] or ""
        target = Path(os.path.normpath(source.parent / path))
        if not target.exists():
            log.warning("%s links to %s, which does not exist.", source.relative_to(ROOT), path)
            return link[0]
        name = str(target.relative_to(ROOT))
        if name in ADOPTED or target.is_relative_to(DOCS):
            inside = DOCS / ADOPTED[name] if name in ADOPTED else target
            if inside.is_dir() and (inside / "README.md").exists():
                inside /= "README.md"
            return f"[{text}]({os.path.relpath(inside, (DOCS / place).parent)}{anchor})"
        if SOURCE:
            return f"[{text}]({SOURCE}/{name})"
        return f"`{name}`" if text.strip("`") in (name, target.name) else f"{text} (`{name}`)"

    return LINK.sub(resolved, markdown)
