"""
A client of the Files and Batches API that retries lost connections.

Reads are retried without limit. A write is retried only if that is safe: after a lost response to the
creation of a batch, the client looks for a batch with the same input file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from baton_api import headers
from baton_api.batch_jobs import DAY, window_fields
from baton_api.errors import NotReady, SetupError

Shown = dict[str, Any]
Moved = Callable[[int, int], None]
"""Receives the progress: bytes done, and bytes in total."""

TIMEOUT_S = 60.0
MAX_DELAY_S = 10.0

UPLOADS = 5
"""Attempts of an upload."""

PAGE = 100
TOO_MANY, SERVER_ERRORS = 429, 500
PARTIAL = 206


class BatchService:
    """One service. Raises SetupError for errors of the user, and NotReady for errors of the service."""

    def __init__(
        self,
        url: str,
        api_key: str,
        lost: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`lost` receives the reason of each retry, and an empty string after a success."""
        self._url = url.rstrip("/")
        self._lost = lost
        self._sleep = sleep
        self._client = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=TIMEOUT_S,
            trust_env=False,  # proxies of the environment are for the web, not for the user's own service
        )
        self._has_answered = False
        """Until the first answer, a connection error means a wrong address."""

    def close(self) -> None:
        self._client.close()

    def upload(self, path: Path, moved: Moved) -> Shown:
        """Upload the input file of a batch."""
        for _ in self._attempts(UPLOADS):
            with _opened(path) as file:
                parts = {"file": (path.name, _Counted(file, path.stat().st_size, moved), "application/jsonl")}
                answer = self._once("POST", "/files", data={"purpose": "batch"}, files=parts)
                if answer is not None:
                    return _body(answer)
        raise AssertionError

    def create(self, file: str, endpoint: str, metadata: dict[str, str], window: str = DAY) -> Shown:
        """Create the batch of an input file."""
        body: Shown = {"input_file_id": file, "endpoint": endpoint, **window_fields(window)}
        if metadata:
            body["metadata"] = metadata
        for _ in self._attempts():
            answer = self._once("POST", "/batches", json=body)
            if answer is not None:
                return _body(answer)
            for batch in self.batches(PAGE):
                if batch["input_file_id"] == file:  # only the response was lost
                    return batch
        raise AssertionError

    def batch(self, id: str) -> Shown:
        return _body(self._request("GET", f"/batches/{id}"))

    def cancel(self, id: str) -> Shown:
        return _body(self._request("POST", f"/batches/{id}/cancel"))  # idempotent

    def batches(self, limit: int) -> Iterator[Shown]:
        """Yield the newest batches. 0: all."""
        count, after = 0, ""
        while True:
            wanted = min(PAGE, limit - count) if limit else PAGE
            where = {"limit": wanted, "after": after} if after else {"limit": wanted}
            page = _body(self._request("GET", "/batches", params=where))
            yield from page["data"]
            count += len(page["data"])
            if not page["has_more"] or not page["data"] or (limit and count >= limit):
                return
            after = page["last_id"]

    def file(self, id: str) -> Shown:
        return _body(self._request("GET", f"/files/{id}"))

    def download(self, id: str, size: int, to: Path, moved: Moved) -> None:
        """Download a file. Resumes after the bytes that `to` contains."""
        for _ in self._attempts():
            if self._download_once(id, size, to, moved):
                return

    def _download_once(self, id: str, size: int, to: Path, moved: Moved) -> bool:
        try:
            with to.open("ab") as file:
                start = file.tell()
                if start >= size:
                    return True
                wanted = {"range": f"bytes={start}-"} if start else {}
                with self._client.stream("GET", f"/files/{id}/content", headers=wanted) as answer:
                    if answer.status_code >= 400:
                        answer.read()
                        self._judge(answer)
                        return False
                    if answer.status_code != PARTIAL:
                        file.truncate(0)
                        start = 0
                    for piece in answer.iter_bytes():
                        file.write(piece)
                        start += len(piece)
                        moved(start, size)
                return start >= size
        except httpx.TransportError as error:
            self._away(error)
            return False
        except OSError as error:
            raise SetupError(f"Cannot write {to}: {error.strerror}.") from error

    # --- Retries ---

    def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        for _ in self._attempts():
            answer = self._once(method, path, **more)
            if answer is not None:
                return answer
        raise AssertionError

    def _attempts(self, most: int | None = None) -> Iterator[int]:
        """Yield attempts with growing delays. Raises NotReady after the last one."""
        number = 0
        while most is None or number < most:
            if number:
                self._sleep(min(MAX_DELAY_S, 0.25 * 2 ** min(number, 16)))
            yield number
            number += 1
        raise NotReady(f"{self._url} did not answer after {most} attempts.")

    def _once(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """Send a request once. Returns None if it should be retried."""
        try:
            answer = self._client.request(method, path, **more)
        except httpx.TransportError as error:
            self._away(error)
            return None
        return answer if self._judge(answer) else None

    def _judge(self, answer: httpx.Response) -> bool:
        """Return whether a response is a success. False: retry. Raises for permanent errors."""
        self._has_answered = True
        if answer.is_success:
            self._lost("")
            return True
        status, message = answer.status_code, _message(answer)
        if status == TOO_MANY and answer.headers.get(headers.SHOULD_RETRY) != "false":
            self._lost(message)
            return False
        if status in (502, 503, 504):
            self._lost(message)
            return False
        if status >= SERVER_ERRORS:
            raise NotReady(message)
        raise SetupError(message)

    def _away(self, error: httpx.TransportError) -> None:
        reason = str(error) or type(error).__name__
        if not self._has_answered:
            raise SetupError(
                f"No service answers on {self._url} ({reason}). Start one with `baton up`, or set its "
                "address with --url."
            ) from error
        self._lost(reason)


class _Counted:
    """A file that reports the progress of reads."""

    def __init__(self, file: BinaryIO, size: int, moved: Moved) -> None:
        self._file = file
        self._size = size
        self._moved = moved

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._moved(self._file.tell(), self._size)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SetupError(f"Cannot read {path}: {error.strerror}.") from error


def _body(answer: httpx.Response) -> Shown:
    try:
        shown = answer.json()
    except ValueError as error:
        raise SetupError(
            f"{answer.request.url} is not an OpenAI-compatible API: it returned no JSON."
        ) from error
    assert isinstance(shown, dict)
    return shown


def _message(answer: httpx.Response) -> str:
    """Return the error message of the service."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:500]
    return f"{message} (HTTP {answer.status_code})"
