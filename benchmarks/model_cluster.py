"""
Workers without models as a cluster: their load reports, their KV events, and how routers combine them.

Each router requests the computation of a prompt in its own way. With Baton's header the decode worker asks
the prefill worker. SGLang's router asks both and connects them by a session number. vLLM's router asks the
prefill worker first and passes its reply to the decode worker. The time that this takes is the same for all.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from baton_api.hashing import root_hash
from baton_api.kv_events import FRAME_ENTRIES, SnapshotFrame, frame
from baton_api.workers import Load, Role
from baton_engine.kv.events import Change, Removed, Stored
from baton_engine.kv.publisher import KvPublisher
from benchmarks.model_worker import Changed, Computed, ModelWorker, Text, Timing, prompt_text

MODEL = "m"
LAG_S = 0.005
"""Seconds between two measurements of this process's delay."""

SESSION_LIMIT_S = 60.0


class Message(msgspec.Struct):
    role: str = ""
    content: str = ""


class Transfer(msgspec.Struct):
    """vLLM's `kv_transfer_params`."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_block_ids: list[int] | None = None


class Body(msgspec.Struct):
    messages: list[Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    session_number: int | None = msgspec.field(default=None, name="bootstrap_room")
    kv_transfer_params: Transfer | None = None

    @property
    def prompt(self) -> bytes:
        return prompt_text((one.role, one.content) for one in self.messages)

    @property
    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 16


class Cluster:
    """The shared state of the workers in one process."""

    def __init__(self, renders: bool) -> None:
        """`renders`: whether they send vLLM's router the tokens of a prompt."""
        self.renders = renders
        self.workers: list[ServedWorker] = []
        self.lags: list[float] = []
        self._sessions: dict[int, asyncio.Future[Computed]] = {}
        self._handed: dict[int, Computed] = {}
        self._numbers = itertools.count(1)

    def session(self, number: int) -> asyncio.Future[Computed]:
        """
        Return the future that connects a prefill and a decode worker of SGLang, whichever arrives first.
        """
        if number not in self._sessions:
            loop = asyncio.get_running_loop()
            self._sessions[number] = loop.create_future()
            loop.call_later(SESSION_LIMIT_S, self._sessions.pop, number, None)
        return self._sessions[number]

    def hand(self, done: Computed) -> int:
        """Return a number for the prefill worker's reply, which vLLM's router passes to the decode worker."""
        number = next(self._numbers)
        self._handed[number] = done
        return number

    def taken(self, number: int) -> Computed:
        return self._handed.pop(number)

    def at(self, control: str) -> ServedWorker | None:
        return next((one for one in self.workers if one.control == control), None)

    async def watch(self) -> None:
        """Record how late this process wakes up."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_S
            await asyncio.sleep(LAG_S)
            self.lags.append(loop.time() - due)


class ServedWorker:
    """One worker with its address, its events and its endpoints."""

    def __init__(
        self, cluster: Cluster, role: Role, port: int, timing: Timing, capacity: int, block_tokens: int
    ) -> None:
        self.cluster = cluster
        self.role = role
        self.name = f"127.0.0.1:{port}"
        self.control = f"127.0.0.1:{port}" if role is Role.PREFILL else ""
        self._timing, self._capacity, self._block_tokens = timing, capacity, block_tokens
        self._number = 0
        self.deaf = False
        """Whether changes are not published, as if events were lost."""
        self.begin()

    def begin(self) -> None:
        """Start like a new process: empty cache, events from 0."""
        self._number += 1
        self.epoch = f"{self.name}-{self._number}"
        self.publisher = KvPublisher("tcp://127.0.0.1:0", block_size=self._block_tokens, tokens=False)
        self.publisher.start()
        self.model = ModelWorker(self._timing, self._capacity, self._block_tokens, self._tell)

    def restart(self) -> None:
        self.publisher.close()
        self.begin()

    def _tell(self, changed: Changed) -> None:
        if self.deaf:
            return
        changes: list[Change] = [Removed(_name(block)) for block in changed.removed]
        changes += [Stored(_name(block), _name(parent), ()) for block, parent in changed.stored]
        self.publisher.publish(changes)

    @property
    def load(self) -> Load:
        model = self.model
        used = -(-model.context // self._block_tokens)
        return Load(
            role=self.role,
            model=MODEL,
            max_model_len=1_000_000,
            running=model.streams,
            queued=model.queued,
            queued_tokens=model.queued_tokens,
            step_s=model.step_s if model.streams else 0.0,
            free_blocks=max(0, self._capacity - used),
            total_blocks=self._capacity,
            block_size=self._block_tokens,
            control=self.control,
            epoch=self.epoch,
            compatibility="c",
            kv_events=self.publisher.endpoint,
            kv_replay=self.publisher.replay_endpoint,
        )

    def snapshot(self) -> bytes:
        blocks = list(self.model.cache.parents.items())
        parts = []
        for start in range(0, len(blocks) or 1, FRAME_ENTRIES):
            stop = start + FRAME_ENTRIES
            one = SnapshotFrame(
                self.epoch, self.publisher.last, self._block_tokens, blocks[start:stop], stop >= len(blocks)
            )
            parts.append(frame(msgspec.msgpack.encode(one)))
        return b"".join(parts)

    @property
    def usage(self) -> dict[str, Any]:
        model = self.model
        return {
            "role": self.role,
            "busy_s": model.busy_s,
            "prompt_tokens": model.prompt_tokens,
            "cached_tokens": model.cached_tokens,
        }

    async def prefilled(self, body: Body, text: Text, prefill: ServedWorker | None) -> tuple[Computed, bool]:
        """Return the computation of the prompt, and whether another worker did it."""
        session, transfer = body.session_number, body.kv_transfer_params
        if session is not None and self.role is not Role.PREFILL:
            return await self.cluster.session(session), True
        if transfer is not None and transfer.do_remote_prefill and transfer.remote_block_ids:
            return self.cluster.taken(transfer.remote_block_ids[0]), True
        if prefill is not None:
            return await prefill.model.compute(text), True
        done = await self.model.compute(text)
        if session is not None:
            self.cluster.session(session).set_result(done)
        return done, False


def _name(block: int | None) -> bytes:
    return root_hash() if block is None else bytes(8) + block.to_bytes(8)
