"""Several runners of one batch: each line belongs to one of them, and has one result whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import select

from baton_api.errors import StaleLease
from baton_batches.database import Database
from baton_batches.files import FileLedger
from baton_batches.ledger import Ledger
from baton_batches.runner_leases import ClaimedLines, RunnerLeases
from baton_batches.tables import FREE, ranges, runners
from baton_batches.values import BatchStatus
from tests.batches.test_ledger import CHAT, NOW, good, new_file

LEASE_S = 10.0


class Memory:
    """An object store with one object."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        yield self.content[start:end]

    def writer(self, key: str) -> object:
        raise NotImplementedError

    delete = writer


@dataclass
class Work:
    """A batch in progress, and what its runners call."""

    database: Database
    ledger: Ledger
    leases: RunnerLeases
    lines: ClaimedLines
    id: str
    now: float = NOW

    def join(self, name: str, most: int | None = None) -> int:
        """The epoch of a new runner; 0 if the ledger refuses it."""
        held = self.leases.join(self.id, name, self.now, LEASE_S, most)
        return 0 if held is None else held.epoch

    def ask(self, epoch: int, turn: int = 0) -> list[int] | None:
        """The numbers of the next lines; None if no runner has others."""
        claim = self.leases.claim(self.id, epoch, turn, self.now)
        lines = [line.number for line in self.lines.claimed(claim, epoch, turn)]
        assert not (claim.whole and lines)
        return None if claim.whole else lines

    def record(self, epoch: int, *lines: int) -> int:
        return self.ledger.record(
            self.id, epoch, [good(line, str(epoch)) for line in lines], int(self.now)
        ).new

    def held(self) -> dict[int, list[tuple[int, int, bool]]]:
        """The ranges (first, last, solo) of each epoch."""
        rows: dict[int, list[tuple[int, int, bool]]] = {}
        with self.database.reading() as connection:
            for row in connection.execute(select(ranges).order_by(ranges.c.first)):
                rows.setdefault(row.epoch, []).append((row.first, row.last, bool(row.solo)))
        return rows


def work_of(database: Database, total: int = 30, size: int = 10) -> Work:
    """A batch of `total` lines, of which `size` make a range."""
    content = b"".join(b"%d\n" % number for number in range(1, total + 1))
    ledger = Ledger(database)
    leases = RunnerLeases(database)
    file = FileLedger(database).add(new_file(size=len(content)), NOW)
    id = ledger.create("a", CHAT, file, NOW).id
    epoch = ledger.lease(id, "validator", NOW, 30)
    assert epoch is not None
    ledger.validated(id, epoch, NOW, total=total, model=None)
    lines = ClaimedLines(leases, Memory(content), size)  # type: ignore[arg-type]
    return Work(database, ledger, leases, lines, id)


@pytest.fixture
def work(database: Database) -> Work:
    return work_of(database)


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_runners_get_different_lines(work: Work) -> None:
    one, two = work.join("one"), work.join("two")
    assert (work.ask(one), work.ask(two), work.ask(one, 1)) == (span(1, 10), span(11, 20), span(21, 30))
    assert work.ask(two, 1) == [], "the others have the rest"
    assert work.leases.working(work.ledger.find(work.id)) == 2
    work.record(one, *span(1, 10), *span(21, 30))
    assert work.ask(two, 1) is None, "the rest is its own"
    assert work.record(two, *span(11, 20)) == 10
    assert work.ledger.find(work.id).status is BatchStatus.FINALIZING
    assert work.held() == {}


def test_repeated_request_gets_the_same_lines(work: Work) -> None:
    one = work.join("one")
    assert work.ask(one, 0) == work.ask(one, 0) == span(1, 10)
    work.record(one, 3)
    assert work.ask(one, 0) == [1, 2, *span(4, 10)]
    assert work.ask(one, 1) == span(11, 20)


def test_late_runner_loses_its_lines_only_when_they_are_needed(work: Work) -> None:
    one, two = work.join("one"), work.join("two")
    assert work.ask(one) == span(1, 10)
    work.now += 2 * LEASE_S
    work.leases.renew(work.id, two, work.now, LEASE_S)
    assert (work.ask(two, 0), work.ask(two, 1)) == (span(11, 20), span(21, 30))
    assert work.record(one, 1) == 1, "nobody took its lines"
    assert work.ask(two, 2) == span(2, 10)
    for late in (lambda: work.record(one, 2), lambda: work.ask(one, 1)):
        with pytest.raises(StaleLease):
            late()
    with pytest.raises(StaleLease):
        work.leases.renew(work.id, one, work.now, LEASE_S)
    assert work.record(two, *span(2, 30)) == 29


