"""Ends that come from outside, in every state a request can be in."""

from __future__ import annotations

import random

import pytest

from baton_engine.requests import Fetch, FinishReason, Request
from tests.engine.serving import TIMEOUT_S, Prefiller, Recipient, Serving, prompt_of, request_of
from tests.seeds import seeds


def test_abort_waiting_request_ends() -> None:
    with Serving(max_running=1) as serving:
        serving.model.go.clear()
        serving.submit(request_of("a"), request_of("b"))
        serving.engine.abort("b")
        serving.model.go.set()
        assert serving.ended("b").finish is FinishReason.ABORT
        assert serving.so_far("b") == []
        serving.ended("a")
        serving.at_rest()


def test_abort_request_in_mid_prompt_ends() -> None:
    with Serving(chunk_tokens=4) as serving:
        serving.model.go.clear()
        serving.submit(request_of("a", 100))
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.engine.abort("a")
        serving.model.go.set()
        assert serving.ended("a").finish is FinishReason.ABORT
        assert serving.model.passes == 1
        serving.at_rest()


def test_abort_during_a_pass_keeps_its_blocks_until_the_end() -> None:
    """Peers' defect 3: the pass under way still writes them."""
    with Serving(blocks=6) as serving:
        serving.model.go.clear()
        serving.submit(request_of("a", 18, max_tokens=2))
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.engine.abort("a")
        serving.submit(request_of("b", 18, seed=1, max_tokens=2))
        serving.model.go.set()
        assert serving.tokens("b") == serving.model.greedy(prompt_of(18, 1), 2)
        serving.at_rest()


def test_abort_generating_request_leaves_others_running() -> None:
    with Serving() as serving:
        serving.model.stops_at = 6
        serving.submit(request_of("a", max_tokens=180), request_of("b", seed=1, max_tokens=60))
        serving.wait(lambda: len(serving.so_far("a")) >= 3)
        serving.engine.abort("a")
        serving.model.resume()
        assert serving.ended("a").finish is FinishReason.ABORT
        assert serving.tokens("b") == serving.model.greedy(prompt_of(10, 1), 60)
        serving.at_rest()


def test_abort_ended_or_unknown_request_is_ignored() -> None:
    with Serving() as serving:
        serving.run(request_of("a"))
        serving.engine.abort("a")
        serving.engine.abort("never seen")
        serving.engine.finish("never seen")
        serving.run(request_of("b"))
        assert len(serving.outputs) == 2
        assert serving.at_rest().totals.finished == {"length": 2}


@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_abort_random_ends_leak_no_block_and_change_no_token(seed: int) -> None:
    """Peers' defect 6: aborted loads were never reclaimed. 1,600 requests, most ended from outside."""
    chance = random.Random(seed)
    with Serving(
        blocks=60, chunk_tokens=16, max_running=10, local_prefill_tokens=6, quarantine_limit=1.0
    ) as serving:
        peer = Prefiller(serving)
        fetches: list[Fetch] = []
        unsafe: list[int] = []
        requests: list[Request] = []
        exported: list[str] = []
        doomed: set[str] = set()

        def answer() -> None:
            while not peer.fetches.empty():
                fetches.append(peer.fetch())
            if not fetches:
                return
            fetch = fetches.pop(chance.randrange(len(fetches)))
            if chance.random() < 0.5:
                peer.succeed(fetch)
                return
            arrived = chance.randrange(len(fetch.blocks))
            lost = [block for block in fetch.blocks[arrived:] if chance.random() < 0.2]
            peer.fail(fetch, arrived, lost)
            unsafe.extend(lost)

        for number in range(400):
            kind = chance.random()
            request = request_of(
                f"{number}",
                chance.randrange(1, 40),
                seed=chance.randrange(4),
                max_tokens=chance.randrange(1, 12),
                temperature=chance.choice([0.0, 1.0]),
                remote=peer if kind < 0.5 else None,
                export=Recipient() if kind > 0.8 else None,
            )
            requests.append(request)
            if request.export is not None:
                exported.append(request.id)
            serving.submit(request)
            if chance.random() < 0.7:
                answer()
            if chance.random() < 0.7:
                victim = chance.choice(requests[-12:]).id
                doomed.add(victim)
                end = chance.choice([serving.engine.abort, serving.engine.abort, serving.engine.finish])
                end(victim)
            if exported and chance.random() < 0.5:
                name = exported.pop(chance.randrange(len(exported)))
                doomed.add(name)
                serving.engine.release(name)
            if unsafe and chance.random() < 0.3:
                serving.engine.settled([unsafe.pop()])
            if chance.random() < 0.2:  # let it catch up, or nothing would ever run
                serving.until(lambda now: now.queued < 5 or not peer.fetches.empty() or bool(now.held))

        while True:
            now = serving.engine.snapshot()
            answer()
            for name in exported:
                doomed.add(name)
                serving.engine.release(name)
            exported.clear()
            if unsafe:
                serving.engine.settled([unsafe.pop()])
            if not (now.running or now.queued or now.fetching or now.held or fetches or unsafe):
                break
        serving.at_rest()
        assert serving.fatal == []
        for request in requests:
            last = serving.ended(request.id)
            assert last.finish is not FinishReason.ERROR or "quarantined" in str(last.error), last
            wanted = serving.reference(request)
            if request.export is not None:
                wanted = wanted[:1]
            tokens = serving.tokens(request.id)
            assert tokens == wanted[: len(tokens)]
            if request.id not in doomed and last.error is None:
                assert tokens == wanted
