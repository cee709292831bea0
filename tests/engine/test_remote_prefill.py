"""Prompts whose KV is brought from elsewhere, as the engine of a decode worker sees it."""

from __future__ import annotations

import pytest

from baton_api.errors import NotReady
from baton_api.hashing import block_hashes
from baton_engine.requests import Fetch, FinishReason, RelayRecord, RemotePrefill
from tests.engine.serving import Prefiller, Serving, prompt_of, request_of

RELAY = RelayRecord(
    prefill_worker="prefill-0",
    prompt_tokens=20,
    computed_tokens=20,
    local_tokens=0,
    blocks=5,
    bytes=160,
    transport="loopback",
    transfer_s=0.1,
    queue_s=0.0,
    compute_s=0.2,
)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_remote_prefill_gives_the_tokens_of_a_local_one(length: int, temperature: float) -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        request = request_of("a", length, remote=peer, temperature=temperature, seed=0)
        serving.submit(request)
        fetch = peer.fetch()
        assert len(fetch.blocks) == -(-length // 4)
        assert fetch.tokens == request.prompt
        peer.succeed(fetch)
        assert serving.tokens("a") == serving.reference(request)
        assert serving.at_rest().totals.prompt_tokens_computed == 0


@pytest.mark.parametrize("cached", range(21))
def test_remote_prefill_fetches_only_uncached_blocks(cached: int) -> None:
    """Peers' defect 7: prefix hits of every length; defect 28: slots after a prefix hit."""
    with Serving(local_prefill_tokens=0) as serving:
        prompt = prompt_of(20)
        if cached:
            serving.run(request_of("before", prompt=prompt[:cached], max_tokens=1))
        peer = Prefiller(serving)
        request = request_of("a", prompt=prompt, remote=peer)
        serving.submit(request)
        fetch = peer.fetch()
        assert fetch.start_block == min(cached, 19) // 4
        assert len(fetch.blocks) == 5 - fetch.start_block
        peer.succeed(fetch, cached=fetch.start_block * 4)
        assert serving.tokens("a") == serving.reference(request)
        assert serving.outputs["a"][0].cached_tokens == fetch.start_block * 4
        serving.at_rest()


def test_remote_prefill_parent_hash_names_the_cached_prefix() -> None:
    from baton_api.hashing import block_hashes, root_hash

    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        prompt = prompt_of(20)
        hashes = block_hashes(prompt, 4, root_hash("salt"))
        for name, start, parent in (("a", 0, root_hash("salt")), ("b", 4, hashes[3])):
            serving.submit(request_of(name, prompt=prompt, remote=peer, salt="salt"))
            fetch = peer.fetch()
            assert (fetch.start_block, fetch.parent, fetch.salt) == (start, parent, "salt")
            peer.succeed(fetch)
            serving.ended(name)


def test_fetched_blocks_are_in_the_prefix_cache() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 17, remote=peer))
        peer.succeed(peer.fetch())
        serving.ended("a")
        serving.run(request_of("b", 17))
        assert serving.outputs["b"][0].cached_tokens == 16


def test_remote_prefill_publishes_only_after_the_fetch() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 17, remote=peer))
        fetch = peer.fetch()
        assert serving.run(request_of("b", 17)) == [serving.model.greedy(prompt_of(17), 8)]
        assert serving.outputs["b"][0].cached_tokens == 0
        peer.succeed(fetch)
        serving.ended("a")
        serving.at_rest()


def test_short_and_cached_prompts_are_computed_here_and_counted() -> None:
    with Serving(local_prefill_tokens=8) as serving:
        peer = Prefiller(serving)
        serving.run(request_of("short", 8, remote=peer))
        serving.run(request_of("first", 30, seed=1))
        serving.run(request_of("cached", 30, seed=1, remote=peer))
        assert peer.fetches.empty()
        assert serving.at_rest().totals.local_prefills == {"short": 1, "cached": 1, "no_prefill_worker": 1}


def test_remote_prefill_relay_comes_only_with_the_first_token() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        peer.succeed(peer.fetch(), relay=RELAY)
        serving.ended("a")
        assert [output.relay for output in serving.outputs["a"]] == [RELAY, *[None] * 7]


def test_max_tokens_of_1_ends_with_the_fetched_token() -> None:
    """Peers' defect 30: `max_tokens=1` gave two tokens."""
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer, max_tokens=1))
        peer.succeed(peer.fetch())
        assert len(serving.tokens("a")) == 1
        assert serving.ended("a").finish is FinishReason.LENGTH
        assert serving.model.passes == 0
        serving.at_rest()


