"""One prompt on the decode side: a table of stories, then the laws under chance schedules of both sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from baton_api.messages import Abort, Checksums, Chunk, Commit, Done, Failed, Prefill, TokenChoice
from baton_api.prompt_report import Fallback
from baton_api.sampling import SamplingParams
from baton_decode.sessions import (
    Action,
    BlocksSettled,
    DecodeSession,
    DecodeState,
    ReadBlocks,
    ReportResult,
    SendToPrefill,
    SessionSpec,
    VerifyChecksums,
)
from baton_engine.requests import Fetch, FetchResult, RelayRecord
from baton_engine.transfer import Pulled
from tests.decode.schedules import STRANGER, Schedule

TAIL = b"t" * 16
LOCAL = (21, 22, 23)
"""For positions 2, 3 and 4 of a prompt of 70 tokens."""


def session(**sampling: Any) -> DecodeSession:
    fetch = Fetch("q", tuple(range(70)), 2, b"p" * 16, LOCAL, SamplingParams(**sampling), "")
    spec = SessionSpec(
        fetch=fetch,
        session="r",
        epoch=2,
        worker="prefill-0",
        tail=TAIL,
        block_size=16,
        vocab=100,
        remote_blocks=64,
    )
    return DecodeSession(spec)


def chunk(first_block: int, blocks: list[int], epoch: int = 2, name: str = "r") -> Chunk:
    return Chunk(session=name, epoch=epoch, first_block=first_block, blocks=blocks)


def checksums(first_block: int, blocks: list[int], epoch: int = 2) -> Checksums:
    sums = [block * 10 for block in blocks]
    return Checksums(session="r", epoch=epoch, first_block=first_block, checksums=sums)


def announced(session_: DecodeSession, first_block: int, blocks: list[int], now: float) -> list[Action]:
    """Announce blocks whose checksums follow before they are read. Returns the first actions."""
    actions = session_.chunk(chunk(first_block, blocks), now)
    assert session_.checksums(checksums(first_block, blocks)) == []
    return actions


def commit(**changes: Any) -> Commit:
    fields: dict[str, Any] = {
        "session": "r",
        "epoch": 2,
        "first": TokenChoice(token=7),
        "prompt_tokens": 70,
        "cached_tokens": 32,
        "tail": TAIL,
    }
    return Commit(**{**fields, **changes})


def pulled(size: int = 100) -> Pulled:
    return Pulled(size, 0.5, "loopback")


def bring(session_: DecodeSession, number: int, blocks: int) -> list[Action]:
    """Let a read finish well and its blocks be found equal."""
    (verify,) = session_.pulled(number, pulled(), 1.0)
    assert isinstance(verify, VerifyChecksums)
    return session_.verified(number, [True] * blocks)


def reported(actions: list[Action]) -> FetchResult:
    (report,) = [action for action in actions if isinstance(action, ReportResult)]
    return report.fetched


ABORT = SendToPrefill(Abort(session="r", epoch=2))
DONE = SendToPrefill(Done(session="r", epoch=2))


def test_session_reads_chunks_and_ends_with_commit() -> None:
    session_ = session()
    states = [session_.state]
    assert announced(session_, 2, [5, 6], 0.0) == [ReadBlocks(1, (5, 6), (21, 22))]
    states.append(session_.state)
    assert announced(session_, 4, [7], 0.5) == [ReadBlocks(2, (7,), (23,))]
    assert session_.pulled(1, pulled(), 1.0) == [VerifyChecksums(1, (21, 22), (50, 60))]
    assert session_.verified(1, [True, True]) == []
    assert session_.commit(commit()) == []
    assert [*states, session_.state] == [DecodeState.ASKING, DecodeState.RECEIVING, DecodeState.COMMITTED]
    assert session_.pulled(2, pulled(), 2.0) == [VerifyChecksums(2, (23,), (70,))]
    done, report = session_.verified(2, [True])
    assert done == DONE
    fetched = reported([report])
    assert (fetched.arrived, fetched.first, fetched.cached_tokens) == (3, TokenChoice(token=7), 32)
    assert fetched.relay is not None
    assert (fetched.relay.computed_tokens, fetched.relay.local_tokens) == (38, 32)
    assert (fetched.relay.blocks, fetched.relay.bytes, fetched.relay.transfer_s) == (3, 200, 2.0)
    assert session_.settled


def test_begin_asks_for_the_prompt_with_all_it_depends_on() -> None:
    fetch = Fetch(
        "q", (3, 1, 4), 0, b"p" * 16, (21,), SamplingParams(seed=5), "tenant", "00-trace", None, "a"
    )
    session_ = DecodeSession(replace(session().spec, fetch=fetch))
    expected = Prefill(
        session="r", epoch=2, tokens=[3, 1, 4], start_block=0, parent=b"p" * 16,
        sampling=SamplingParams(seed=5).first_token(), salt="tenant", ticket="ticket-1",
        request_id="request-1", trace="00-trace", deadline_s=7.5, tenant="a",
    )  # fmt: skip
    assert session_.begin("request-1", "ticket-1", 7.5) == [SendToPrefill(expected)]
    assert session_.reason is None


def test_relay_record_names_worker_times_and_transport() -> None:
    """Only the seconds with a read under way count: 10 to 11 and 14 to 16."""
    session_ = session()
    announced(session_, 2, [5], 10.0)
    session_.verified(1, [True] * len(session_.pulled(1, pulled(), 11.0)))
    announced(session_, 3, [6, 7], 14.0)
    session_.pulled(2, pulled(50), 16.0)
    session_.verified(2, [True, True])
    fetched = reported(session_.commit(commit(queue_s=0.25, compute_s=0.5)))
    assert (fetched.request_id, session_.reason) == ("q", None)
    assert fetched.relay == RelayRecord(
        prefill_worker="prefill-0",
        prompt_tokens=70,
        computed_tokens=38,
        local_tokens=32,
        blocks=3,
        bytes=150,
        transport="loopback",
        transfer_s=3.0,
        queue_s=0.25,
        compute_s=0.5,
    )


def test_positions_count_not_the_order_of_arrival() -> None:
    """Peers' defect 7: blocks are mapped by position, never by counting from the end."""
    session_ = session()
    assert announced(session_, 4, [7], 0.0) == [ReadBlocks(1, (7,), (23,))]
    assert announced(session_, 2, [5, 6], 0.0) == [ReadBlocks(2, (5, 6), (21, 22))]
    bring(session_, 1, 1)
    assert session_.arrived == 0, "a block after a gap is no prefix"
    bring(session_, 2, 2)
    assert session_.arrived == 3


