"""`baton batch`: what is printed, what the exit status says, and what a lost connection costs: nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton_api.errors import NotReady, SetupError
from baton_cli import batch_commands
from baton_cli.batch_commands import BatchDisplay, exit_status, summary
from baton_cli.batch_service import BatchService
from baton_cli.main import main
from tests.cli.fake_batches import FakeBatches, fake_batches

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


@pytest.fixture
def batches() -> Iterator[FakeBatches]:
    with fake_batches() as running:
        yield running


@pytest.fixture
def service(batches: FakeBatches) -> Iterator[BatchService]:
    """A patient client that has met its service, and waits without time passing."""
    client = BatchService(batches.url, "", lambda reason: None, sleep=lambda seconds: None)
    list(client.batches(1))
    batches.requests.clear()
    yield client
    client.close()


def baton(batches: FakeBatches, *arguments: str) -> int:
    """The exit status of `baton batch`."""
    with pytest.raises(SystemExit) as ended:
        main(["batch", *arguments, "--url", batches.url])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def requests(folder: Path) -> str:
    path = folder / "requests.jsonl"
    path.write_bytes(LINE)
    return str(path)


def end(status: str, completed: int = 0, failed: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"total": completed + failed, "completed": completed, "failed": failed}
    return {"status": status, "request_counts": counts, **more}


def test_submit_uploads_and_prints_the_id(
    batches: FakeBatches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = requests(tmp_path)
    assert baton(batches, "submit", file, "--metadata", "team=a=b", "--api-key", "k") == 0
    assert capsys.readouterr().out == "batch_0\n"
    assert batches.files == {"file-0": LINE.rstrip(b"\n")} or batches.files == {"file-0": LINE}
    assert batches.batches["batch_0"]["endpoint"] == "/v1/chat/completions"
    assert batches.batches["batch_0"]["metadata"] == {"team": "a=b"}
    assert set(batches.keys) == {"Bearer k"}


def test_with_watch_it_ends_when_the_batch_does(
    batches: FakeBatches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches.polls = [end("completed", 5, completed_at=107)]
    assert baton(batches, "submit", requests(tmp_path), "--watch") == 0
    printed = capsys.readouterr()
    assert printed.out == "batch_0: completed; 5 of 5 completed, 0 failed; 7 s\n"
    assert printed.err == ""  # no progress bar without a terminal


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (end("completed", 5), 0),
        (end("completed", 4, 1), 3),
        (end("cancelled", 2), 4),
        (end("expired", 2, 3), 4),
        (end("failed"), 1),
    ],
    ids=["all answered", "one line failed", "cancelled", "expired", "no batch"],
)
def test_batch_exit_status_follows_the_batchs_end(
    batches: FakeBatches, last: dict[str, Any], status: int
) -> None:
    id = batches.add_batch()
    batches.polls = [last]
    assert baton(batches, "watch", id) == status
    assert exit_status(batches.batches[id]) == status


def test_batch_invalid_file_names_its_line() -> None:
    errors = {"data": [{"line": 3, "message": "The line has no body."}, {"line": 4, "message": "x"}]}
    shown = {"id": "batch_1", "created_at": 1, **end("failed", errors=errors)}
    assert summary(shown) == "batch_1: failed; line 3: The line has no body. (and 1 more)"


def test_json_is_for_scripts(batches: FakeBatches, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        batches.add_batch(status="completed")
    assert baton(batches, "list", "--output", "json") == 0
    assert [batch["id"] for batch in json.loads(capsys.readouterr().out)] == ["batch_2", "batch_1", "batch_0"]
    assert baton(batches, "watch", "batch_1", "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"


def test_batch_list_without_terminal_is_not_cut(
    batches: FakeBatches, capsys: pytest.CaptureFixture[str]
) -> None:
    batches.add_batch(**end("in_progress", 4, 1), model="a" * 60)
    assert baton(batches, "list") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("batch_0", "in_progress", "5/5", "1", "/v1/embeddings", "a" * 60)
    ]


def test_all_batches_come_page_by_page(batches: FakeBatches, service: BatchService) -> None:
    names = [batches.add_batch() for _ in range(250)]
    assert [batch["id"] for batch in service.batches(0)] == names[::-1]
    assert batches.requests == ["GET /v1/batches"] * 3
    assert [batch["id"] for batch in service.batches(150)] == names[:-151:-1]


def test_cancel_says_what_it_is_now(batches: FakeBatches, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton(batches, "cancel", batches.add_batch()) == 0
    assert capsys.readouterr().out == "batch_0: cancelling\n"


# --- Downloads ---


def test_batch_download_resumes_after_a_break(
    batches: FakeBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batches.files["file-9"] = bytes(range(256)) * 2
    id = batches.add_batch(status="completed", output_file_id="file-9")
    batches.short = 2
    assert baton(batches, "download", id) == 0
    assert batches.ranges == ["", "bytes=100-", "bytes=200-"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{id}_output.jsonl"]
    assert (tmp_path / f"{id}_output.jsonl").read_bytes() == batches.files["file-9"]


def test_batch_download_resumes_an_earlier_calls_part(batches: FakeBatches, tmp_path: Path) -> None:
    batches.files["file-9"] = b"0123456789"
    id = batches.add_batch(status="completed", error_file_id="file-9")
    (tmp_path / "out.file-9.part").write_bytes(b"01234")
    (tmp_path / "out.file-8.part").write_bytes(b"another file's")
    assert baton(batches, "download", id, "--errors", "--to", str(tmp_path / "out")) == 0
    assert batches.ranges == ["bytes=5-"]
    assert (tmp_path / "out").read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    ("batch", "flags", "message"),
    [
        (end("in_progress", 1), [], "is in_progress and has no files yet"),
        (end("completed", 1, output_file_id="f"), ["--errors"], "has no errors"),
        (end("completed", 0, 1, error_file_id="f"), [], "Download its errors with --errors"),
        (end("failed"), [], "has no results"),
    ],
)
def test_why_there_is_nothing_to_download(
    batches: FakeBatches,
    batch: dict[str, Any],
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert baton(batches, "download", batches.add_batch(**batch), *flags) == 2
    assert message in capsys.readouterr().err


# --- Connections that are lost ---


def test_batch_request_is_retried_until_answered(batches: FakeBatches, service: BatchService) -> None:
    id = batches.add_batch()
    batches.cut = 7
    assert service.batch(id)["id"] == id
    assert batches.requests == [f"GET /v1/batches/{id}"] * 8


def test_batch_upload_is_restarted(batches: FakeBatches, service: BatchService, tmp_path: Path) -> None:
    batches.cut = 2
    moved: list[int] = []
    service.upload(Path(requests(tmp_path)), lambda done, total: moved.append(done))
    assert len(batches.files) == 1 and moved[-1] == len(LINE)
    batches.cut = 100
    with pytest.raises(NotReady, match="after 5 attempts"):
        service.upload(Path(requests(tmp_path)), lambda done, total: None)


def test_batch_create_with_lost_answer_makes_one_batch(batches: FakeBatches, service: BatchService) -> None:
    batches.add_batch(input_file_id="another")
    batches.cut_after = 1
    created = service.create("file-0", "/v1/embeddings", {})
    assert created["input_file_id"] == "file-0" and len(batches.batches) == 2


def test_batch_create_with_lost_request_is_retried(batches: FakeBatches, service: BatchService) -> None:
    batches.cut = 1
    assert service.create("file-0", "/v1/embeddings", {})["id"] == "batch_0"
    assert len(batches.batches) == 1


def test_batch_watch_reports_a_lost_connection_once(batches: FakeBatches) -> None:
    written = io.StringIO()
    display = BatchDisplay(False, errors=Console(file=written, force_terminal=True, width=100))
    for reason in ("refused", "refused", "", "", "reset", ""):
        display.lost(reason)
    assert written.getvalue().count("Retrying.") == written.getvalue().count("answers again.") == 2


def test_batch_missing_service_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["batch", "list", "--url", "http://127.0.0.1:9"])
    assert ended.value.code == 2
    assert "No service answers on http://127.0.0.1:9" in capsys.readouterr().err


# --- What somebody has to change ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "nowhere.jsonl"], "Cannot read nowhere.jsonl"),
        (["submit", "x", "--endpoint", "/v1/foo"], "Invalid --endpoint '/v1/foo'"),
        (["submit", "x", "--metadata", "a"], "Invalid --metadata 'a'. Expected KEY=VALUE"),
        (["list", "--output", "xml"], "Invalid --output 'xml'"),
        (["watch", "batch_x"], "No such thing. (HTTP 404)"),
    ],
)
def test_mistakes_end_with_status_2(
    batches: FakeBatches, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(batches, *arguments) == 2
    assert message in capsys.readouterr().err


def test_batch_runner_without_token_names_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_BATCH_TOKEN", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["batch", "run", "--router", "http://127.0.0.1:9", "--batch", "batch_1"])
    assert ended.value.code == 2
    assert "BATON_BATCH_TOKEN" in capsys.readouterr().err


def test_batch_runner_rejects_an_address_that_is_no_router() -> None:
    from baton_batches.runner_process import run

    with pytest.raises(SetupError, match="Invalid router URL"):
        run("https://example.org", "batch_1", "token")


def test_batch_commands_know_all_ended_statuses() -> None:
    from baton_batches.values import ENDED

    assert {str(status) for status in ENDED} == batch_commands.ENDED
