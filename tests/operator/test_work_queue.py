"""The queue of what has still to be looked at."""

from __future__ import annotations

import asyncio
import random

from baton_operator.work_queue import BACKOFF_LIMIT_S, FIRST_BACKOFF_S, QueueKey, WorkQueue

A: QueueKey = ("InferenceService", "models", "a")
B: QueueKey = ("InferenceService", "models", "b")


class Clock:
    """A clock that stands still until the test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def queue(clock: Clock | None = None) -> WorkQueue:
    return WorkQueue(clock or Clock(), random.Random(0))


async def taken(queue: WorkQueue) -> QueueKey | None:
    """Return the key that can be taken at once."""
    task = asyncio.create_task(queue.take())
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def test_work_queue_repeated_change_is_taken_once() -> None:
    waiting = queue()
    for _ in range(5):
        waiting.add(A)
    assert len(waiting) == 1
    assert await taken(waiting) == A
    assert await taken(waiting) is None


async def test_work_queue_change_during_work_is_taken_after_done() -> None:
    """No second worker takes the key meanwhile."""
    waiting = queue()
    waiting.add(A)
    assert await taken(waiting) == A
    waiting.add(A)
    assert await taken(waiting) is None
    waiting.done(A)
    assert await taken(waiting) == A
    waiting.done(A)
    assert await taken(waiting) is None


async def test_work_queue_delayed_key_is_due_then_or_at_a_change() -> None:
    clock = Clock()
    waiting = queue(clock)
    waiting.add(A)
    assert await taken(waiting) == A
    waiting.done(A, again_s=60)
    clock.now += 59
    assert (await taken(waiting), len(waiting)) == (None, 0)
    clock.now += 1
    assert len(waiting) == 1
    assert await taken(waiting) == A
    waiting.done(A, again_s=60)
    waiting.add(A, after_s=5)
    clock.now += 5
    assert await taken(waiting) == A
    waiting.done(A)
    clock.now += 60
    assert await taken(waiting) is None


async def test_work_queue_failed_key_backs_off_until_a_success() -> None:
    clock = Clock()
    waiting = queue(clock)
    waiting.add(A)
    pauses = []
    for _ in range(14):
        assert await taken(waiting) == A
        pause = waiting.failed(A)
        pauses.append(pause)
        clock.now += pause
    for number, pause in enumerate(pauses):
        most = min(BACKOFF_LIMIT_S, FIRST_BACKOFF_S * 2**number)
        assert most / 2 <= pause <= most
    assert await taken(waiting) == A
    waiting.done(A)
    waiting.add(A)
    assert await taken(waiting) == A
    assert waiting.failed(A) <= FIRST_BACKOFF_S


async def test_work_queue_failed_key_delays_no_other_key() -> None:
    waiting = queue()
    waiting.add(A)
    assert await taken(waiting) == A
    waiting.add(A)
    waiting.failed(A)
    waiting.add(B)
    assert await taken(waiting) == B
    assert await taken(waiting) is None


async def test_work_queue_reports_age_of_oldest_key() -> None:
    clock = Clock()
    waiting = queue(clock)
    assert waiting.oldest_s() == 0
    waiting.add(A)
    clock.now += 3
    waiting.add(B)
    waiting.add(("LoraAdapter", "models", "a"), after_s=60)
    clock.now += 4
    assert (waiting.oldest_s(), len(waiting)) == (7, 2)


async def test_work_queue_waiting_takers_are_woken() -> None:
    waiting = WorkQueue(asyncio.get_running_loop().time, random.Random(0))
    takers = [asyncio.create_task(waiting.take()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting.add(A, after_s=0.02)
    waiting.add(B)
    assert set(await asyncio.gather(*takers)) == {A, B}


async def test_work_queue_random_events_lose_no_key_nor_share_it() -> None:
    """The law: whatever has changed since it was last taken is taken again."""
    for seed in range(300):
        rng = random.Random(seed)
        clock = Clock()
        waiting = WorkQueue(clock, rng)
        keys: list[QueueKey] = [("InferenceService", "models", str(number)) for number in range(4)]
        changed: set[QueueKey] = set()
        working: set[QueueKey] = set()
        for _ in range(60):
            key = rng.choice(keys)
            match rng.choice(["change", "take", "done", "fail", "later"]):
                case "change":
                    waiting.add(key, rng.choice([0.0, 0.0, 5.0]))
                    changed.add(key)
                case "take":
                    got = await taken(waiting)
                    if got is not None:
                        assert got not in working
                        working.add(got)
                        changed.discard(got)
                case "done" if working:
                    done = working.pop()
                    waiting.done(done, rng.choice([None, 10.0]))
                case "fail" if working:
                    failed = working.pop()
                    waiting.failed(failed)
                    changed.add(failed)
                case "later":
                    clock.now += 7
        for key in working:
            waiting.done(key)
        clock.now += BACKOFF_LIMIT_S
        while (got := await taken(waiting)) is not None:
            changed.discard(got)
            waiting.done(got)
        assert not changed, seed
