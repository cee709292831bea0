"""
The page's own files, read once, and the headers that keep a browser from doing anything else with them.

Nothing comes from another address, no script or style stands in the document, and text can only ever become
text: with `require-trusted-types-for` a browser refuses to read a string as markup, whoever wrote it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from baton_router.answers import Send

FOLDER = Path(__file__).parent / "web"
PREFIX = "/page/"
"""Where the files are, but for the document, which is at `/`."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-cache"),
]

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is served."""

    body: bytes
    type: str
    tag: bytes
    """Of these very bytes."""

    @classmethod
    def of(cls, path: Path) -> File:
        body = path.read_bytes()
        tag = hashlib.sha256(body).hexdigest()[:32]
        return cls(body, f"{TYPES[path.suffix]}; charset=utf-8", f'"{tag}"'.encode())

    async def send(self, send: Send, asked: list[tuple[bytes, bytes]], *, bodiless: bool) -> None:
        """Answer with it, or with nothing if the browser has these bytes already."""
        same = any(name == b"if-none-match" and self.tag in value for name, value in asked)
        headers = [
            (b"content-type", self.type.encode()),
            (b"etag", self.tag),
            *HEADERS,
            *([] if same else [(b"content-length", str(len(self.body)).encode())]),
        ]
        await send({"type": "http.response.start", "status": 304 if same else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if same or bodiless else self.body})


def files() -> dict[str, File]:
    """All of them, by their paths."""
    found = {f"{PREFIX}{path.name}": File.of(path) for path in FOLDER.iterdir() if path.suffix in TYPES}
    found["/"] = found.pop(f"{PREFIX}index.html")
    return found
