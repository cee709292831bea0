"""
Both sides of a session, joined by an unreliable network and memory.

Messages are dropped, doubled, reordered and delayed, and the connection is cut. Reads take their time,
copy block by block, fail or hang. A released block belongs to another owner at once and gets other content,
on both sides. One seeded generator decides all of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

from baton_api.hashing import chain_hash, root_hash
from baton_api.messages import Abort, Checksums, Chunk, Commit, Done, Drained, Failed, Prefill, TokenChoice
from baton_api.sampling import SamplingParams
from baton_decode import sessions as decode
from baton_engine.requests import Fetch, FetchResult
from baton_engine.transfer import Pulled
from baton_prefill import sessions as prefill

T = TypeVar("T")

BLOCK = 4
STRANGER = -1
"""Content of a block that belongs to another owner."""


@dataclass
class Read:
    number: int
    remote: tuple[int, ...]
    local: tuple[int, ...]
    copied: int = 0


@dataclass
class Schedule:
    """One prompt, from the first message until nothing can happen any more."""

    seed: int
    chance: random.Random = field(init=False)
    fetched: list[FetchResult] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    """Local blocks that a read wrote after another owner had them."""
    releases: int = 0
    submits: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.tokens = [self.chance.randint(0, 99) for _ in range(self.chance.randint(1, 30))]
        self.blocks = -(-len(self.tokens) // BLOCK)
        self.start = self.chance.randint(0, self.blocks - 1)
        self.content = {position: 1000 + position for position in range(self.blocks)}
        self.remote_ids = self.chance.sample(range(1, 64), self.blocks)
        self.local_ids = tuple(self.chance.sample(range(1, 64), self.blocks - self.start))
        self.remote = dict.fromkeys(self.remote_ids, STRANGER)
        self.local = dict.fromkeys(self.local_ids, 0)
        self.given_away: set[int] = set()
        """Local blocks that the engine may give to others."""
        self.reads: dict[int, Read] = {}
        self.checks: list[decode.VerifyChecksums] = []
        self.sums: list[prefill.AwaitBlocks | prefill.ComputeChecksums] = []
        """What the prefill worker waits for, and computes."""
        self.summed: list[int] = []
        self.to_prefill: list[Prefill | Done | Abort] = []
        self.to_decode: list[Chunk | Checksums | Commit | Failed | Drained] = []
        self.connected = True
        self.hostile = self.chance.random() < 0.5
        self.computed = 0
        self.now = 0.0
        tail = root_hash()
        for at in range(0, len(self.tokens), BLOCK):
            tail = chain_hash(tail, self.tokens[at : at + BLOCK])
        self.tail = tail
        fetch = Fetch("q", self.tokens, self.start, b"p", self.local_ids, SamplingParams(), "")
        self.spec = decode.SessionSpec(
            fetch=fetch,
            session="r",
            epoch=2,
            worker="prefill-0",
            tail=tail,
            block_size=BLOCK,
            vocab=100,
            remote_blocks=64,
        )
        self.asker = decode.DecodeSession(self.spec)
        self.maker: prefill.PrefillSession | None = None

    def run(self) -> Schedule:
        self.do_decode(self.asker.begin("q", "", 60.0))
        for _ in range(self.chance.randint(30, 250)):
            self.step()
        self.do_decode(self.asker.overdue())
        for number in list(self.reads):
            self.finish_read(number)
        while self.checks:
            self.verify()
        if self.maker is not None:
            self.do_prefill(self.maker.deadline())
        return self

    def step(self) -> None:
        self.now += 0.01
        match self.chance.randint(0, 12):
            case 0 | 1 | 2 if self.to_prefill:
                self.deliver_to_prefill()
            case 3 | 4 | 5 if self.to_decode:
                self.deliver_to_decode()
            case 6 if self.maker is not None and self.maker.state is prefill.PrefillState.COMPUTING:
                self.compute()
            case 7 | 12 if self.sums:
                self.checksum()
            case 8 | 9 if self.reads:
                self.read()
            case 10 if self.checks:
                self.verify()
            case 11 if self.hostile and self.chance.random() < 0.25:
                self.fault()

    def deliver_to_prefill(self) -> None:
        message = self._take(self.to_prefill)
        match message:
            case Prefill() if self.maker is None:
                self.maker = prefill.PrefillSession(message, BLOCK, self.tail)
                self.do_prefill(self.maker.begin())
            case Done() if self.maker is not None:
                self.do_prefill(self.maker.done())
            case Abort() if self.maker is not None:
                self.do_prefill(self.maker.abort())

    def deliver_to_decode(self) -> None:
        match self._take(self.to_decode):
            case Chunk() as chunk:
                self.do_decode(self.asker.chunk(chunk, self.now))
            case Checksums() as checksums:
                self.do_decode(self.asker.checksums(checksums))
            case Commit() as commit:
                self.do_decode(self.asker.commit(commit))
            case Failed() as failed:
                self.do_decode(self.asker.failed(failed))

    def _take(self, line: list[T]) -> T | None:
        """One message; a hostile network picks any, doubles or loses it."""
        index = self.chance.randrange(len(line)) if self.hostile else 0
        message = line[index]
        if not self.hostile or self.chance.random() < 0.8:
            del line[index]
        return message if not self.hostile or self.chance.random() < 0.95 else None

    def compute(self) -> None:
        assert self.maker is not None
        self.computed = min(len(self.tokens), self.computed + self.chance.randint(1, 12))
        for position in range(self.blocks):
            if self.computed >= min(len(self.tokens), (position + 1) * BLOCK):
                self.remote[self.remote_ids[position]] = self.content[position]
        self.do_prefill(self.maker.computed(self.computed, self.remote_ids))
        if self.computed == len(self.tokens):
            self.do_prefill(self.maker.finished(TokenChoice(token=5), 0))

    def checksum(self) -> None:
        assert self.maker is not None
        match self.sums.pop(self.chance.randrange(len(self.sums))):
            case prefill.AwaitBlocks(first, blocks):
                self.do_prefill(self.maker.written(first, blocks))
            case prefill.ComputeChecksums(first, blocks):
                self.summed += blocks
                sums = [self.remote[block] for block in blocks]
                self.do_prefill(self.maker.checksummed(first, sums))

    def read(self) -> None:
        number = self.chance.choice(list(self.reads))
        read = self.reads[number]
        if self.hostile and self.chance.random() < 0.1:
            del self.reads[number]
            self.do_decode(self.asker.pull_failed(number, self.now))
        elif read.copied == len(read.local):
            self.finish_read(number)
        else:
            self._copy(read)

    def finish_read(self, number: int) -> None:
        read = self.reads.pop(number)
        while read.copied < len(read.local):
            self._copy(read)
        self.do_decode(self.asker.pulled(number, Pulled(len(read.local), 0.1, "chance"), self.now))

    def _copy(self, read: Read) -> None:
        target = read.local[read.copied]
        if target in self.given_away:
            self.overwritten.append(target)
        self.local[target] = self.remote[read.remote[read.copied]]
        read.copied += 1

    def verify(self) -> None:
        check = self.checks.pop(self.chance.randrange(len(self.checks)))
        good = [self.local[b] == c for b, c in zip(check.blocks, check.checksums, strict=True)]
        self.do_decode(self.asker.verified(check.number, good))

    def fault(self) -> None:
        match self.chance.randint(0, 6):
            case 0:
                self.cut()
            case 1:
                self.do_decode(self.asker.cancel())
            case 2:
                self.do_decode(self.asker.overdue())
            case 3 if self.maker is not None:
                self.do_prefill(self.maker.deadline())
            case 4 if self.maker is not None:
                self.do_prefill(self.maker.failed("chance", retry=True))
            case 5:  # a late message of an earlier attempt
                self.to_decode.append(Chunk(session="r", epoch=1, first_block=self.start, blocks=[63]))
                old = Checksums(session="r", epoch=1, first_block=self.start, checksums=[STRANGER])
                self.to_decode.append(old)
            case 6 if self.summed:  # a bit flips after the checksum was taken
                self.remote[self.chance.choice(self.summed)] = STRANGER

    def cut(self) -> None:
        if self.connected:
            self.connected = False
            self.to_prefill.clear()
            self.to_decode.clear()
            self.do_decode(self.asker.lost())
            if self.maker is not None:
                self.do_prefill(self.maker.lost())

    def do_decode(self, actions: list[decode.Action]) -> None:
        for action in actions:
            match action:
                case decode.SendToPrefill(message):
                    if self.connected:
                        self.to_prefill.append(message)
                case decode.ReadBlocks(number, remote, local):
                    self.reads[number] = Read(number, remote, local)
                case decode.VerifyChecksums():
                    self.checks.append(action)
                case decode.ReportResult(fetched):
                    self.fetched.append(fetched)
                    self._let_go(set(self.local_ids[fetched.arrived :]) - fetched.unsafe)
                case decode.BlocksSettled(blocks):
                    self._let_go(set(blocks))

    def _let_go(self, blocks: set[int]) -> None:
        self.given_away |= blocks
        for block in blocks:
            self.local[block] = STRANGER

    def do_prefill(self, actions: list[prefill.Action]) -> None:
        for action in actions:
            match action:
                case prefill.SubmitPrompt():
                    self.submits += 1
                case prefill.SendToDecode(message):
                    if self.connected:
                        self.to_decode.append(message)
                case prefill.AwaitBlocks() | prefill.ComputeChecksums():
                    self.sums.append(action)
                case prefill.ReleaseBlocks():
                    self.releases += 1
                    self.remote = dict.fromkeys(self.remote, STRANGER)
