"""The ledger's promises: one result per line, one end per batch, one holder per lease."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import inspect, text

from baton_api.errors import (
    INVALID_VALUE,
    BatchEnded,
    BatchNotFound,
    FileNotFound,
    InvalidRequest,
    QuotaExceeded,
    SetupError,
    StaleLease,
)
from baton_batches.database import Database
from baton_batches.files import FileLedger, FileQuota, NewFile
from baton_batches.ledger import Ledger
from baton_batches.metrics import LedgerSummary, summarize
from baton_batches.tables import METADATA
from baton_batches.values import BatchRecord, BatchStatus, LineError, LineResult, RecordOutcome, StoredFile

NOW = 1_700_000_000
CHAT = "/v1/chat/completions"


def new_file(
    owner: str = "a", size: int = 10, expires_at: int | None = None, purpose: str = "batch"
) -> NewFile:
    return NewFile(owner, purpose, "in.jsonl", size, "00", f"{owner}/{random.random()}", expires_at)


def new_batch(database: Database, owner: str = "a") -> BatchRecord:
    return Ledger(database).create(owner, CHAT, FileLedger(database).add(new_file(owner), NOW), NOW)


def running(database: Database, total: int = 10) -> tuple[Ledger, str, int]:
    """A batch of that many lines and a lease on it."""
    ledger = Ledger(database)
    id = new_batch(database).id
    epoch = leased(ledger, id, "validator")
    ledger.validated(id, epoch, NOW, total=total, model="tiny")
    return ledger, id, leased(ledger, id, "runner")


def leased(ledger: Ledger, id: str, runner: str = "r", now: float = NOW) -> int:
    epoch = ledger.lease(id, runner, now, 30)
    assert epoch is not None
    return epoch


def good(line: int, text: str = "yes") -> LineResult:
    return LineResult(line, 200, f'{{"text":"{text}"}}'.encode(), f"req_{line}")


def bad(line: int) -> LineResult:
    return LineResult(line, 0, b'{"code":"worker_error","message":"gone"}')


# --- Files ---


def test_files_are_listed_newest_first_by_page(database: Database) -> None:
    files = FileLedger(database)
    added = [files.add(new_file(), NOW).id for _ in range(5)]
    files.add(new_file("b"), NOW)
    first, more = files.page("a", NOW, limit=2)
    assert ([one.id for one in first], more) == (added[:2:-1], True)
    rest, more = files.page("a", NOW, limit=3, after=first[-1].id)
    assert ([one.id for one in rest], more) == (added[2::-1], False)
    ascending, _ = files.page("a", NOW, limit=9, newest_first=False, after=added[1])
    assert [one.id for one in ascending] == added[2:]
    assert files.page("a", NOW, limit=9, purpose="vision") == ([], False)
    with pytest.raises(InvalidRequest, match="nobody"):
        files.page("a", NOW, limit=9, after="nobody")


def test_file_is_gone_once_deleted_or_expired(database: Database) -> None:
    files = FileLedger(database)
    kept, short = files.add(new_file(), NOW), files.add(new_file(expires_at=NOW + 10), NOW)
    assert files.get("a", kept.id, NOW) == kept
    for owner, id, now in [("b", kept.id, NOW), ("a", "file-none", NOW), ("a", short.id, NOW + 10)]:
        with pytest.raises(FileNotFound):
            files.get(owner, id, now)
        with pytest.raises(FileNotFound):
            files.delete(owner, id, now)
    files.delete("a", kept.id, NOW)
    with pytest.raises(FileNotFound):
        files.delete("a", kept.id, NOW)
    assert files.page("a", NOW + 10, limit=9) == ([], False)
    assert files.page("a", NOW, limit=9, after=kept.id)[1] is False, "who pages past a deleted file can go on"
    assert files.held("a", NOW + 10) == (0, 0)


def test_bytes_are_purged_once_and_not_while_a_batch_needs_them(database: Database) -> None:
    files, ledger = FileLedger(database), Ledger(database)
    file, other = files.add(new_file(), NOW), files.add(new_file(expires_at=NOW + 9), NOW)
    batch = ledger.create("a", CHAT, file, NOW)
    files.delete("a", file.id, NOW)
    assert files.purge(NOW) == 0
    assert (files.purge(NOW + 9), files.abandoned_uploads(NOW + 9)) == (1, [other.object])
    ledger.request_cancel("a", batch.id, NOW)
    ledger.finalize(batch.id, leased(ledger, batch.id), NOW, output=None, errors=None)
    assert (files.purge(NOW), files.purge(NOW)) == (1, 0)
    assert set(files.abandoned_uploads(NOW)) == {file.object, other.object}
    files.forget_upload(file.object)
    assert files.abandoned_uploads(NOW) == [other.object]
    with pytest.raises(FileNotFound):
        ledger.create("a", CHAT, file, NOW)


@pytest.mark.parametrize("round", range(5))
def test_file_deleted_during_batch_creation_is_consistent(database: Database, round: int) -> None:
    files, ledger = FileLedger(database), Ledger(database)
    added = [files.add(new_file(), NOW) for _ in range(8)]
    begun: list[str] = []

    def delete() -> None:
        for file in added:
            files.delete("a", file.id, NOW)
            files.purge(NOW)

    def create() -> None:
        for file in added:
            with suppress(FileNotFound):
                begun.append(ledger.create("a", CHAT, file, NOW).input_object)

    at_once([delete, create])
    assert not set(begun) & set(files.abandoned_uploads(NOW))
    assert len(begun) + len(files.abandoned_uploads(NOW)) == 8


def test_quota_bounds_files_and_bytes_under_concurrency(database: Database) -> None:
    files = FileLedger(database)
    outcomes: list[str] = []

    def upload() -> None:
        try:
            files.add(new_file(size=10), NOW, FileQuota(files=5, bytes=30))
            outcomes.append("kept")
        except QuotaExceeded:
            outcomes.append("refused")

    at_once([upload] * 8)
    assert sorted(outcomes) == ["kept"] * 3 + ["refused"] * 5
    files.add(new_file("b", size=30), NOW, FileQuota(files=5, bytes=30))
    with pytest.raises(QuotaExceeded, match="1 files; its limit is 1"):
        files.add(new_file("b", size=0), NOW, FileQuota(files=1))


# --- The way of a batch ---


def test_batch_starts_with_the_fields_of_openai(database: Database) -> None:
    file = FileLedger(database).add(new_file(), NOW)
    batch = Ledger(database).create("a", CHAT, file, NOW, metadata={"k": "v"}, output_seconds=3600)
    assert batch == Ledger(database).get("a", batch.id) == Ledger(database).find(batch.id)
    assert (batch.status, batch.total, batch.done) == (BatchStatus.VALIDATING, 0, 0)
    assert (batch.created_at, batch.expires_at) == (NOW, NOW + 86400)
    assert (batch.metadata, batch.output_seconds, batch.input_file) == ({"k": "v"}, 3600, file.id)
    with pytest.raises(BatchNotFound):
        Ledger(database).get("b", batch.id)


def test_batches_are_listed_newest_first(database: Database) -> None:
    ledger = Ledger(database)
    added = [new_batch(database).id for _ in range(4)]
    new_batch(database, "b")
    page, more = ledger.page("a", limit=3)
    assert ([one.id for one in page], more) == (added[:0:-1], True)
    page, more = ledger.page("a", limit=3, after=page[-1].id)
    assert ([one.id for one in page], more) == (added[:1], False)
    with pytest.raises(InvalidRequest, match=f"Invalid `after`: '{added[0]}'") as refused:
        ledger.page("b", limit=3, after=added[0])
    assert (refused.value.param, refused.value.code) == ("after", INVALID_VALUE)


@pytest.mark.parametrize(("limit", "more"), [(1, True), (2, True), (3, False), (4, False)])
def test_page_of_three_batches_says_whether_more_follow(database: Database, limit: int, more: bool) -> None:
    added = [new_batch(database).id for _ in range(3)]
    page, follow = Ledger(database).page("a", limit=limit)
    assert ([one.id for one in page], follow) == (added[::-1][:limit], more)


def test_get_returns_the_batch_of_that_id(database: Database) -> None:
    """Two batches of one owner differ by their id alone."""
    ledger = Ledger(database)
    for batch in [new_batch(database) for _ in range(2)]:
        assert ledger.get("a", batch.id) == ledger.find(batch.id) == batch


def in_every_status(database: Database, owner: str) -> dict[BatchStatus, str]:
    """One batch of `owner` in each status that has lines to validate, to run, or to render."""
    ledger = Ledger(database)
    ids = [new_batch(database, owner).id for _ in range(3)]
    for id, total in zip(ids[1:], (1, 0), strict=True):
        ledger.validated(id, leased(ledger, id), NOW, total=total, model="tiny")
    statuses = BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
    assert [ledger.find(id).status for id in ids] == list(statuses)
    return dict(zip(statuses, ids, strict=True))


def test_owners_under_way_have_lines_to_validate_or_run(database: Database) -> None:
    ledger = Ledger(database)
    assert ledger.owners_under_way() == []
    batches = {owner: in_every_status(database, owner) for owner in "abc"}
    for owner, status in [
        ("b", BatchStatus.VALIDATING),
        ("c", BatchStatus.VALIDATING),
        ("c", BatchStatus.IN_PROGRESS),
    ]:
        ledger.request_cancel(owner, batches[owner][status], NOW)
    assert sorted(ledger.owners_under_way()) == ["a", "b"]


def test_cancel_refused_cancels_what_an_owner_has_under_way(database: Database) -> None:
    ledger = Ledger(database)
    own, other = in_every_status(database, "a"), in_every_status(database, "b")
    before = [ledger.find(id) for id in (own[BatchStatus.FINALIZING], *other.values())]
    assert ledger.cancel_refused("a", "the key is gone", NOW + 5) == 2
    for status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        batch = ledger.find(own[status])
        assert (batch.status, batch.cancelling_at) == (BatchStatus.CANCELLING, NOW + 5)
        assert batch.errors == (LineError("owner_refused", "the key is gone"),)
    assert [ledger.find(one.id) for one in before] == before
    assert ledger.cancel_refused("a", "the key is gone", NOW + 6) == 0


def test_reassign_gives_files_and_batches_to_another(database: Database) -> None:
    files, ledger = FileLedger(database), Ledger(database)
    batch, kept = new_batch(database), new_batch(database, "c")
    file = files.add(new_file(), NOW)
    assert ledger.reassign("a", "b") == (2, 1)
    assert (ledger.page("a", limit=9)[0], files.page("a", NOW, limit=9)[0]) == ([], [])
    assert ledger.get("b", batch.id).input_file == batch.input_file
    assert [one.id for one in files.page("b", NOW, limit=9)[0]] == [file.id, batch.input_file]
    assert ledger.get("c", kept.id) == kept and len(files.page("c", NOW, limit=9)[0]) == 1


def test_batch_runs_from_validation_to_the_end(database: Database) -> None:
    ledger, id, epoch = running(database, total=3)
    assert ledger.find(id).status is BatchStatus.IN_PROGRESS
    assert ledger.record(id, epoch, [good(1), bad(2)], NOW + 1) == RecordOutcome(
        2, BatchStatus.IN_PROGRESS, 1
    )
    assert ledger.record(id, epoch, [good(4)], NOW + 2) == RecordOutcome(1, BatchStatus.FINALIZING, 1)
    batch = ledger.find(id)
    assert (batch.completed, batch.failed, batch.total) == (2, 1, 3)
    assert batch.finalizing_at == NOW + 2
    assert ledger.counts(id) == (2, 1)
    assert ledger.results(batch) == [good(1), bad(2), good(4)]
    epoch = leased(ledger, id, "renderer", NOW + 2)
    ended = ledger.finalize(id, epoch, NOW + 3, output=new_file(), errors=None, usage={"total_tokens": 5})
    assert (ended.status, ended.completed_at, ended.error_file) == (BatchStatus.COMPLETED, NOW + 3, None)
    assert ended.usage == {"total_tokens": 5}
    assert FileLedger(database).get("a", str(ended.output_file), NOW).bytes == 10
    with pytest.raises(StaleLease):
        ledger.finalize(id, epoch, NOW + 4, output=new_file(), errors=None)
    assert ledger.find(id) == ended
    assert len(FileLedger(database).page("a", NOW, limit=9)[0]) == 2, (
        "the files of the second end are not kept"
    )


def test_validated_batch_is_in_progress_and_free(database: Database) -> None:
    ledger, id = Ledger(database), new_batch(database).id
    batch = ledger.validated(id, leased(ledger, id), NOW + 5, total=7, model="tiny")
    assert (batch.status, batch.in_progress_at) == (BatchStatus.IN_PROGRESS, NOW + 5)
    assert (batch.total, batch.model, batch.runner, batch.leased_until) == (7, "tiny", "", 0.0)
    assert (batch.failed_at, batch.finalizing_at, batch.errors) == (None, None, ())
    assert ledger.find(id) == batch


def test_validated_cancelled_batch_stays_cancelled(database: Database) -> None:
    """Its lines are known nevertheless, and a renderer can lease it at once."""
    ledger, id = Ledger(database), new_batch(database).id
    epoch = leased(ledger, id)
    ledger.request_cancel("a", id, NOW + 1)
    batch = ledger.validated(id, epoch, NOW + 5, total=7, model="tiny")
    assert (batch.status, batch.cancelling_at) == (BatchStatus.CANCELLING, NOW + 1)
    assert (batch.in_progress_at, batch.failed_at) == (None, None)
    assert (batch.total, batch.model, batch.runner, batch.leased_until) == (7, "tiny", "", 0.0)
    assert ledger.lease(id, "renderer", NOW + 5, 30) == epoch + 1


def test_validated_with_errors_is_failed_and_never_leased(database: Database) -> None:
    ledger, id = Ledger(database), new_batch(database).id
    errors = (LineError("invalid_json_line", "Line 1 is no JSON."), LineError("empty_file", "No lines."))
    batch = ledger.validated(id, leased(ledger, id), NOW + 5, total=0, model=None, errors=errors)
    assert (batch.status, batch.failed_at, batch.errors) == (BatchStatus.FAILED, NOW + 5, errors)
    assert (batch.in_progress_at, batch.runner, batch.leased_until) == (None, "", 0.0)
    assert ledger.lease(id, "runner", NOW + 99, 30) is None
    assert ledger.take(id, "runner", NOW + 99, 30) is None


def test_results_are_those_of_one_batch_page_by_page(database: Database) -> None:
    ledger, id, epoch = running(database, total=600)
    _, other, other_epoch = running(database, total=600)
    ledger.record(other, other_epoch, [good(line, "other") for line in range(1, 9)], NOW)
    lines = [bad(line) if line % 3 == 0 else good(line) for line in range(1, 520)]
    ledger.record(id, epoch, lines[::-1], NOW)
    batch = ledger.find(id)
    assert ledger.results(batch, after=2, limit=3) == lines[2:5]
    assert ledger.results(batch, after=517) == lines[517:]
    assert ledger.results(batch) == lines[:500]


def test_file_that_is_not_a_batch_fails_with_its_errors(database: Database) -> None:
    ledger = Ledger(database)
    id = new_batch(database).id
    reported = (LineError("invalid_json_line", "no JSON", line=2), LineError("empty_file", "empty"))
    batch = ledger.validated(id, leased(ledger, id), NOW + 1, total=0, model=None, errors=reported)
    assert (batch.status, batch.failed_at, batch.errors) == (BatchStatus.FAILED, NOW + 1, reported)
    assert ledger.lease(id, "r", NOW, 30) is None


def test_lines_that_are_answered_while_the_file_is_read_count(database: Database) -> None:
    ledger = Ledger(database)
    id = new_batch(database).id
    epoch = leased(ledger, id)
    assert ledger.record(id, epoch, [bad(1)], NOW).new == 1
    assert ledger.validated(id, epoch, NOW, total=1, model="tiny").status is BatchStatus.FINALIZING


CANCELS: dict[str, tuple[BatchStatus, ...]] = {
    "while it is validated": (),
    "while it runs": (BatchStatus.IN_PROGRESS,),
    "while it is rendered": (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING),
}


@pytest.mark.parametrize("when", CANCELS)
def test_cancelling_keeps_results(database: Database, when: str) -> None:
    ledger = Ledger(database)
    id = new_batch(database).id
    epoch = leased(ledger, id)
    if BatchStatus.IN_PROGRESS in CANCELS[when]:
        ledger.validated(id, epoch, NOW, total=2, model="tiny")
        epoch = leased(ledger, id)
        ledger.record(id, epoch, [good(1)], NOW)
    if BatchStatus.FINALIZING in CANCELS[when]:
        assert ledger.record(id, epoch, [good(2)], NOW).status is BatchStatus.FINALIZING
        epoch = leased(ledger, id)
    with pytest.raises(BatchNotFound):
        ledger.request_cancel("b", id, NOW)
    batch = ledger.request_cancel("a", id, NOW + 1)
    assert (batch.status, batch.cancelling_at) == (BatchStatus.CANCELLING, NOW + 1)
    assert ledger.request_cancel("a", id, NOW + 2).cancelling_at == NOW + 1
    assert ledger.renew(id, epoch, NOW, 30).status is BatchStatus.CANCELLING, "so its holder learns of it"
    assert ledger.validated(id, epoch, NOW, total=2, model="m").status is BatchStatus.CANCELLING
    ended = ledger.finalize(id, epoch, NOW + 3, output=None, errors=None)
    assert (ended.status, ended.cancelled_at) == (BatchStatus.CANCELLED, NOW + 3)
    assert ledger.request_cancel("a", id, NOW + 4) == ended


@pytest.mark.parametrize("end", [BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED])
def test_ended_batch_cannot_be_cancelled(database: Database, end: BatchStatus) -> None:
    ledger, id, epoch = running(database, total=1)
    if end is BatchStatus.COMPLETED:
        ledger.record(id, epoch, [good(1)], NOW)
    if end is BatchStatus.FAILED:
        id = new_batch(database).id
        ledger.validated(id, leased(ledger, id), NOW, total=0, model=None, errors=[LineError("a", "b")])
    else:
        ledger.finalize(id, epoch, NOW, output=None, errors=None, expired=end is BatchStatus.EXPIRED)
    with pytest.raises(BatchEnded, match=f"with status '{end}'"):
        ledger.request_cancel("a", id, NOW)


OPEN = {"validating": False, "in progress": True}


@pytest.mark.parametrize("when", OPEN)
def test_overdue_lists_open_batches_without_holder(database: Database, when: str) -> None:
    """A batch expires in either status, once its window has passed and its last holder's lease has ended."""
    ledger = Ledger(database)
    if OPEN[when]:
        ledger, id, epoch = running(database)
    else:
        id = new_batch(database).id
        epoch = leased(ledger, id)
    end = NOW + 86400
    assert ledger.overdue(end - 1) == []
    ledger.renew(id, epoch, end - 1, 30)
    assert ledger.overdue(end) == []
    assert [one.id for one in ledger.overdue(end + 29)] == [id]
    assert ledger.unfinished(end + 29, ledger.find(id).status) == [], "nobody works on it any more"
    taken = leased(ledger, id, "keeper", end + 29)
    assert (taken, ledger.overdue(end + 29)) == (epoch + 1, []), "a second keeper leaves it to the first"
    with pytest.raises(StaleLease):
        ledger.record(id, epoch, [good(1)], NOW)
    assert (
        ledger.finalize(id, taken, NOW, output=None, errors=None, expired=True).status is BatchStatus.EXPIRED
    )
    assert ledger.overdue(end + 99) == []
    assert ledger.take(id, "late", NOW, 30) is None


