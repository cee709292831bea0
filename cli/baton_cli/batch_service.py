"""
The batch half of a service's API, asked with patience: a connection that is lost is made anew.

What only asks is asked again and again. What changes something is not sent twice unless that changes nothing:
after a lost answer to the creation of a batch, its file tells whether there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from baton_api import headers
from baton_api.errors import NotReady, SetupError

Shown = dict[str, Any]
Moved = Callable[[int, int], None]
"""Hears how many bytes of how many have passed."""

PATIENCE_S = 60.0
LONGEST_WAIT_S = 10.0

UPLOADS = 5
"""Times that an upload is begun."""

PAGE = 100
TOO_MANY, SERVER_ERRORS = 429, 500
PARTIAL, UNSATISFIABLE = 206, 416


class BatchService:
    """One service. Raises SetupError for what somebody has to change, and NotReady if the service fails."""

    def __init__(
        self,
        url: str,
        api_key: str,
        lost: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`lost` hears why an answer did not come, each time before another attempt; empty once one came."""
        self._url = url.rstrip("/")
        self._lost = lost
        self._sleep = sleep
        self._client = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=PATIENCE_S,
            trust_env=False,  # a proxy that is set for the web is not on the way to a service of one's own
        )
        self._met = False
        """Whether the service has ever answered: before that, the address is rather wrong than away."""

    def close(self) -> None:
        self._client.close()

    def upload(self, path: Path, moved: Moved) -> Shown:
        """The file, as a batch's input."""
        for _ in self._attempts(UPLOADS):
            with _opened(path) as file:
                parts = {"file": (path.name, _Counted(file, path.stat().st_size, moved), "application/jsonl")}
                answer = self._once("POST", "/files", data={"purpose": "batch"}, files=parts)
                if answer is not None:
                    return _body(answer)
        raise AssertionError

    def create(self, file: str, endpoint: str, metadata: dict[str, str], window: str = "24h") -> Shown:
        """A batch of that file, which has none yet."""
        asked: Shown = {"input_file_id": file, "endpoint": endpoint, "completion_window": window}
        if metadata:
            asked["metadata"] = metadata
        for _ in self._attempts():
            answer = self._once("POST", "/batches", json=asked)
            if answer is not None:
                return _body(answer)
            for batch in self.batches(PAGE):
                if batch["input_file_id"] == file:  # it was the answer that was lost
                    return batch
        raise AssertionError

    def batch(self, id: str) -> Shown:
        return _body(self._asked("GET", f"/batches/{id}"))

    def cancel(self, id: str) -> Shown:
        return _body(self._asked("POST", f"/batches/{id}/cancel"))  # the second time changes nothing

    def batches(self, limit: int) -> Iterator[Shown]:
        """The newest ones; all with limit 0."""
        found, after = 0, ""
        while True:
            wanted = min(PAGE, limit - found) if limit else PAGE
            where = {"limit": wanted, "after": after} if after else {"limit": wanted}
            page = _body(self._asked("GET", "/batches", params=where))
            yield from page["data"]
            found += len(page["data"])
            if not page["has_more"] or not page["data"] or (limit and found >= limit):
                return
            after = page["last_id"]

    def file(self, id: str) -> Shown:
        return _body(self._asked("GET", f"/files/{id}"))

    def download(self, id: str, size: int, to: Path, moved: Moved) -> None:
        """The file's bytes after those that are in `to` already."""
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
            raise SetupError(f"{to} cannot be written: {error.strerror}.") from error

    # --- One attempt, and many ---

    def _asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        for _ in self._attempts():
            answer = self._once(method, path, **more)
            if answer is not None:
                return answer
        raise AssertionError

    def _attempts(self, most: int | None = None) -> Iterator[int]:
        """Numbers of attempts, with growing pauses between them. Raises NotReady after the last one."""
        number = 0
        while most is None or number < most:
            if number:
                self._sleep(min(LONGEST_WAIT_S, 0.25 * 2 ** min(number, 16)))
            yield number
            number += 1
        raise NotReady(f"{self._url} cannot be reached: given up after {most} attempts.")

    def _once(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """None if it is worth another attempt."""
        try:
            answer = self._client.request(method, path, **more)
        except httpx.TransportError as error:
            self._away(error)
            return None
        return answer if self._judge(answer) else None

    def _judge(self, answer: httpx.Response) -> bool:
        """Whether it is good; False if another attempt may bring a better one."""
        self._met = True
        if answer.is_success:
            self._lost("")
            return True
        status, said = answer.status_code, _message(answer)
        if status == TOO_MANY and answer.headers.get(headers.SHOULD_RETRY) != "false":
            self._lost(said)
            return False
        if status in (502, 503, 504):
            self._lost(said)
            return False
        if status >= SERVER_ERRORS:
            raise NotReady(said)
        raise SetupError(said)

    def _away(self, error: httpx.TransportError) -> None:
        reason = str(error) or type(error).__name__
        if not self._met:
            raise SetupError(
                f"No service answers on {self._url} ({reason}). Start one with `baton up`, or give its "
                "address with --url."
            ) from error
        self._lost(reason)


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, size: int, moved: Moved) -> None:
        self._file = file
        self._size = size
        self._moved = moved

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._moved(self._file.tell(), self._size)
        return piece

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}.") from error


def _body(answer: httpx.Response) -> Shown:
    try:
        shown = answer.json()
    except ValueError as error:
        raise SetupError(f"{answer.request.url} does not answer as OpenAI's API does.") from error
    assert isinstance(shown, dict)
    return shown


def _message(answer: httpx.Response) -> str:
    """What went wrong, in the service's own words."""
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = answer.text[:500]
    return f"{said} (HTTP {answer.status_code})"
