"""Prompts that are computed for another worker, as the engine of a prefill worker sees it."""

from __future__ import annotations

import pytest

from baton_api.errors import InternalError
from baton_engine.requests import Export, FinishReason
from tests.engine.fake_model import FakeModel
from tests.engine.serving import TIMEOUT_S, Recipient, Serving, prompt_of, request_of


@pytest.mark.parametrize(
    ("length", "progress"), [(1, [0, 1]), (16, [0, 16]), (17, [0, 16, 17]), (40, [0, 16, 32, 40])]
)
def test_export_announces_admission_and_each_computed_chunk(length: int, progress: list[int]) -> None:
    with Serving(chunk_tokens=16) as serving:
        recipient = Recipient()
        assert serving.run(request_of("a", length, export=recipient)) == [
            serving.model.greedy(prompt_of(length), 1)
        ]
        assert [tokens for tokens, _ in recipient.announced] == progress
        assert {len(blocks) for _, blocks in recipient.announced} == {-(-length // 4)}
        for tokens, blocks in recipient.announced:
            for position in range(tokens):
                entry = serving.cache.kv[blocks[position // 4], 0, 0, 0, position % 4]
                assert entry.tolist() == [prompt_of(length)[position], position]


def test_export_cached_prefix_is_announced_at_admission() -> None:
    with Serving(chunk_tokens=16) as serving:
        serving.run(request_of("before", 20))
        recipient = Recipient()
        serving.run(request_of("a", 20, export=recipient))
        assert [tokens for tokens, _ in recipient.announced] == [16, 20]
        assert serving.ended("a").cached_tokens == 16


def test_export_draws_one_token_for_any_max_tokens() -> None:
    with Serving() as serving:
        assert len(serving.run(request_of("a", 20, export=Recipient(), max_tokens=50))[0]) == 1
        assert serving.ended("a").finish is FinishReason.LENGTH


def test_export_blocks_are_unchanged_until_release() -> None:
    """Peers' defect 1: they were given away under a reader's eyes."""
    with Serving(blocks=13) as serving:
        recipient = Recipient()
        serving.run(request_of("a", 20, export=recipient))
        blocks = list(recipient.announced[-1][1])
        content = serving.cache.kv[blocks].clone()
        snapshot = serving.until(lambda now: now.held == 1)
        assert (snapshot.pinned_blocks, snapshot.owned_blocks) == (5, 5)
        for seed in range(1, 5):
            serving.run(request_of(f"{seed}", 20, seed=seed))
        assert serving.cache.kv[blocks].equal(content)
        serving.engine.release("a")
        serving.at_rest()


def test_export_blocks_are_cached_and_shared_by_the_next() -> None:
    with Serving() as serving:
        first, second = Recipient(), Recipient()
        serving.run(request_of("a", 20, export=first))
        serving.run(request_of("b", 20, export=second))
        assert first.announced[-1][1][:4] == second.announced[-1][1][:4]
        serving.engine.release("a")
        assert serving.until(lambda now: now.held == 1).pinned_blocks == 5
        serving.engine.release("b")
        serving.at_rest()


def test_export_with_full_cache_waits_for_a_release() -> None:
    with Serving(blocks=11) as serving:
        serving.run(request_of("a", 20, export=Recipient()), request_of("b", 20, seed=1, export=Recipient()))
        serving.submit(request_of("c", 20, seed=2, export=Recipient()))
        serving.until(lambda now: now.queued == 1 and now.held == 2)
        serving.engine.release("a")
        assert serving.tokens("c") == serving.model.greedy(prompt_of(20, 2), 1)
        serving.engine.abort("b")
        serving.engine.release("c")
        serving.at_rest()


def test_export_blocks_make_a_generating_request_wait() -> None:
    with Serving(blocks=11) as serving:
        serving.run(request_of("exported", 28, export=Recipient()))
        request = request_of("a", 10, seed=1, max_tokens=14)
        serving.submit(request)
        serving.wait(lambda: len(serving.so_far("a")) == 3)  # its third block is full
        serving.until(lambda now: now.running == 1 and now.available_blocks == 0)
        serving.engine.release("exported")
        assert serving.tokens("a") == serving.model.greedy(request.prompt, 14)
        serving.at_rest()


def test_export_is_never_retracted() -> None:
    with Serving(blocks=15, chunk_tokens=4) as serving:
        stream = request_of("stream", 8, seed=1, max_tokens=30)
        serving.submit(stream)
        serving.wait(lambda: len(serving.so_far("stream")) >= 2)
        recipient = Recipient()
        serving.submit(request_of("a", 36, export=recipient))
        serving.ended("a")
        assert len({blocks for _, blocks in recipient.announced}) == 1
        serving.engine.release("a")
        assert serving.tokens("stream") == serving.model.greedy(stream.prompt, 30)
        serving.at_rest()


@pytest.mark.parametrize("end", ["abort", "release"])
def test_abort_and_release_end_an_export_that_is_being_computed(end: str) -> None:
    with Serving(chunk_tokens=4) as serving:
        serving.model.go.clear()
        serving.submit(request_of("a", 40, export=Recipient()))
        assert serving.model.inside.wait(TIMEOUT_S)
        getattr(serving.engine, end)("a")
        serving.model.go.set()
        assert serving.ended("a").finish is FinishReason.ABORT
        serving.at_rest()


def test_export_failed_pass_holds_blocks_until_release() -> None:
    model = FakeModel()
    with Serving(model=model, chunk_tokens=8) as serving:
        prompt = (*(token % 90 for token in prompt_of(16)), 95)
        model.fail_on = 95
        serving.submit(request_of("a", prompt=prompt, export=Recipient()))
        assert isinstance(serving.ended("a").error, InternalError)
        assert serving.until(lambda now: now.held == 1).pinned_blocks == 5
        serving.engine.release("a")
        serving.at_rest()


def test_export_failed_announcement_ends_only_its_request() -> None:
    class Broken:
        def computed(self, request_id: str, tokens: int, blocks: object, written: object) -> None:
            raise ConnectionError("gone")

    broken: Export = Broken()
    with Serving() as serving:
        serving.model.go.clear()
        serving.submit(request_of("bad", 10, export=broken), request_of("good", 10))
        serving.model.go.set()
        assert isinstance(serving.ended("bad").error, InternalError)
        assert serving.tokens("good") == serving.model.greedy(prompt_of(10), 8)
        serving.engine.release("bad")
        serving.at_rest()


def test_releasing_what_is_not_there_does_nothing() -> None:
    with Serving() as serving:
        serving.engine.release("never seen")
        serving.run(request_of("a"))
        serving.engine.release("a")
        serving.at_rest()