def test_take_leases_from_now_on(database: Database) -> None:
    ledger, id, epoch = running(database)
    assert ledger.take(id, "renderer", NOW + 7, 30) == epoch + 1
    assert (ledger.find(id).runner, ledger.find(id).leased_until) == ("renderer", NOW + 37)


def test_unfinished_leaves_out_what_expires(database: Database) -> None:
    """A batch that is to be rendered goes to its own end, however late; the two before it expire."""
    ledger = Ledger(database)
    ids = in_every_status(database, "a")
    end = NOW + 86400
    for status, id in ids.items():
        assert [one.id for one in ledger.unfinished(end - 1, status)] == [id]
        assert [one.id for one in ledger.unfinished(end, status)] == [id] * (status is BatchStatus.FINALIZING)


def test_renew_of_a_released_lease_leaves_it_free(database: Database) -> None:
    """A heartbeat after its holder's last call does not take the batch from another one."""
    ledger = Ledger(database)
    id = new_batch(database).id
    epoch = leased(ledger, id)
    ledger.validated(id, epoch, NOW, total=1, model="m")
    assert ledger.renew(id, epoch, NOW, 30).leased_until == 0
    assert ledger.lease(id, "runner", NOW, 30) == epoch + 1
    ledger.release(id, epoch + 1)
    assert ledger.renew(id, epoch + 1, NOW, 30).leased_until == 0


