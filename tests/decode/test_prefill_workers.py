"""A decode worker with a prefill worker over real TCP: what comes over, and what happens when it does not."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton_api import tickets
from baton_api.messages import Pong
from baton_api.prompt_report import PromptReport
from baton_engine.api.choices import report_of
from baton_engine.requests import FinishReason, Request
from baton_engine.transfer.loopback import LoopbackTransfer
from tests.decode.pair import PACE, TIMEOUT_S, eventually, fake_side, open_pair, serve, tokens
from tests.engine.fake_model import FakeModel

PROMPT = list(range(30))
EXPECTED = FakeModel().greedy(PROMPT, 4)


async def test_prefill_workers_prompt_arrives_with_token_and_relay() -> None:
    async with open_pair() as pair:
        outputs = await pair.generate(PROMPT)
        assert tokens(outputs) == EXPECTED
        relay = outputs[0].relay
        assert relay is not None
        assert (relay.prefill_worker, relay.transport) == ("prefill", "loopback")
        assert (relay.prompt_tokens, relay.computed_tokens, relay.local_tokens) == (30, 30, 0)
        assert relay.queue_s >= 0
        assert relay.compute_s > 0
        assert (relay.blocks, relay.bytes) == (8, 8 * pair.decode.cache.block_bytes)
        assert pair.decode.now.totals.prompt_tokens_computed == 0
        assert pair.prefills.outcomes == {"whole": 1}


async def test_prefill_workers_move_only_missing_blocks() -> None:
    async with open_pair() as pair:
        await pair.generate(PROMPT)
        outputs = await pair.generate([*PROMPT[:17], 90, 91, 92, 93, 94])
        relay = outputs[0].relay
        assert relay is not None
        assert (relay.local_tokens, relay.blocks, outputs[0].cached_tokens) == (16, 2, 16)


async def test_many_prompts_share_one_connection() -> None:
    async with open_pair(fake_side("prefill", 400), fake_side("decode", 400)) as pair:
        prompts = [[n, *range(n % 23)] for n in range(24)]
        answers = await asyncio.gather(*(pair.generate(prompt) for prompt in prompts))
        for prompt, outputs in zip(prompts, answers, strict=True):
            assert tokens(outputs) == FakeModel().greedy(prompt, 4)
        assert len(pair.prefills._links) == 1


async def test_prefill_workers_load_comes_with_heartbeats() -> None:
    async with open_pair() as pair:
        await pair.generate(PROMPT)
        await eventually(lambda: pair.prefills.loads)
        (load,) = pair.prefills.loads.values()
        assert isinstance(load, Pong)
        assert (load.queued_tokens, load.draining) == (0, False)
        assert load.free_blocks == pair.prefill.now.available_blocks


async def test_with_nobody_at_the_address_the_prompt_is_computed_here() -> None:
    async with open_pair() as pair:
        await pair.server.close()
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"unreachable": 1}
        assert pair.decode.now.totals.local_prefills == {"unreachable": 1}


LONG_LABEL = f"{'a' * 64}.example:7000"
"""DNS carries labels of at most 63 characters; Python's codec raises UnicodeError for it."""


@pytest.mark.parametrize(
    "address", ["", "nonsense", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", ":80", LONG_LABEL]
)
async def test_prefill_workers_invalid_address_falls_back(address: str) -> None:
    async with open_pair() as pair:
        remote = pair.prefills.remote(address, "", "q")
        request = Request("q", tuple(PROMPT), pair.request(PROMPT).sampling, remote=remote)
        outputs = await pair.decode.generate(request)
        assert tokens(outputs) == EXPECTED
        assert pair.prefills.outcomes == {"unreachable": 1}
        assert outputs[0].fallback == "unreachable"
        report = report_of(len(PROMPT), outputs[0])
        assert report is not None and PromptReport.decode(report.encode()) is not None
        assert report.compute_s < TIMEOUT_S


async def test_prefills_unexpected_error_ends_only_its_request() -> None:
    """An unforeseen error is answered at once: the request does not wait for its deadline."""
    async with open_pair(answer_deadline_s=2 * TIMEOUT_S) as pair:
        pair.decode.faulty.refuse_next(KeyError("a defect"))
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"transfer_failed": 1}
        other = [*range(40, 70)]
        assert tokens(await pair.generate(other)) == FakeModel().greedy(other, 4)
        assert pair.prefills.outcomes == {"transfer_failed": 1, "whole": 1}
        await pair.quiet()


SECRET = b"secret"


