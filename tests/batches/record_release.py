"""
Record the state folder that a release leaves, by running that release.

    git worktree add /tmp/release <commit>
    PYTHONPATH=/tmp/release/api:/tmp/release/router:...:/tmp/release \\
        python -m tests.batches.record_release tests/batches/left_by_<release>.json

It uses only what release 0.1.0 has. A router with real runners brings batches to their ends and is killed
while one runs. Batches that are validated, rendered or cancelled at that moment would need chance: the
release's own ledger creates them at the end. The record holds the database as SQL, the files' contents, and
what the release's API showed before it was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

import baton_router
from baton_batches.ledger import Ledger
from baton_batches.storage import LEDGER
from baton_batches.values import LineResult
from tests.batches import chaos
from tests.batches.chaos import CHAT, Program, Router
from tests.ports import steady_ports

GOOD = b'{"choices":[{"message":{"content":"recorded"}}],"usage":{"total_tokens":5}}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path)
    given = parser.parse_args()
    print(f"recording what {baton_router.__file__} leaves")
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        given.record.write_text(json.dumps(recorded(Path(folder)), indent=1) + "\n")


def recorded(folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        ports = steady_ports(2)
        worker = ["tests.batches.mock_worker", f"--port={ports[0]}", "--seconds=0.3", "--slots=2"]
        stack.callback(Program(worker, folder / "worker.log", {}).kill)
        router = Router(folder, ports[1], ports[:1], {})
        stack.callback(router.program.kill)
        router.await_ready()
        client = stack.enter_context(httpx.Client(base_url=router.url, trust_env=False, timeout=60))
        ids = _ended(client, folder / "state" / LEDGER)
        ids["running"] = submitted(client, 24)
        await_status(client, ids["running"], lambda shown: shown["request_counts"]["completed"] >= 3)
        deleted = upload(client, b"deleted\n", "user_data")
        client.delete(f"/v1/files/{deleted}").raise_for_status()
        upload(client, b"kept\n", "user_data")
        inputs = {name: _input(client, 4) for name in ("waiting", "validating", "finalizing", "cancelling")}
        shown = {
            "files": client.get("/v1/files").json()["data"],
            "batches": client.get("/v1/batches").json()["data"],
        }
        owner = _owner(folder / "state" / LEDGER)
        router.program.kill()
    ids |= _by_the_ledger(folder / "state" / LEDGER, owner, inputs)
    return {"at": int(time.time()), "ids": ids, "shown": shown, **_left(folder / "state")}


def _ended(client: httpx.Client, ledger: Path) -> dict[str, str]:
    """A batch of each end."""
    ids = {"completed": submitted(client, 3), "cancelled": submitted(client, 60)}
    await_status(client, ids["cancelled"], lambda shown: shown["request_counts"]["completed"] >= 1)
    client.post(f"/v1/batches/{ids['cancelled']}/cancel").raise_for_status()
    ids["failed"] = created(client, upload(client, b"no request\n", "batch"))
    for name in ("completed", "cancelled", "failed"):
        await_status(client, ids[name], lambda shown, name=name: shown["status"] == name)
    ids["expired"] = submitted(client, 24)
    await_status(client, ids["expired"], lambda shown: shown["request_counts"]["completed"] >= 1)
    with contextlib.closing(sqlite3.connect(ledger, timeout=30)) as opened, opened:
        opened.execute("UPDATE batches SET expires_at = ? WHERE id = ?", (int(time.time()), ids["expired"]))
    await_status(client, ids["expired"], lambda shown: shown["status"] == "expired")
    return ids


def _by_the_ledger(path: Path, owner: str, inputs: dict[str, str]) -> dict[str, str]:
    """Create batches without a holder, or with a holder that just died."""
    from baton_batches.database import Database
    from baton_batches.files import FileLedger

    database, now = Database(f"sqlite:///{path}"), int(time.time())
    ledger, files = Ledger(database), FileLedger(database)
    ids = {
        name: ledger.create(owner, CHAT, files.get(owner, file, now), now).id for name, file in inputs.items()
    }
    assert ledger.lease(ids["validating"], "keeper that died", now, 15) == 1
    for name in ("finalizing", "cancelling"):
        epoch = ledger.lease(ids[name], "keeper", now, 15)
        assert epoch is not None
        ledger.validated(ids[name], epoch, now, total=4, model="mock")
        epoch = ledger.lease(ids[name], "runner", now, 15)
        assert epoch is not None
        last = 4 if name == "finalizing" else 2
        results = [LineResult(number, 200, GOOD, f"req_{number}") for number in range(1, last + 1)]
        ledger.record(ids[name], epoch, results, now)
    assert ledger.lease(ids["finalizing"], "keeper that died", now, 15)
    ledger.request_cancel(owner, ids["cancelling"], now)
    files.begin_upload("broken/upload", now)
    database.close()
    return ids


def _left(state: Path) -> dict[str, Any]:
    with contextlib.closing(sqlite3.connect(state / LEDGER)) as opened:
        rows = list(opened.iterdump())
        files = {
            str(path.relative_to(state)): path.read_text()
            for path in sorted(state.rglob("*"))
            if path.is_file() and not path.name.startswith(LEDGER)
        }
    return {"sql": rows, "files": files}


def _owner(ledger: Path) -> str:
    with contextlib.closing(sqlite3.connect(ledger, timeout=30)) as opened:
        owner: str = opened.execute("SELECT owner FROM batches LIMIT 1").fetchone()[0]
    return owner


def upload(client: httpx.Client, content: bytes, purpose: str) -> str:
    """The id of a new file."""
    given = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": purpose}}
    id: str = client.post("/v1/files", **given).raise_for_status().json()["id"]  # type: ignore[arg-type]
    return id


def _input(client: httpx.Client, lines: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "input.jsonl"
        chaos.write_lines(source, lines)
        return upload(client, source.read_bytes(), "batch")


def created(client: httpx.Client, file: str) -> str:
    """The id of a new batch."""
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    id: str = client.post("/v1/batches", json=body).raise_for_status().json()["id"]
    return id


def submitted(client: httpx.Client, lines: int) -> str:
    return created(client, _input(client, lines))


def await_status(client: httpx.Client, id: str, reached: Any) -> None:
    """Look until the batch as the API shows it is so."""
    chaos.await_true(lambda: reached(client.get(f"/v1/batches/{id}").json()), 120, f"{id} is so")


if __name__ == "__main__":
    main()