def test_lease_for_a_status_that_has_passed_is_refused(database: Database) -> None:
    """A controller that saw a batch validating and is late does not take it from a runner."""
    ledger = Ledger(database)
    id = new_batch(database).id
    assert ledger.lease(id, "first", NOW, 30, BatchStatus.VALIDATING) == 1
    ledger.validated(id, 1, NOW, total=1, model="m")
    assert ledger.lease(id, "second", NOW, 30, BatchStatus.VALIDATING) is None
    assert ledger.lease(id, "runner", NOW, 30, BatchStatus.IN_PROGRESS) == 2


def test_unfinished_shows_every_owner_whatever_one_has(database: Database) -> None:
    """A hundred batches of one owner hide no other owner's. The oldest batch of each owner comes first."""
    ledger = Ledger(database)
    file = FileLedger(database).add(new_file("a"), NOW)
    many = [ledger.create("a", CHAT, file, NOW).id for _ in range(120)]
    late = new_batch(database, "b").id
    shown = [one.id for one in ledger.unfinished(NOW, BatchStatus.VALIDATING)]
    assert shown[:3] == [many[0], late, many[1]] and len(shown) == 100
    rest = ledger.unfinished(NOW, BatchStatus.VALIDATING, without=[many[0], late])
    assert [one.id for one in rest] == many[1:101]
    overdue = ledger.overdue(NOW + 86400)
    assert overdue[1].id == late and len(overdue) == 100
    assert [one.id for one in ledger.overdue(NOW + 86400, limit=2)] == [many[0], late]
    assert [one.id for one in ledger.unfinished(NOW, BatchStatus.VALIDATING, limit=2)] == [many[0], late]