async def test_prefills_ticket_lasts_while_request_waits_in_queue() -> None:
    """The router's ticket expires while the request waits for blocks; the prefill worker gets a new one."""
    now = 1000.0
    async with open_pair(secret=SECRET, wall_clock=lambda: now) as pair:
        ticket = tickets.issue(SECRET, "q", pair.server.address, now)
        remote = pair.prefills.remote(pair.server.address, ticket, "q")
        now += 10 * (tickets.LIFETIME_S + tickets.CLOCK_SKEW_S)
        request = Request("q", tuple(PROMPT), pair.request(PROMPT, remote=False).sampling, remote=remote)
        assert tokens(await pair.decode.generate(request)) == EXPECTED
        assert pair.prefills.outcomes == {"whole": 1}


async def test_prefill_workers_damaged_block_is_recomputed_locally() -> None:
    """Peers' defect 24: a flipped bit never becomes text; the blocks before it are kept."""
    async with open_pair() as pair:
        pair.decode.faulty.flip_bit_next(position=1)
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"checksum": 1}
        outputs = await pair.generate(PROMPT)
        assert tokens(outputs) == EXPECTED, "the damaged block is in no cache"


async def test_prefill_workers_failed_read_is_recomputed_locally() -> None:
    """Peers' defects 21 and 33: a remote disconnect costs a recomputation, never a wrong answer."""
    async with open_pair() as pair:
        pair.decode.faulty.fail_next(after=1)
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"transport": 1}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after its deadline"])
async def test_prefill_workers_next_prompt_after_a_failed_read_is_fetched(late: bool) -> None:
    """The access to a peer's memory is of no use after a failure, so the peer is connected again."""
    async with open_pair(transfer_deadline_s=0.5 if late else TIMEOUT_S) as pair:
        pair.decode.faulty.fail_next()
        if late:
            pair.decode.faulty.hold()
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        pair.decode.faulty.release()
        await eventually(lambda: not pair.prefills.unsettled)
        other = [*range(40, 70)]
        assert tokens(await pair.generate(other)) == FakeModel().greedy(other, 4)
        assert pair.prefills.outcomes == {"deadline" if late else "transport": 1, "whole": 1}


async def test_prefill_workers_hung_read_is_quarantined_until_settled() -> None:
    """Peers' defect 1: late bytes land in quarantine, not in another request's context."""
    async with open_pair(transfer_deadline_s=0.1, answer_deadline_s=2 * TIMEOUT_S) as pair:
        pair.decode.faulty.hold()
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"deadline": 1}
        assert pair.decode.now.quarantined_blocks > 0
        assert pair.prefills.unsettled == 1
        for start in range(40, 80, 10):  # pressure on the pool while the old read hangs
            prompt = list(range(start, start + 16))
            outputs = await pair.generate(prompt, remote=False)
            assert tokens(outputs) == FakeModel().greedy(prompt, 4)
        pair.decode.faulty.release()  # the late write comes now
        await eventually(lambda: pair.decode.now.quarantined_blocks == 0)
        assert tokens(await pair.generate(PROMPT, remote=False)) == EXPECTED


async def test_prefill_workers_late_prompt_is_computed_locally() -> None:
    prefill = fake_side("prefill")
    assert isinstance(prefill.model, FakeModel)
    async with open_pair(prefill, answer_deadline_s=0.2) as pair:
        prefill.model.go.clear()
        try:
            assert tokens(await pair.generate(PROMPT)) == EXPECTED
        finally:
            prefill.model.go.set()
        assert pair.prefills.outcomes == {"deadline": 1}


async def test_prefill_workers_abort_in_mid_read_keeps_written_blocks() -> None:
    """Peers' defects 5 and 35: abort while the read is under way, reuse the pool, let the read land."""
    async with open_pair(decode=fake_side("decode", 12)) as pair:
        pair.decode.faulty.hold()
        request = pair.request(PROMPT)
        async with aclosing(pair.decode.client.generate(request)):
            await asyncio.wait_for(pair.decode.faulty.held(1), TIMEOUT_S)
        await eventually(lambda: pair.decode.now.quarantined_blocks > 0)
        other = list(range(50, 58))
        assert tokens(await pair.generate(other, remote=False)) == FakeModel().greedy(other, 4)
        pair.decode.faulty.release()
        await pair.quiet()
        assert tokens(await pair.generate(other, remote=False)) == FakeModel().greedy(other, 4)


