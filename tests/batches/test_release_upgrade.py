"""
The state folder that release 0.1.0 left when it was killed, taken over by this version.

`left_by_0_1_0.json` was recorded by running that release: see `record_release`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_batches.database import Database
from baton_batches.ledger import Ledger
from baton_batches.storage import LEDGER
from baton_batches.tables import SCHEMA_VERSION
from tests.batches import chaos
from tests.batches.chaos import CHAT, Program, Router
from tests.batches.mock_worker import MODEL
from tests.batches.serving import rows
from tests.ports import steady_ports

RECORD = Path(__file__).with_name("left_by_0_1_0.json")
SCHEMA = 2
"""Of release 0.1.0."""
ENDS = {
    "completed": ("completed", 3),
    "cancelled": ("cancelled", 4),
    "failed": ("failed", 0),
    "expired": ("expired", 3),
    "running": ("completed", 24),
    "waiting": ("completed", 4),
    "validating": ("completed", 4),
    "finalizing": ("completed", 4),
    "cancelling": ("cancelled", 2),
}
"""How each batch of the record ends, and how many of its lines are completed then."""


class Left:
    """The record, in a folder and as if the release had been killed a moment ago."""

    def __init__(self, folder: Path) -> None:
        record = json.loads(RECORD.read_text())
        self.ids: dict[str, str] = record["ids"]
        self.shown: dict[str, Any] = record["shown"]
        self.later = int(time.time()) - record["at"]
        self.path = folder / "state" / LEDGER
        for name, content in record["files"].items():
            path = folder / "state" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        with contextlib.closing(sqlite3.connect(self.path)) as opened:
            opened.executescript("\n".join(record["sql"]))
            for table in ("files", "batches", "promises"):
                columns = [row[1] for row in opened.execute(f"PRAGMA table_info({table})")]
                times = [name for name in columns if name.endswith("_at") or name == "leased_until"]
                moved = ", ".join(f"{name} = {name} + {self.later}" for name in times)
                opened.execute(f"UPDATE {table} SET {moved}")
            opened.execute("UPDATE batches SET leased_until = 0 WHERE runner = ''")
            opened.commit()
            assert opened.execute("SELECT version FROM baton_schema").fetchone() == (SCHEMA,)

    def results(self, id: str) -> dict[int, bytes]:
        """Return the ledger's results of that batch."""
        query = "SELECT line, body FROM results WHERE batch = (SELECT seq FROM batches WHERE id = ?)"
        with contextlib.closing(sqlite3.connect(self.path)) as opened:
            return dict(opened.execute(query, (id,)).fetchall())


@contextlib.contextmanager
def asking(url: str) -> Iterator[list[int]]:
    """A client that sends one request after the other; gives the statuses of the answers."""
    statuses: list[int] = []
    enough = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while not enough.is_set():
                messages = [{"role": "user", "content": f"Question {len(statuses)}"}]
                answer = client.post(CHAT, json={"model": MODEL, "messages": messages})
                statuses.append(answer.status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        enough.set()
        thread.join()


def test_ledger_of_0_1_0_is_read_completely(tmp_path: Path) -> None:
    """All batches and results of the release exist in the schema of this version."""
    left = Left(tmp_path)
    before = {id: left.results(id) for id in left.ids.values()}
    with contextlib.closing(Database(f"sqlite:///{left.path}")) as database:
        ledger = Ledger(database)
        for id in left.ids.values():
            batch = ledger.find(id)
            stored = ledger.results(batch)
            assert {one.line: one.body for one in stored} == before[id]
            if not batch.status.ended:
                assert ledger.counts(id) == (batch.completed, batch.failed)
    with contextlib.closing(sqlite3.connect(left.path)) as opened:
        assert opened.execute("SELECT version FROM baton_schema").fetchall() == [(SCHEMA_VERSION,)]


@pytest.mark.slow
def test_router_replaces_0_1_0_under_load(tmp_path: Path) -> None:
    """Batches continue, ended ones and files are unchanged, and every chat is answered."""
    left = Left(tmp_path)
    recorded = left.results(left.ids["running"])
    assert recorded
    with contextlib.ExitStack() as stack:
        ports = steady_ports(2)
        worker = ["tests.batches.mock_worker", f"--port={ports[0]}"]
        stack.callback(Program(worker, tmp_path / "worker.log", {}).kill)
        router = Router(tmp_path, ports[1], ports[:1], {})
        stack.callback(router.program.end)
        router.await_ready()
        statuses = stack.enter_context(asking(router.url))
        client = stack.enter_context(httpx.Client(base_url=router.url, trust_env=False, timeout=60))
        files = client.get("/v1/files").json()["data"]
        assert [file for file in files if file["id"] in {one["id"] for one in left.shown["files"]}] == [
            _moved(one, left.later) for one in left.shown["files"]
        ]
        shown = {name: _ended(client, id) for name, id in left.ids.items()}
        assert {
            name: (batch["status"], batch["request_counts"]["completed"]) for name, batch in shown.items()
        } == ENDS
        for one in left.shown["batches"]:
            if one["status"] in chaos.TERMINAL:
                assert (
                    client.get(f"/v1/batches/{one['id']}").json().items() >= _moved(one, left.later).items()
                )
        texts = {name: _output(client, batch) for name, batch in shown.items()}
        assert {name: len(output) for name, output in texts.items()} == {
            name: completed for name, (_, completed) in ENDS.items()
        }
        running = {row["custom_id"]: row["response"]["body"] for row in texts["running"]}
        for number, body in recorded.items():
            assert running[f"request-{number}"] == json.loads(body)
        answered = len(statuses)
        chaos.await_true(lambda: len(statuses) > answered, chaos.END_S, "requests go on")
    assert set(statuses) == {200}


def _moved(shown: dict[str, Any], later: int) -> dict[str, Any]:
    """With its times as they are in the folder."""
    return {
        name: value + later if name.endswith("_at") and value is not None else value
        for name, value in shown.items()
    }


def _ended(client: httpx.Client, id: str) -> dict[str, Any]:
    def shown() -> dict[str, Any]:
        batch: dict[str, Any] = client.get(f"/v1/batches/{id}").raise_for_status().json()
        return batch

    chaos.await_true(lambda: shown()["status"] in chaos.TERMINAL, chaos.END_S, f"{id} has ended")
    return shown()


def _output(client: httpx.Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    if batch["output_file_id"] is None:
        return []
    return rows(client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().content)