def test_remote_prefill_fetched_stop_id_ends_the_request() -> None:
    """Peers' defect 30: the first token ignored stop criteria."""
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        stop = serving.model.greedy(prompt_of(20), 1)[0]
        serving.submit(request_of("a", 20, remote=peer, stop_ids=frozenset([stop])))
        peer.succeed(peer.fetch())
        assert serving.tokens("a") == [stop]
        assert serving.ended("a").stop_id == stop


def test_remote_prefill_fetched_token_counts_for_penalties() -> None:
    """Peers' defect 29: what one worker counts, a pair counts too."""
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        request = request_of(
            "a", 20, remote=peer, frequency_penalty=2.0, repetition_penalty=1.5, max_tokens=30
        )
        serving.submit(request)
        peer.succeed(peer.fetch())
        assert serving.tokens("a") == serving.reference(request)
        assert serving.at_rest().totals.generated_tokens == 30


@pytest.mark.parametrize("arrived", range(6))
def test_after_a_failed_fetch_the_rest_is_computed_here(arrived: int) -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        request = request_of("a", 20, remote=peer)
        serving.submit(request)
        peer.fail(peer.fetch(), arrived)
        assert serving.tokens("a") == serving.model.greedy(request.prompt, 8)
        totals = serving.at_rest().totals
        assert totals.prompt_tokens_computed == 20 - min(arrived, 4) * 4
        assert totals.local_prefills == {"peer_lost": 1}
        assert serving.outputs["a"][0].cached_tokens == 0
        assert peer.fetches.empty()


def test_remote_prefill_free_text_reason_is_transfer_failed() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        peer.fail(peer.fetch(), reason="the worker at 127.0.0.1:1 was lost")
        serving.ended("a")
        assert serving.at_rest().totals.local_prefills == {"transfer_failed": 1}


def test_remote_prefill_unstarted_fetch_is_computed_locally() -> None:
    class Broken:
        def start(self, fetch: Fetch, unused: object) -> None:
            raise OSError("no route")

        def cancel(self, request_id: str) -> None: ...

    broken: RemotePrefill = Broken()
    with Serving(local_prefill_tokens=0) as serving:
        assert serving.run(request_of("a", 20, remote=broken)) == [serving.model.greedy(prompt_of(20), 8)]
        serving.at_rest()


def test_unsafe_blocks_are_quarantined_until_they_are_settled() -> None:
    """Peers' defects 3 and 5: a block that a card may still fill is not reused."""
    with Serving(blocks=17, local_prefill_tokens=0, quarantine_limit=1.0) as serving:
        peer = Prefiller(serving)
        request = request_of("a", 20, remote=peer)
        serving.submit(request)
        fetch = peer.fetch()
        unsafe = fetch.blocks[2:4]
        peer.fail(fetch, arrived=2, unsafe=unsafe)
        assert serving.tokens("a") == serving.model.greedy(request.prompt, 8)
        assert serving.until(lambda now: not now.running).quarantined_blocks == 2
        # The peer keeps writing; requests that come meanwhile must not notice.
        for block in unsafe:
            serving.cache.kv[block] = -1.0
        others = [request_of(f"{seed}", 20, seed=seed) for seed in range(1, 6)]
        for request, tokens in zip(others, serving.run(*others), strict=True):
            assert tokens == serving.model.greedy(request.prompt, 8)
        serving.engine.settled(unsafe)
        serving.at_rest()


def test_remote_prefill_unsafe_block_does_not_count_as_arrived() -> None:
    with Serving(local_prefill_tokens=0, quarantine_limit=1.0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        fetch = peer.fetch()
        peer.fail(fetch, arrived=4, unsafe=fetch.blocks[1:2])
        assert serving.tokens("a") == serving.model.greedy(prompt_of(20), 8)
        assert serving.engine.snapshot().totals.prompt_tokens_computed == 16
        serving.engine.settled(fetch.blocks[1:2])
        serving.at_rest()


def test_quarantine_over_its_limit_is_fatal() -> None:
    with Serving(blocks=21, local_prefill_tokens=0, quarantine_limit=0.2) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        fetch = peer.fetch()
        peer.fail(fetch, unsafe=fetch.blocks)
        serving.ended("a")
        assert len(serving.fatal) == 1
        assert "5 of 20 KV blocks are quarantined, more than 4" in serving.fatal[0]


def test_quarantine_that_blocks_a_request_ends_it_with_an_error() -> None:
    """Peers' defect 17: nothing could ever make room, and the engine waited for ever."""
    with Serving(blocks=9, local_prefill_tokens=0, quarantine_limit=1.0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 32, remote=peer, max_tokens=1))
        fetch = peer.fetch()
        peer.fail(fetch, unsafe=fetch.blocks[:4])
        error = serving.ended("a").error
        assert "needs 8 KV blocks, but 4 of 8 are quarantined" in str(error)
        serving.run(request_of("small", 8, max_tokens=2))
        serving.engine.settled(fetch.blocks[:4])
        serving.at_rest()