def test_ended_batches_keep_no_result_rows(database: Database) -> None:
    ledger, id, epoch = running(database, total=5)
    other, other_id, other_epoch = running(database, total=5)
    other.record(other_id, other_epoch, [good(1)], NOW)
    ledger.record(id, epoch, [good(line) for line in range(1, 6)], NOW)
    ledger.finalize(id, leased(ledger, id), NOW, output=new_file(), errors=None)
    assert ledger.forget(NOW, 3600, limit=3) == 3
    assert ledger.forget(NOW, 3600, limit=3) == 2
    assert ledger.forget(NOW, 3600) == 0
    assert other.counts(other_id) == (1, 0)
    assert ledger.find(id).completed == 5
    end = ledger.find(id).expires_at
    assert [ledger.forget(end + later, 3600) for later in (-3600, 0, 3600)] == [0, 0, 0]
    assert ledger.forget(end + 3601, 3600) == 1
    with pytest.raises(BatchNotFound):
        ledger.find(id)


# --- Leases ---


def test_summary_counts_batches_lines_runners_and_late_ones(database: Database) -> None:
    assert summarize(database, NOW) == LedgerSummary()
    ledger, id, epoch = running(database, total=10)
    running(database, total=4)
    new_batch(database)
    ledger.record(id, epoch, [good(1), bad(2)], NOW)
    statuses = {BatchStatus.IN_PROGRESS: 2, BatchStatus.VALIDATING: 1}
    assert summarize(database, NOW) == LedgerSummary(statuses, lines_left=12, runners=2, late=0)
    later = ledger.find(id).expires_at - 60
    ledger.record(id, epoch, [good(line) for line in range(3, 11)], later)
    statuses = {BatchStatus.IN_PROGRESS: 1, BatchStatus.FINALIZING: 1, BatchStatus.VALIDATING: 1}
    assert summarize(database, later) == LedgerSummary(statuses, lines_left=4, runners=0, late=1)