async def test_prefill_workers_restart_at_same_address_is_new() -> None:
    """Peers' defect 15: no state of the dead process is used for the new one."""
    async with open_pair() as pair:
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        port = int(pair.server.address.rpartition(":")[2])
        await pair.server.close()
        newcomer = fake_side("prefill")
        await newcomer.open()
        pair.server = serve(newcomer, port=port)
        await pair.server.start()
        try:
            other = [*range(60, 90)]
            outputs = await pair.generate(other)
            assert tokens(outputs) == FakeModel().greedy(other, 4)
            assert pair.prefills.outcomes == {"whole": 2}
            peers = {requested.peer for requested in pair.decode.faulty.requested}
            assert len(peers) == 2, "the newcomer is a peer of its own"
            inner = pair.decode.faulty.inner
            assert isinstance(inner, LoopbackTransfer)
            assert len(inner._peers) == 1, "the dead one is forgotten"
        finally:
            await pair.server.close()
            await newcomer.close()


async def test_prefill_workers_other_model_is_rejected_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_pair(decode=fake_side("decode", weights="other")) as pair:
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"refused": 1}
    assert "prefill serves fake and decode serves fake" in caplog.text
    assert "weights is w here and other there" in caplog.text
    assert pair.prefill.me.compatibility.digest in caplog.text
    assert pair.decode.me.compatibility.digest in caplog.text


async def test_prefill_workers_full_worker_falls_back() -> None:
    async with open_pair(sessions=0) as pair:
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"busy": 1}


async def test_prefill_workers_too_large_prompt_falls_back() -> None:
    async with open_pair(prefill=fake_side("prefill", 4)) as pair:
        assert tokens(await pair.generate(PROMPT)) == EXPECTED
        assert pair.prefills.outcomes == {"rejected": 1}


async def test_prefill_workers_first_token_obeys_stop_rules() -> None:
    """Peers' defect 30: the token of the prefill worker counts, and stop rules apply to it."""
    async with open_pair() as pair:
        outputs = await pair.generate(PROMPT, max_tokens=1)
        assert (tokens(outputs), outputs[-1].finish) == (EXPECTED[:1], FinishReason.LENGTH)
        outputs = await pair.generate(PROMPT[:-1], stop_ids=frozenset(FakeModel().greedy(PROMPT[:-1], 1)))
        assert len(tokens(outputs)) == 1
        assert outputs[-1].finish is FinishReason.STOP


async def test_prefill_workers_idle_connection_serves_a_later_burst() -> None:
    """Peers' defect 25: heartbeats keep an idle pair together for longer than the silence that ends it."""
    async with open_pair(pace=replace(PACE, silent_ticks=8)) as pair:
        await pair.generate(PROMPT)
        (link,) = pair.prefills._links.open
        pings = 0

        def enough() -> bool:
            nonlocal pings
            load = link.load
            pings = load.number if load is not None else 0
            return pings >= 20

        await eventually(enough, lambda: pings)
        answers = await asyncio.gather(*(pair.generate([n, *PROMPT]) for n in range(7)))
        assert all(len(tokens(outputs)) == 4 for outputs in answers)
        assert pair.prefills.outcomes == {"whole": 8}


ABORTS = 1000


async def test_prefill_workers_thousand_aborts_leak_nothing() -> None:
    """Peers' defects 6, 22 and 35: aborts at every moment leak no block and no session on either side."""
    chance = random.Random(3)
    async with open_pair(fake_side("prefill", 200), fake_side("decode", 200)) as pair:
        before = (pair.prefill.now.available_blocks, pair.decode.now.available_blocks)
        endings: dict[bool, int] = {True: 0, False: 0}

        async def one(number: int) -> None:
            request = pair.request([number % 97, *range(chance.randint(0, 40))], max_tokens=3)
            wait_s = chance.choice([0.0, 0.001, 0.003, 0.01, 0.02])
            whole = True
            try:
                async with asyncio.timeout(wait_s):
                    async for _ in pair.decode.client.generate(request):
                        pass
            except TimeoutError:
                whole = False
            endings[whole] += 1

        for start in range(0, ABORTS, 25):
            await asyncio.gather(*(one(number) for number in range(start, start + 25)))
        await pair.quiet()
        assert (pair.prefill.now.available_blocks, pair.decode.now.available_blocks) == before
        assert endings[False] > ABORTS / 4, "hardly any was aborted"


async def test_closing_answers_what_is_under_way() -> None:
    prefill = fake_side("prefill")
    assert isinstance(prefill.model, FakeModel)
    async with open_pair(prefill) as pair:
        prefill.model.go.clear()
        running = asyncio.ensure_future(pair.generate(PROMPT))
        await eventually(lambda: pair.server.sessions == 1)
        await pair.prefills.close()
        prefill.model.go.set()
        assert tokens(await running) == EXPECTED
        assert pair.prefills.outcomes == {"cancelled": 1}


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