def test_abort_while_fetching_keeps_blocks_until_the_fetch_ends() -> None:
    """Peers' defect 5: the blocks were freed while a read was under way."""
    with Serving(blocks=11, local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        fetch = peer.fetch()
        serving.engine.abort("a")
        assert serving.ended("a").finish is FinishReason.ABORT
        assert peer.cancelled.get(timeout=10) == "a"
        serving.engine.abort("a")
        # Others fill the cache meanwhile, and the peer writes late.
        others = [request_of(f"{seed}", 12, seed=seed) for seed in range(1, 4)]
        serving.submit(*others)
        assert serving.engine.snapshot().pinned_blocks == 5
        peer.write(fetch)
        for request in others:
            assert serving.tokens(request.id) == serving.model.greedy(request.prompt, 8)
        peer.fail(fetch, arrived=3)
        serving.at_rest()
        assert peer.cancelled.empty()


def test_abort_while_fetching_caches_arrived_blocks() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        fetch = peer.fetch()
        serving.engine.abort("a")
        peer.succeed(fetch)
        serving.at_rest()
        serving.run(request_of("b", 20))
        assert serving.outputs["b"][0].cached_tokens == 16
        assert serving.so_far("a") == []


def test_remote_prefill_second_end_of_a_fetch_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with Serving(local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        serving.submit(request_of("a", 20, remote=peer))
        fetch = peer.fetch()
        peer.succeed(fetch)
        peer.succeed(fetch)
        assert serving.tokens("a") == serving.model.greedy(prompt_of(20), 8)
        serving.run(request_of("b"))  # it was asked for later, so the second end has been seen
        assert "Unexpected fetch result" in caplog.text
        serving.at_rest()


def test_loaded_requests_without_room_for_a_token_do_not_spin() -> None:
    """Peers' defect 17: prompts fill the cache to the last block; they still finish, without empty passes."""
    with Serving(blocks=11, local_prefill_tokens=0, max_running=8) as serving:
        peer = Prefiller(serving)
        requests = [request_of(f"{seed}", 16, seed=seed, remote=peer) for seed in range(4)]
        serving.submit(*requests)
        for _ in requests:
            peer.succeed(peer.fetch())
        for request in requests:
            assert serving.tokens(request.id) == serving.model.greedy(request.prompt, 8)
        assert serving.at_rest().totals.steps == serving.model.passes < 60


def test_remote_prefill_retracted_request_resumes_unchanged() -> None:
    """Peers' defects 16 and 26: it lost its state, or was stuck as succeeded."""
    with Serving(blocks=13, local_prefill_tokens=0) as serving:
        peer = Prefiller(serving)
        requests = [
            request_of(f"{seed}", 10, seed=seed, remote=peer, max_tokens=25, temperature=0.8)
            for seed in range(4)
        ]
        serving.submit(*requests)
        for _ in requests:
            peer.succeed(peer.fetch(), cached=4)
        for request in requests:
            assert serving.tokens(request.id) == serving.reference(request)
            # Peers' defect 29: what a retraction computes again is not counted as cached.
            outputs = serving.outputs[request.id]
            assert (outputs[0].cached_tokens, outputs[-1].cached_tokens) == (4, 4)
        totals = serving.at_rest().totals
        assert totals.retractions > 0
        assert totals.generated_tokens == 100
        assert totals.prompt_tokens_remote == 40


def test_engine_stop_cancels_its_fetches() -> None:
    serving = Serving(local_prefill_tokens=0)
    peer = Prefiller(serving)
    with serving:
        serving.submit(request_of("a", 20, remote=peer))
        peer.fetch()
    assert peer.cancelled.get(timeout=10) == "a"
    assert serving.ended("a").finish is FinishReason.ABORT


def test_engine_lends_what_is_cached_until_it_is_taken_back() -> None:
    with Serving() as serving:
        request = request_of("a", 20)
        assert serving.run(request) == [serving.reference(request)]
        hashes = tuple(block_hashes(request.prompt, 4, request.root))
        lent = serving.engine.lend("peer", hashes).result(timeout=10)
        assert len(lent.blocks) == 5
        assert serving.engine.lend("stranger", (b"unknown", *hashes)).result(timeout=10).blocks == ()
        serving.engine.clear_cache()
        assert serving.engine.lend("other", hashes).result(timeout=10).blocks == lent.blocks
        for name in ("peer", "stranger", "other"):
            serving.engine.take_back(name)
        serving.until(lambda now: now.owned_blocks == now.pinned_blocks == 0)
    with pytest.raises(NotReady):
        serving.engine.lend("late", hashes).result(timeout=10)