def test_lines_of_a_runner_that_leaves_are_free_at_once(work: Work) -> None:
    one, two = work.join("one"), work.join("two")
    work.ask(one)
    work.record(one, 1, 2)
    work.leases.leave(work.id, one)
    assert work.ask(two) == span(3, 10)
    work.leases.leave(work.id, two)
    assert work.ledger.find(work.id).leased_until == 0


def test_batch_is_leased_until_its_last_runner_is(work: Work) -> None:
    one = work.join("one")
    work.now += 3
    two = work.join("two")
    assert work.ledger.find(work.id).leased_until == work.now + LEASE_S
    assert work.ledger.lease(work.id, "controller", work.now + 9, 30) is None
    work.leases.leave(work.id, two)
    assert work.ledger.find(work.id).leased_until == work.now - 3 + LEASE_S
    work.ask(one)
    assert work.ledger.lease(work.id, "controller", work.now + 9, 30) == two + 1
    with pytest.raises(StaleLease):
        work.record(one, 1)
    assert work.join("three") == 0, "the lease of the controller is exclusive"


def test_join_bounds_runners_and_replaces_one_of_the_same_name(work: Work) -> None:
    one = work.join("one", most=1)
    assert work.join("two", most=1) == 0
    assert work.ask(one) == span(1, 10)
    again = work.join("one", most=1)
    assert work.ask(again) == span(1, 10)
    with pytest.raises(StaleLease):
        work.record(one, 1)
    work.now += LEASE_S
    assert work.join("two", most=1) > again
    work.leases.dismiss(work.id, "two")
    assert work.leases.dismiss(work.id, "nobody").leased_until == work.now


def test_understaffed_lists_batches_with_too_few_runners(work: Work) -> None:
    def listed(most: int) -> bool:
        return bool(work.leases.understaffed(work.now, most))

    assert listed(1)
    one = work.join("one")
    assert (listed(1), listed(2)) == (False, True)
    work.join("two")
    assert (listed(2), listed(3)) == (False, True)
    work.leases.leave(work.id, one)
    assert listed(2)
    assert not work.leases.understaffed(work.now, 2, without=[work.id])
    assert work.ledger.take(work.id, "controller", work.now, 30)
    assert not listed(9), "it is exclusive"


def test_renew_in_window_ends_soon_after_the_window(work: Work) -> None:
    one = work.join("one")
    end = NOW + 86400
    assert work.leases.renew(work.id, one, end - 1, 30).leased_until == end + 29
    for later in (end, end + 5, end + 29):
        assert work.leases.renew(work.id, one, later, 30).leased_until == end + 30
    work.leases.leave(work.id, one)
    assert work.leases.renew(work.id, one, NOW, 30).leased_until == 0, "a released lease stays free"


def test_renewal_of_a_finalizing_batch_holds_nothing(work: Work) -> None:
    one, two = work.join("one"), work.join("two")
    for turn in range(3):
        work.ask(one, turn)
    work.record(one, *span(1, 30))
    for epoch in (one, two):
        batch = work.leases.renew(work.id, epoch, work.now, LEASE_S)
        assert (batch.status, batch.leased_until) == (BatchStatus.FINALIZING, 0)


def test_suspects_wait_until_no_other_runner_has_lines(work: Work) -> None:
    one, two, three = work.join("one"), work.join("two"), work.join("three")
    work.ask(one)
    work.ask(two)
    work.record(one, *span(1, 8))
    work.leases.give_back(work.id, one)
    assert work.ask(three) == span(21, 30)
    assert work.ask(one, 1) == [] == work.ask(two, 1)
    work.record(two, *span(11, 20))
    work.leases.give_back(work.id, three)
    assert work.ask(two, 1) == [9, 10]
    assert work.ask(one, 2) == [] == work.ask(three, 1), "one runner gets all of them"
    assert work.ask(two, 2) == span(21, 30)
    assert work.ask(two, 3) is None


def test_lines_with_a_result_before_the_cut_are_left_out(work: Work) -> None:
    """The validation records lines that cannot be sent, and earlier versions cut no ranges."""
    epoch = work.ledger.lease(work.id, "before", work.now, 1)
    assert epoch is not None
    work.record(epoch, *span(1, 12))
    work.ledger.release(work.id, epoch)
    one = work.join("one")
    assert (work.ask(one, 0), work.ask(one, 1)) == ([], span(13, 20))
    work.record(one, *span(13, 20))
    assert work.held() == {}