def test_lease_is_unique_and_its_epoch_grows(database: Database) -> None:
    ledger, id, epoch = running(database)
    assert ledger.lease(id, "other", NOW + 29, 30) is None
    assert ledger.unfinished(NOW + 29, BatchStatus.IN_PROGRESS) == []
    assert ledger.renew(id, epoch, NOW + 29, 30).leased_until == NOW + 59
    assert ledger.lease(id, "other", NOW + 58, 30) is None
    assert [one.id for one in ledger.unfinished(NOW + 59, BatchStatus.IN_PROGRESS)] == [id]
    assert ledger.record(id, epoch, [good(1)], NOW + 60).new == 1, "it ran out, but nobody took its place"
    later = ledger.lease(id, "other", NOW + 61, 30)
    assert later == epoch + 1
    for attempt in stale_writes(ledger, id, epoch):
        with pytest.raises(StaleLease, match=f"lease {epoch} .* its lease is {later}"):
            attempt()
    ledger.release(id, epoch)
    assert ledger.lease(id, "third", NOW + 62, 30) is None, "who has it no more cannot let go of it"
    ledger.release(id, later)
    assert ledger.lease(id, "third", NOW + 62, 30) == later + 1


def stale_writes(ledger: Ledger, id: str, epoch: int) -> list[Callable[[], Any]]:
    return [
        lambda: ledger.renew(id, epoch, NOW, 30),
        lambda: ledger.record(id, epoch, [good(2)], NOW),
        lambda: ledger.validated(id, epoch, NOW, total=1, model=None),
        lambda: ledger.finalize(id, epoch, NOW, output=None, errors=None),
    ]


