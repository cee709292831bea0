"""One prompt on the prefill side: a table of stories, then what holds whatever happens."""

from __future__ import annotations

import random

import pytest

from baton_api.messages import Checksums, Chunk, Commit, Drained, Failed, Prefill, TokenChoice
from baton_api.sampling import SamplingParams
from baton_prefill.sessions import (
    Action,
    AwaitBlocks,
    ComputeChecksums,
    PrefillSession,
    PrefillState,
    ReleaseBlocks,
    SendToDecode,
    SubmitPrompt,
)

TAIL = b"t" * 16
FIRST = TokenChoice(token=7)


def session(tokens: int = 40, start_block: int = 0) -> PrefillSession:
    prefill = Prefill(
        session="r",
        epoch=3,
        tokens=list(range(tokens)),
        start_block=start_block,
        parent=b"p" * 16,
        sampling=SamplingParams(seed=1),
    )
    return PrefillSession(prefill, 16, TAIL)


def computing(tokens: int = 40, start_block: int = 0) -> PrefillSession:
    session_ = session(tokens, start_block)
    assert session_.begin() == [SubmitPrompt()]
    return session_


def announce(session_: PrefillSession, actions: list[Action]) -> list[Action]:
    """Answer the one `AwaitBlocks` in `actions`, and then the checksums."""
    (written,) = actions
    assert isinstance(written, AwaitBlocks)
    sent = session_.written(written.first_block, written.blocks)
    if not sent:
        return []
    chunk_, compute = sent
    assert compute == ComputeChecksums(written.first_block, written.blocks)
    return [chunk_, *session_.checksummed(written.first_block, [block * 10 for block in written.blocks])]


def chunk(first_block: int, blocks: list[int]) -> list[SendToDecode]:
    """The announcement of blocks, and their checksums."""
    sums = [block * 10 for block in blocks]
    return [
        SendToDecode(Chunk(session="r", epoch=3, first_block=first_block, blocks=blocks)),
        SendToDecode(Checksums(session="r", epoch=3, first_block=first_block, checksums=sums)),
    ]


COMMIT = SendToDecode(Commit(session="r", epoch=3, first=FIRST, prompt_tokens=40, cached_tokens=0, tail=TAIL))
DRAINED = SendToDecode(Drained(session="r", epoch=3))


def test_session_announces_whole_blocks_then_the_partial_one() -> None:
    session_ = computing()
    assert announce(session_, session_.computed(20, [4, 5, 6])) == chunk(0, [4])
    assert session_.computed(31, [4, 5, 6]) == []
    assert announce(session_, session_.computed(32, [4, 5, 6])) == chunk(1, [5])
    assert announce(session_, session_.computed(40, [4, 5, 6])) == chunk(2, [6])
    assert session_.finished(FIRST, 0) == [COMMIT]
    assert session_.done() == [ReleaseBlocks(), DRAINED]


def test_session_announces_a_cached_prefix_at_once() -> None:
    session_ = computing()
    assert announce(session_, session_.computed(32, [4, 5, 6])) == chunk(0, [4, 5])


def test_blocks_that_the_decode_worker_holds_are_skipped() -> None:
    session_ = computing(start_block=1)
    assert session_.computed(16, [4, 5, 6]) == []
    assert announce(session_, session_.computed(40, [4, 5, 6])) == chunk(1, [5, 6])


def test_session_commit_waits_for_the_last_chunk() -> None:
    session_ = computing()
    actions = session_.computed(40, [4, 5, 6])
    assert session_.finished(FIRST, 0) == []
    assert announce(session_, actions) == [*chunk(0, [4, 5, 6]), COMMIT]


def test_commit_reports_both_times_and_ends_computing() -> None:
    """The decode worker's relay record shows the waiting and the computing of the prompt apart."""
    session_ = computing()
    announce(session_, session_.computed(40, [4, 5, 6]))
    (sent,) = session_.finished(FIRST, 32, queue_s=0.25, compute_s=0.5)
    assert isinstance(sent, SendToDecode) and isinstance(sent.message, Commit)
    assert (sent.message.cached_tokens, sent.message.queue_s, sent.message.compute_s) == (32, 0.25, 0.5)
    assert session_.state is PrefillState.COMMITTED
    assert session_.failed("too late", retry=True) == []