# --- The law, under chance ---


@dataclass
class Runner:
    """One runner, which may be late, dead, or repeat itself."""

    epoch: int
    turn: int = 0
    lines: list[int] = field(default_factory=list)
    alive_until: float = 0.0


class Chance:
    """Random runners of one batch, and what must hold after each of their steps."""

    def __init__(self, work: Work, seed: int) -> None:
        self.work = work
        self.rng = random.Random(seed)
        self.runners: list[Runner] = []
        self.new = 0

    def step(self) -> None:
        rng, work = self.rng, self.work
        work.now += rng.choice([0, 0, 0.5, 1, 4])
        what = rng.random()
        if not self.runners or what < 0.1:
            if epoch := work.join(f"r{rng.randrange(6)}"):
                self.runners.append(Runner(epoch, alive_until=work.now + LEASE_S))
            return
        runner = rng.choice(self.runners)
        try:
            self.act(runner, what)
        except StaleLease:
            self.runners.remove(runner)

    def act(self, runner: Runner, what: float) -> None:
        rng, work = self.rng, self.work
        if what < 0.3:
            work.leases.renew(work.id, runner.epoch, work.now, LEASE_S)
            runner.alive_until = work.now + LEASE_S
        elif what < 0.55:
            lines = work.ask(runner.epoch, runner.turn)
            if lines is None:
                left = set(range(1, 61)) - {
                    one.line for one in work.ledger.results(work.ledger.find(work.id))
                }
                assert left <= set(runner.lines) | self.lost(runner), "whole, although others have lines"
            elif rng.random() < 0.85:  # else the reply is lost, and the request is repeated
                runner.turn += 1
                runner.lines += lines
        elif what < 0.85:
            count = min(len(runner.lines), rng.randrange(8))
            sent = rng.sample(runner.lines, count)
            self.new += work.record(runner.epoch, *sent)
            if rng.random() < 0.8:  # else it records them again
                runner.lines = [line for line in runner.lines if line not in sent]
        elif what < 0.9:
            work.leases.give_back(work.id, runner.epoch)
            runner.lines = []
        elif what < 0.95:
            work.leases.leave(work.id, runner.epoch)
            self.runners.remove(runner)
        else:  # it is killed
            self.runners.remove(runner)

    def lost(self, runner: Runner) -> set[int]:
        """Lines that are the runner's in replies that it did not get."""
        mine = self.work.held().get(runner.epoch, [])
        return {line for first, last, _ in mine for line in range(first, last + 1)}

    def check(self) -> None:
        work = self.work
        batch = work.ledger.find(work.id)
        lines = [one.line for one in work.ledger.results(batch)]
        assert len(lines) == len(set(lines)) == batch.done == self.new
        held = work.held()
        owners = {epoch for epoch in held if epoch != FREE}
        solo = {epoch for epoch in owners if any(is_solo for _, _, is_solo in held[epoch])}
        assert not solo or (owners == solo and len(solo) == 1), "suspects beside other lines"
        done = set(lines)
        alive = [one for one in self.runners if one.alive_until > work.now and one.epoch in owners]
        with work.database.reading() as connection:
            epochs = set(connection.scalars(select(runners.c.epoch)))
        left = [set(one.lines) - done for one in alive if one.epoch in epochs]
        assert sum(map(len, left)) == len(set().union(*left)), "two runners have a line"


@pytest.mark.parametrize("seed", range(12))
def test_law_every_line_ends_once_with_any_runners(database: Database, seed: int) -> None:
    """Runners that renew or not, repeat requests and results, are killed, and wake up late."""
    chance = Chance(work_of(database, total=60, size=random.Random(seed).randrange(1, 25)), seed)
    work = chance.work
    for _ in range(150):
        chance.step()
        chance.check()
        if work.ledger.find(work.id).status is not BatchStatus.IN_PROGRESS:
            break
    last = work.join("last")
    for turn in range(200):
        if work.ledger.find(work.id).status is not BatchStatus.IN_PROGRESS:
            break
        work.now += 2 * LEASE_S / 3
        work.leases.renew(work.id, last, work.now, LEASE_S)
        if lines := work.ask(last, turn):
            chance.new += work.record(last, *lines)
        chance.check()
    batch = work.ledger.find(work.id)
    assert (batch.status, batch.completed, chance.new) == (BatchStatus.FINALIZING, 60, 60)
    assert work.ledger.counts(work.id) == (60, 0)
    assert work.held() == {}