def test_session_doubled_chunk_is_read_once() -> None:
    session_ = session()
    assert len(announced(session_, 2, [5, 6], 0.0)) == 1
    assert announced(session_, 2, [5, 6], 0.0) == []
    bring(session_, 1, 2)
    assert announced(session_, 2, [5, 6], 0.0) == []


def test_session_overlapping_chunk_reads_only_new_blocks() -> None:
    session_ = session()
    announced(session_, 2, [5, 6], 0.0)
    assert announced(session_, 3, [6, 7], 0.0) == [ReadBlocks(2, (7,), (23,))]


def test_session_drops_messages_of_other_attempts() -> None:
    """Peers' defect 27: messages of one session never count for another."""
    session_ = session()
    assert session_.chunk(chunk(2, [5], epoch=1), 0.0) == []
    assert session_.chunk(chunk(2, [5], name="s"), 0.0) == []
    assert session_.commit(commit(epoch=1)) == []
    assert session_.failed(Failed(session="r", epoch=1, reason="old", retry=False)) == []
    assert session_.state is DecodeState.ASKING


FORBIDDEN = {
    "before the first wanted block": chunk(1, [5]),
    "past the end of the prompt": chunk(4, [7, 8]),
    "far away": chunk(2**40, [7]),
    "negative": chunk(-3, [7]),
    "the padding block": chunk(2, [0]),
    "outside the peer's pool": chunk(2, [64]),
    "no blocks": chunk(2, []),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_session_impossible_chunk_ends_before_any_read(case: str) -> None:
    session_ = session()
    abort, report = session_.chunk(FORBIDDEN[case], 0.0)
    assert abort == ABORT
    assert reported([report]) == FetchResult("q", arrived=0, reason=Fallback.PROTOCOL)


IMPOSSIBLE_SUMS = {
    "before the first wanted block": (1, [5]),
    "past the end of the prompt": (4, [7, 8]),
    "none": (2, []),
    "others than before": (3, [9]),
}


@pytest.mark.parametrize("case", IMPOSSIBLE_SUMS)
def test_session_impossible_checksums_end_the_attempt(case: str) -> None:
    session_ = session()
    announced(session_, 2, [5, 6], 0.0)
    abort, report = session_.checksums(checksums(*IMPOSSIBLE_SUMS[case]))
    assert abort == ABORT
    assert reported([report]).reason == Fallback.PROTOCOL


def test_session_blocks_count_once_their_checksums_have_come() -> None:
    """They are read as soon as they are announced, while the peer computes the checksums."""
    session_ = session()
    assert session_.chunk(chunk(2, [5, 6]), 0.0) == [ReadBlocks(1, (5, 6), (21, 22))]
    assert session_.chunk(chunk(4, [7]), 0.0) == [ReadBlocks(2, (7,), (23,))]
    assert session_.pulled(1, pulled(), 1.0) == []
    assert session_.chunk(chunk(2, [5, 6]), 1.0) == [], "not read again"
    assert session_.checksums(checksums(2, [5])) == []
    assert session_.checksums(checksums(3, [6], epoch=1)) == []
    assert session_.checksums(checksums(3, [6, 7])) == [VerifyChecksums(1, (21, 22), (50, 60))]
    assert session_.verified(1, [True, True]) == []
    assert session_.pulled(2, pulled(), 1.0) == [VerifyChecksums(2, (23,), (70,))]
    assert session_.verified(2, [True]) == []
    assert reported(session_.commit(commit())).arrived == 3


def test_session_blocks_without_checksums_are_not_used() -> None:
    session_ = session()
    session_.chunk(chunk(2, [5, 6]), 0.0)
    assert session_.failed(Failed(session="r", epoch=2, reason="no memory", retry=True)) == []
    done, report = session_.pulled(1, pulled(), 1.0)
    assert done == DONE
    assert reported([report]) == FetchResult("q", arrived=0, reason=Fallback.FAILED, transport="loopback")


def test_session_conflicting_blocks_end_the_attempt() -> None:
    session_ = session()
    announced(session_, 2, [5], 0.0)
    fetched = reported(session_.chunk(chunk(2, [6]), 0.0))
    assert (fetched.reason, fetched.unsafe) == (Fallback.PROTOCOL, frozenset({21}))


MISMATCHED = {
    "another length": commit(prompt_tokens=71),
    "other tokens": commit(tail=b"u" * 16),
    "logprobs that nobody asked for": commit(first=TokenChoice(token=7, logprob=-0.1)),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_session_commit_for_another_prompt_is_rejected(case: str) -> None:
    """Peers' defect 19: the tail's chain hash shows that both sides mean the same tokens."""
    session_ = session()
    announced(session_, 2, [5, 6, 7], 0.0)
    bring(session_, 1, 3)
    fetched = reported(session_.commit(MISMATCHED[case]))
    assert (fetched.first, fetched.arrived, fetched.reason) == (None, 3, Fallback.MISMATCH)


@pytest.mark.parametrize(
    "wrong",
    [commit(first=TokenChoice(token=100)), commit(first=TokenChoice(token=-1)), commit(cached_tokens=71)],
)
def test_session_commit_out_of_range_is_rejected(wrong: Commit) -> None:
    assert reported(session().commit(wrong)).reason == Fallback.PROTOCOL


@pytest.mark.parametrize(
    "edge",
    [
        commit(first=TokenChoice(token=0)),
        commit(first=TokenChoice(token=99)),
        commit(cached_tokens=0),
        commit(cached_tokens=70),
    ],
)
def test_commit_at_the_edge_of_its_ranges_is_accepted(edge: Commit) -> None:
    session_ = session()
    assert session_.commit(edge) == []
    assert session_.state is DecodeState.COMMITTED


def test_second_commit_changes_nothing() -> None:
    session_ = session()
    session_.commit(commit())
    assert session_.commit(commit(first=TokenChoice(token=8))) == []
    announced(session_, 2, [5, 6, 7], 0.0)
    assert reported(bring(session_, 1, 3)).first == TokenChoice(token=7)


def test_commit_after_the_peer_failed_is_dropped() -> None:
    session_ = session()
    announced(session_, 2, [5, 6, 7], 0.0)
    session_.failed(Failed(session="r", epoch=2, reason="no memory", retry=True))
    assert session_.commit(commit()) == []
    assert reported(bring(session_, 1, 3)).reason == Fallback.FAILED


@pytest.mark.parametrize("block", [1, 63])
def test_first_and_last_block_of_the_peer_are_read(block: int) -> None:
    assert session().chunk(chunk(2, [block]), 0.0) == [ReadBlocks(1, (block,), (21,))]


def test_missing_logprobs_are_a_mismatch() -> None:
    assert reported(session(logprobs=2).commit(commit())).reason == Fallback.MISMATCH
    good = commit(first=TokenChoice(token=7, logprob=-0.5, top=[(7, -0.5), (8, -0.9)]))
    assert session(logprobs=2).commit(good) == []


def test_session_wrong_checksum_cuts_the_prefix_before_it() -> None:
    """Peers' defect 24: damaged blocks are found by their checksum and never used."""
    session_ = session()
    announced(session_, 2, [5, 6, 7], 0.0)
    session_.pulled(1, pulled(), 1.0)
    abort, report = session_.verified(1, [True, False, True])
    assert abort == ABORT
    assert reported([report]) == FetchResult("q", arrived=1, reason=Fallback.CHECKSUM, transport="loopback")


def test_blocks_of_an_unsettled_read_are_unsafe_until_it_settles() -> None:
    """Peers' defect 5: an abort in mid-read frees no block that is still being written."""
    session_ = session()
    announced(session_, 2, [5, 6], 0.0)
    announced(session_, 4, [7], 0.0)
    bring(session_, 2, 1)
    abort, report = session_.cancel()
    assert abort == ABORT
    assert reported([report]) == FetchResult(
        "q", arrived=0, unsafe=frozenset({21, 22}), reason=Fallback.CANCELLED, transport="loopback"
    )
    assert not session_.settled
    assert session_.pulled(1, pulled(), 9.0) == [BlocksSettled((21, 22))]
    assert session_.settled


def test_session_read_failed_after_the_answer_settles() -> None:
    session_ = session()
    announced(session_, 2, [5, 6], 0.0)
    assert reported(session_.overdue()).unsafe == {21, 22}
    assert session_.pull_failed(1, 9.0) == [BlocksSettled((21, 22))]


def test_session_failed_read_settles_with_unusable_blocks() -> None:
    session_ = session()
    announced(session_, 2, [5], 0.0)
    announced(session_, 3, [6], 0.0)
    bring(session_, 1, 1)
    fetched = reported(session_.pull_failed(2, 1.0))
    assert (fetched.arrived, fetched.unsafe, fetched.reason) == (1, frozenset(), Fallback.TRANSPORT)


def test_when_the_peer_gives_up_the_reads_under_way_still_count() -> None:
    session_ = session()
    announced(session_, 2, [5, 6], 0.0)
    assert session_.failed(Failed(session="r", epoch=2, reason="no memory", retry=True)) == []
    assert announced(session_, 4, [7], 0.0) == [], "nothing new is begun"
    done, report = bring(session_, 1, 2)
    assert done == DONE
    assert reported([report]) == FetchResult("q", arrived=2, reason=Fallback.FAILED, transport="loopback")


def test_session_busy_peer_is_reported_as_busy() -> None:
    done, report = session().failed(Failed(session="r", epoch=2, reason="full", retry=True, busy=True))
    assert done == DONE
    assert reported([report]) == FetchResult("q", arrived=0, reason=Fallback.BUSY)


@pytest.mark.parametrize(("retry", "reason"), [(True, Fallback.FAILED), (False, Fallback.REJECTED)])
def test_failed_prompt_is_rejected_if_a_retry_is_useless(retry: bool, reason: Fallback) -> None:
    session_ = session()
    fetched = reported(session_.failed(Failed(session="r", epoch=2, reason="no", retry=retry)))
    assert (fetched.reason, session_.reason) == (reason, reason)


def test_session_lost_connection_is_only_reported() -> None:
    session_ = session()
    (report,) = session_.lost()
    assert reported([report]) == FetchResult("q", arrived=0, reason=Fallback.LOST)


def test_session_broken_reports_failure_of_this_worker() -> None:
    session_ = session()
    (report,) = session_.broken()
    assert reported([report]) == FetchResult("q", arrived=0, reason=Fallback.TRANSFER_FAILED)


def test_after_the_answer_nothing_is_answered_again() -> None:
    session_ = session()
    session_.cancel()
    assert [session_.cancel(), session_.lost(), session_.overdue()] == [[], [], []]
    assert announced(session_, 2, [5], 0.0) == []
    assert session_.commit(commit()) == []


def test_session_checksum_after_the_answer_is_dropped() -> None:
    session_ = session()
    announced(session_, 2, [5], 0.0)
    session_.pulled(1, pulled(), 1.0)
    assert reported(session_.cancel()).unsafe == frozenset(), "the read has settled, only its check has not"
    assert session_.verified(1, [True]) == []
    assert session_.settled


SCHEDULES = 4000


def test_law_whatever_the_network_and_the_memory_do() -> None:
    """
    Peers' defects 1, 5, 23 and 35: reads of released blocks, frees in mid-read, lost answers.

    Every fetch is reported exactly once. No block with other content is reported as good. A block that is
    not unsafe is never written again. Neither side holds blocks at the end.
    """
    ends: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        schedule = Schedule(seed).run()
        assert len(schedule.fetched) == 1, seed
        (fetched,) = schedule.fetched
        good = schedule.local_ids[: fetched.arrived]
        expected = [schedule.content[schedule.start + offset] for offset in range(fetched.arrived)]
        assert [schedule.local[block] for block in good] == expected, seed
        assert schedule.overwritten == [], seed
        assert schedule.asker.settled, seed
        assert schedule.releases == schedule.submits <= 1, seed
        if fetched.first is not None:
            assert fetched.arrived == len(schedule.local_ids), seed
            assert STRANGER not in (schedule.local[block] for block in good), seed
        ends[fetched.reason or "whole"] += 1
    for reason in ("whole", "lost", "deadline", "checksum", "failed", "transport", "cancelled"):
        assert ends[reason] > SCHEDULES / 200, f"the schedules hardly ever end in {reason!r}: {ends}"