def test_first_result_of_a_line_stays(database: Database) -> None:
    ledger, id, epoch = running(database)
    assert ledger.record(id, epoch, [good(1, "first"), good(1, "second"), bad(1)], NOW).new == 1
    assert ledger.record(id, epoch, [bad(1), good(2)], NOW).new == 1
    assert ledger.results(ledger.find(id)) == [good(1, "first"), good(2)]
    assert ledger.counts(id) == (2, 0)


@pytest.mark.parametrize(("status", "completed"), [(0, 0), (199, 0), (200, 1), (299, 1), (300, 0), (500, 0)])
def test_counts_take_only_2xx_as_completed(database: Database, status: int, completed: int) -> None:
    ledger, id, epoch = running(database)
    assert ledger.record(id, epoch, [LineResult(3, status, b"{}")], NOW).completed == completed
    assert ledger.record(id, epoch, [good(3)], NOW) == RecordOutcome(0, BatchStatus.IN_PROGRESS, 0), (
        "it has a result"
    )
    batch = ledger.find(id)
    assert ledger.counts(id) == (batch.completed, batch.failed) == (completed, 1 - completed)


def test_record_after_the_last_line_keeps_nothing(database: Database) -> None:
    ledger, id, epoch = running(database, total=1)
    ledger.record(id, epoch, [good(1)], NOW)
    assert ledger.record(id, epoch, [good(2)], NOW) == RecordOutcome(0, BatchStatus.FINALIZING, 0)
    assert ledger.counts(id) == (1, 0)


