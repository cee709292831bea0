"""
The dashboard's HTTP endpoints and static files.

`GET /dashboard/state` is the current state as JSON. `GET /dashboard/events` streams it as server-sent events:
first the whole state, then changes, `service` at most once a second and `requests` at most four times.
Without an open dashboard nothing is computed.

All files come from this server, no script or style is inline, and `require-trusted-types-for` keeps a browser
from parsing strings as markup.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton_api.errors import BatonError, MethodNotAllowed, NotReady
from baton_api.json_text import on_one_line
from baton_http.replies import Receive, Scope, Send, request_id, send_error, send_json
from baton_router.dashboard.views import RequestWatch, service_view
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.tenants.access import tenant_of
from baton_router.tenants.tenants import Tenant

NOW = "/dashboard/state"
EVENTS = "/dashboard/events"
DATA_PATHS = frozenset({NOW, EVENTS})

POLL_S = 0.25
"""Seconds between two checks of the requests."""

SERVICE_POLLS = 4
"""Checks between two views of the service."""

KEEP_ALIVE_POLLS = 40
"""Polls without a change after which an open dashboard gets a keep-alive event."""

WATCHERS_LIMIT = 32
"""Maximum open dashboards that receive events from one router."""

_encoder = msgspec.json.Encoder()


class LiveDashboard:
    """Belongs to the scheduler's process."""

    def __init__(self, scheduler: RequestScheduler, draining: Callable[[], bool]) -> None:
        """`draining`: whether the process is ending. Event streams end then, else it would wait for them."""
        self.files = static_files()
        self._draining = draining
        self._scheduler = scheduler
        self._offset_s = time.time() - time.monotonic()
        """Read once: were it read for each time, two times of one request would not fit each other."""
        self.watched = 0
        """Open dashboards that receive events now."""

    async def serve_file(self, scope: Scope, send: Send) -> bool:
        """Serve the requested file. Returns whether there is one."""
        file = self.files.get(scope["path"])
        if file is None or scope["method"] not in ("GET", "HEAD"):
            return False
        await file.send(send, scope["headers"], bodiless=scope["method"] == "HEAD")
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the paths in `DATA_PATHS` to an authenticated tenant."""
        name = request_id(scope["headers"])
        try:
            if scope["method"] != "GET":
                raise MethodNotAllowed(scope["method"], scope["path"], "GET")
            if scope["path"] == EVENTS:
                await self._watch(tenant_of(scope), receive, send)
                return
        except BatonError as error:
            await send_error(send, error, name)
            return
        watch = RequestWatch(tenant_of(scope))
        now = {"service": self._service(watch.tenant), "requests": self._news(watch)}
        await send_json(send, 200, _encoder.encode(now), name, HEADERS)

    async def _watch(self, tenant: Tenant, receive: Receive, send: Send) -> None:
        if self.watched >= WATCHERS_LIMIT:
            raise NotReady(f"{self.watched} pages are open, the maximum of one router. Close one.")
        self.watched += 1
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await self._stream(RequestWatch(tenant), disconnect, send)
        finally:
            self.watched -= 1
            disconnect.cancel()
            with suppress(asyncio.CancelledError):
                await disconnect

    async def _stream(self, watch: RequestWatch, disconnect: asyncio.Future[None], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no"), *HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sent: dict[str, Any] = {}
        polls = idle_polls = 0
        while not self._draining() and not disconnect.done():
            events = b""
            if polls % SERVICE_POLLS == 0:
                service = self._service(watch.tenant)
                if {**service, "now": 0} != sent:
                    sent = {**service, "now": 0}
                    events += _event(b"service", service)
            if news := self._news(watch):
                events += _event(b"requests", {"now": self._epoch(self._clock()), "requests": news})
            polls += 1
            idle_polls = 0 if events else idle_polls + 1
            if idle_polls >= KEEP_ALIVE_POLLS:
                idle_polls, events = 0, b": the router lives\n\n"
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await asyncio.wait([disconnect], timeout=POLL_S)
        await send({"type": "http.response.body", "body": b""})

    def _service(self, tenant: Tenant) -> dict[str, Any]:
        scheduler = self._scheduler
        placements = scheduler.planner.placements
        return service_view(
            scheduler.workers,
            scheduler.queue,
            placements,
            tenant,
            self._clock(),
            self._epoch,
            self._draining(),
        )

    def _news(self, watch: RequestWatch) -> list[dict[str, Any]]:
        return watch.news(self._scheduler.planner.placements, self._epoch)

    @staticmethod
    def _clock() -> float:
        """The scheduler's."""
        return time.monotonic()

    def _epoch(self, at: float) -> float:
        """Milliseconds since 1970 of a time of the scheduler's clock."""
        return round(1000 * (self._offset_s + at), 1)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(kind: bytes, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, on_one_line(_encoder.encode(value)))


FOLDER = Path(__file__).parent / "web"
PREFIX = "/dashboard/"
"""Path of the files, except the document, which is at `/`."""

CONTENT_SECURITY_POLICY = "; ".join(
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
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
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
class StaticFile:
    """One file as it is served."""

    body: bytes
    type: str
    tag: bytes
    """Of these very bytes."""

    @classmethod
    def of(cls, path: Path) -> StaticFile:
        body = path.read_bytes()
        tag = hashlib.sha256(body).hexdigest()[:32]
        return cls(body, f"{TYPES[path.suffix]}; charset=utf-8", f'"{tag}"'.encode())

    async def send(self, send: Send, request_headers: list[tuple[bytes, bytes]], *, bodiless: bool) -> None:
        """Send the file, or 304 if the browser has these bytes."""
        same = any(name == b"if-none-match" and self.tag in value for name, value in request_headers)
        headers = [
            (b"content-type", self.type.encode()),
            (b"etag", self.tag),
            *HEADERS,
            *([] if same else [(b"content-length", str(len(self.body)).encode())]),
        ]
        await send({"type": "http.response.start", "status": 304 if same else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if same or bodiless else self.body})


def static_files() -> dict[str, StaticFile]:
    """All of them, by their paths."""
    files = {f"{PREFIX}{path.name}": StaticFile.of(path) for path in FOLDER.iterdir() if path.suffix in TYPES}
    files["/"] = files.pop(f"{PREFIX}index.html")
    return files