def test_session_repeated_or_late_progress_is_announced_once() -> None:
    session_ = computing()
    announce(session_, session_.computed(32, [4, 5, 6]))
    assert session_.computed(32, [4, 5, 6]) == []
    assert session_.computed(16, [4, 5, 6]) == []


@pytest.mark.parametrize("tokens, blocks", [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_session_announces_prompts_of_every_length(tokens: int, blocks: int) -> None:
    session_ = computing(tokens)
    assert announce(session_, session_.computed(tokens, [4, 5])) == chunk(0, [4, 5][:blocks])


@pytest.mark.parametrize("end", ["done", "abort"])
def test_session_end_while_computing_releases_at_once(end: str) -> None:
    session_ = computing()
    assert getattr(session_, end)() == [ReleaseBlocks(), DRAINED]


def test_session_lost_connection_releases_without_a_message() -> None:
    session_ = computing()
    assert session_.lost() == [ReleaseBlocks()]


def test_session_deadline_ends_computing_and_unfetched_prompts() -> None:
    session_ = computing()
    failed = SendToDecode(Failed(session="r", epoch=3, reason="the deadline passed", retry=False))
    assert session_.deadline() == [failed, ReleaseBlocks(), DRAINED]
    session_ = computing()
    announce(session_, session_.computed(40, [4, 5, 6]))
    session_.finished(FIRST, 0)
    assert session_.deadline() == [ReleaseBlocks(), DRAINED]


def test_session_failure_holds_announced_blocks_until_done() -> None:
    session_ = computing()
    announce(session_, session_.computed(16, [4, 5, 6]))
    assert session_.failed("no memory", retry=True) == [
        SendToDecode(Failed(session="r", epoch=3, reason="no memory", retry=True))
    ]
    assert session_.state is PrefillState.FAILED
    assert session_.done() == [ReleaseBlocks(), DRAINED]


def test_checksums_that_come_after_the_end_are_dropped() -> None:
    session_ = computing()
    actions = session_.computed(40, [4, 5, 6])
    session_.abort()
    assert announce(session_, actions) == []
    assert session_.finished(FIRST, 0) == []


@pytest.mark.parametrize("seed", range(300))
def test_session_random_events_release_once_and_tile_the_prompt(seed: int) -> None:
    chance = random.Random(seed)
    tokens = chance.randint(1, 100)
    blocks = list(range(50, 50 + -(-tokens // 16)))
    start = chance.randint(0, len(blocks) - 1)
    session_ = computing(tokens, start)
    log: list[Action] = []
    unanswered: list[AwaitBlocks | ComputeChecksums] = []
    done = 0
    for _ in range(60):
        match chance.randint(0, 9):
            case 0 | 1 | 2:
                done = min(tokens, done + chance.randint(0, 40))
                new = session_.computed(done, blocks)
            case 3 | 4 | 5 if unanswered:
                match unanswered.pop(chance.randrange(len(unanswered))):
                    case AwaitBlocks(first, waited):
                        new = session_.written(first, waited)
                    case ComputeChecksums(first, summed_blocks):
                        new = session_.checksummed(first, [0] * len(summed_blocks))
            case 6 if done == tokens:
                new = session_.finished(FIRST, 0)
            case 7 if chance.random() < 0.2:
                new = chance.choice([session_.done, session_.abort, session_.lost, session_.deadline])()
            case 8 if chance.random() < 0.05:
                new = session_.failed("chance", retry=False)
            case _:
                new = []
        unanswered += [action for action in new if isinstance(action, AwaitBlocks | ComputeChecksums)]
        log += [action for action in new if not isinstance(action, AwaitBlocks | ComputeChecksums)]
    log += session_.lost()
    assert session_.state is PrefillState.RELEASED
    assert log.count(ReleaseBlocks()) == 1
    after = log[log.index(ReleaseBlocks()) + 1 :]
    assert all(action == DRAINED for action in after)
    told_of: set[int] = set()
    summed: set[int] = set()
    for action in log:
        match action:
            case SendToDecode(Chunk() as told):
                places = set(range(told.first_block, told.first_block + len(told.blocks)))
                assert told.blocks == blocks[min(places) : max(places) + 1]
                assert told_of.isdisjoint(places)
                told_of |= places
            case SendToDecode(Checksums() as sums):
                places = set(range(sums.first_block, sums.first_block + len(sums.checksums)))
                assert places <= told_of - summed
                summed |= places
            case SendToDecode(Commit()):
                assert summed == set(range(start, len(blocks)))