def test_finalize_of_a_batch_with_lines_left_is_refused(database: Database) -> None:
    ledger, id, epoch = running(database)
    with pytest.raises(StaleLease) as refused:
        ledger.finalize(id, epoch, NOW, output=new_file(), errors=None)
    assert str(refused.value) == str(StaleLease(id, epoch, epoch, BatchStatus.IN_PROGRESS))
    assert ledger.find(id).status is BatchStatus.IN_PROGRESS
    assert len(FileLedger(database).page("a", NOW, limit=9)[0]) == 1, "the output is not kept"
    ended = ledger.finalize(id, epoch, NOW, output=None, errors=None, expired=True)
    assert (ended.runner, ended.leased_until) == ("", 0)


# --- The law, under chance ---


@pytest.mark.parametrize("seed", range(3))
def test_law_each_line_has_one_result_with_any_runners(database: Database, seed: int) -> None:
    """Threads that lease, take, record overlapping lines, forget to renew, and continue with stale epochs."""
    ledger, id, epoch = running(database, total=60)
    ledger.release(id, epoch)
    accepted: list[tuple[int, list[int]]] = []
    lock = threading.Lock()

    def runner(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        mine = 0
        for step in range(40):
            now = NOW + step
            what = chance.random()
            if what < 0.25 or not mine:
                mine = ledger.lease(id, f"r{number}", now, chance.choice([0, 1, 5])) or mine
            if not mine:
                continue
            lines = chance.sample(range(1, 61), chance.randrange(1, 8))
            shown = [good(line, f"{number}.{step}") if chance.random() < 0.8 else bad(line) for line in lines]
            try:
                if what > 0.9:
                    ledger.release(id, mine)
                recorded = ledger.record(id, mine, shown, now)
            except StaleLease:
                mine = 0
                continue
            with lock:
                accepted.append((recorded.new, lines))
            if recorded.status is BatchStatus.FINALIZING:
                return

    at_once([lambda number=number: runner(number) for number in range(5)])  # type: ignore[misc]
    batch = ledger.find(id)
    lines = [one.line for one in ledger.results(batch)]
    assert len(lines) == len(set(lines)) == batch.done == sum(new for new, _ in accepted) <= 60
    assert (batch.completed, batch.failed) == ledger.counts(id)
    assert set(lines) == {line for new, given in accepted for line in given} or batch.done == 60
    assert (batch.status is BatchStatus.FINALIZING) == (batch.done == 60)


def record_all(url: str, id: str, seed: int, reported: Any) -> None:
    """One process: while there is something to do, take the batch and record a part of it."""
    chance = random.Random(seed)
    database = Database(url, busy_s=30)
    ledger = Ledger(database)
    new = 0
    for now in range(NOW, NOW + 500):
        epoch = ledger.take(id, f"p{seed}", now, 5)
        if epoch is None:
            break
        try:
            for _ in range(chance.randrange(1, 6)):
                lines = chance.sample(range(1, 301), 20)
                recorded = ledger.record(id, epoch, [good(line, f"{seed}") for line in lines], now)
                new += recorded.new
        except StaleLease:
            continue
        if recorded.status is BatchStatus.FINALIZING:
            break
    database.close()
    reported.put(new)


def test_law_competing_processes_lose_and_duplicate_nothing(database_url: str) -> None:
    database = Database(database_url, busy_s=30)
    ledger, id, _ = running(database, total=300)
    spawning = multiprocessing.get_context("spawn")
    reported: Any = spawning.Queue()
    processes = [
        spawning.Process(target=record_all, args=(database_url, id, seed, reported)) for seed in range(3)
    ]
    for process in processes:
        process.start()
    new = sum(reported.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(300)
    batch = ledger.find(id)
    assert new == batch.done == batch.completed == 300
    assert ledger.counts(id) == (300, 0)
    assert batch.status is BatchStatus.FINALIZING
    database.close()


@pytest.mark.parametrize("round", range(3))
def test_batch_is_ended_by_one_of_many_competitors(database: Database, round: int) -> None:
    ledger, id, epoch = running(database, total=1)
    ledger.record(id, epoch, [good(1)], NOW)
    ended: list[BatchRecord] = []

    def render() -> None:
        mine = ledger.take(id, "renderer", NOW, 30)
        try:
            if mine is not None:
                ended.append(ledger.finalize(id, mine, NOW, output=new_file(), errors=None))
        except StaleLease:
            pass

    at_once([render] * 6)
    assert len(ended) == 1
    assert ledger.find(id) == ended[0]
    assert len(FileLedger(database).page("a", NOW, limit=99)[0]) == 2  # its input and its output


def at_once(calls: list[Callable[[], None]]) -> None:
    """Run all of them in threads that start together, and raise their errors."""
    failures: list[BaseException] = []
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        gate.wait(300)
        try:
            call()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if failures:
        raise failures[0]


def test_impossible_ids_are_not_found(database: Database) -> None:
    files, ledger = FileLedger(database), Ledger(database)
    for id in ("\0", "batch_\0", "é" * 5000, "'; DROP TABLE files; --"):
        with pytest.raises(FileNotFound):
            files.get("a", id, NOW)
        with pytest.raises(FileNotFound):
            files.delete("a", id, NOW)
        with pytest.raises(BatchNotFound):
            ledger.get("a", id)
        with pytest.raises(BatchNotFound):
            ledger.request_cancel("a", id, NOW)
        for page in (ledger.page, partial(files.page, now=NOW)):
            with pytest.raises(InvalidRequest):
                page("a", limit=1, after=id)
        assert files.page("a", NOW, limit=1, purpose=id) == ([], False)
    id = new_batch(database).id
    assert ledger.validated(id, leased(ledger, id), NOW, total=1, model="m\0").model == "m\ufffd"


# --- The schema ---


def test_tables_equal_those_of_the_migrations(database: Database) -> None:
    with database.reading() as connection:
        seen = inspect(connection)
        names = [name for name in seen.get_table_names() if name != "baton_schema"]
        added = {name: {column["name"] for column in seen.get_columns(name)} for name in names}
    declared = {table.name: {column.name for column in table.columns} for table in METADATA.sorted_tables}
    assert added == declared


def test_empty_database_may_be_opened_concurrently(database_url: str) -> None:
    databases = [Database(database_url, busy_s=30) for _ in range(6)]
    at_once([lambda one=one: new_batch(one) and None for one in databases])  # type: ignore[misc]
    assert len(Ledger(databases[0]).page("a", limit=9)[0]) == 6
    for one in databases:
        one.close()


def test_closed_database_closes_connections_in_use(database_url: str) -> None:
    """A controller may be in a transaction when its router stops. Its connection must not stay open."""
    database = Database(database_url, busy_s=30)
    with database.reading() as connection:
        used: Any = connection.connection.dbapi_connection
        database.close()
        used.execute("SELECT 1")
    with pytest.raises(Exception, match="closed"):
        used.execute("SELECT 1")


def test_newer_database_is_refused(database: Database, database_url: str) -> None:
    with database.writing() as connection:
        connection.execute(text("UPDATE baton_schema SET version = 99"))
    newer = Database(database_url)
    with pytest.raises(SetupError, match="schema 99"):
        Ledger(newer).page("a", limit=1)
    newer.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "no url", "sqlite://"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(SetupError):
        Database(url)


def test_stored_file_has_its_fields(database: Database) -> None:
    file = new_file(size=7, expires_at=NOW + 5)
    kept = FileLedger(database).add(file, NOW)
    assert isinstance(kept, StoredFile)
    assert (kept.bytes, kept.sha256, kept.object, kept.expires_at) == (7, "00", file.object, NOW + 5)
    assert kept.id.startswith("file-") and len(kept.id) == len("file-") + 32
