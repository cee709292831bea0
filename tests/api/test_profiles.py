"""The capacity of one worker, from lines through measurements."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from baton_api import profiles
from baton_api.errors import SetupError
from baton_api.profiles import Objectives, PrefillLine, Profile, StepLine, TransferLine

PREFILL = PrefillLine(base_s=0.005, token_s=1e-4, pair_s=1e-8)
STEP = StepLine(base_s=0.01, stream_s=5e-4, token_s=1e-7)
TRANSFER = TransferLine(start_s=0.001, token_s=1e-6)


USUAL = Objectives()


def profile(objectives: Objectives = USUAL, kv_tokens: int = 100_000) -> Profile:
    return Profile(
        model="tiny",
        machine="one core",
        baton="0",
        measured_at=0.0,
        prefill=PREFILL,
        step=STEP,
        transfer=TRANSFER,
        kv_tokens=kv_tokens,
        objectives=objectives,
        capacity=profiles.capacity(PREFILL, STEP, TRANSFER, kv_tokens, 64, objectives),
    )


@pytest.mark.parametrize(
    ("name", "objectives", "kv_tokens", "streams"),
    [
        ("as many as come in time", Objectives(itl_s=0.02), 1_000_000, 16),
        ("as many as there is room for", Objectives(itl_s=1.0), 12_800, 10),
        ("as many as the engine takes", Objectives(itl_s=1.0), 1_000_000, 64),
        ("a step alone takes longer", Objectives(itl_s=0.009), 1_000_000, 0),
        ("one prompt does not fit", Objectives(prompt_tokens=20_000), 12_800, 0),
    ],
)
def test_decode_streams_follow_the_objective(
    name: str, objectives: Objectives, kv_tokens: int, streams: int
) -> None:
    computed = profile(objectives, kv_tokens).capacity
    assert computed.decode_streams == streams
    assert (computed.decode_tokens_per_s > 0) == (streams > 0)


def test_late_prefill_worker_has_no_capacity() -> None:
    hopeless = profile(Objectives(ttft_s=0.05, prompt_tokens=4096)).capacity
    assert hopeless.prefill_tokens_per_s == 0 and hopeless.prefill_per_decode == 0


def test_laxer_objective_never_lowers_the_capacity() -> None:
    chance = random.Random(5)
    for _ in range(300):
        prompt = chance.randrange(16, 8000)
        strict = Objectives(
            ttft_s=chance.uniform(0.01, 2), itl_s=chance.uniform(0.005, 0.1), prompt_tokens=prompt
        )
        lax = msgspec.structs.replace(strict, ttft_s=strict.ttft_s * 1.5, itl_s=strict.itl_s * 1.5)
        less, more = profile(strict).capacity, profile(lax).capacity
        assert less.prefill_tokens_per_s <= more.prefill_tokens_per_s + 1e-6
        assert less.decode_streams <= more.decode_streams
        assert more.prefill_tokens_per_s <= prompt / PREFILL.seconds(prompt, prompt)


def test_ratio_keeps_both_roles_equally_busy() -> None:
    objectives = Objectives(ttft_s=2.0, itl_s=0.03, prompt_tokens=2000, output_tokens=100)
    computed = profile(objectives).capacity
    requests_of_one_decode = computed.decode_tokens_per_s / objectives.output_tokens
    requests_of_its_prefills = (
        computed.prefill_per_decode * computed.prefill_tokens_per_s / objectives.prompt_tokens
    )
    assert requests_of_its_prefills == pytest.approx(requests_of_one_decode)


def test_cached_tokens_are_not_computed() -> None:
    half = profile(Objectives(cached_share=0.5)).capacity
    assert half.prefill_per_decode < profile(Objectives()).capacity.prefill_per_decode
    assert Objectives(cached_share=1.0).uncached == 1


def test_waits_equal_a_simulated_queue() -> None:
    """A simulated queue that is as busy as `busy_share` says has about the share of late prompts it names."""
    chance = random.Random(1)
    for left in (0.05, 0.2, 0.5):
        share = profiles.busy_share(0.1, left)
        waits, wait = [], 0.0
        for _ in range(100_000):
            waits.append(wait)
            wait = max(0.0, wait + 0.1 - chance.expovariate(share / 0.1))
        late = sum(one > left for one in waits) / len(waits)
        assert 0.4 * profiles.LATE_SHARE < late < 1.6 * profiles.LATE_SHARE, (left, share, late)


def test_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profiles.write(profile(), path)
    assert profiles.read(path) == profile()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[]"])
def test_invalid_profile_is_refused_with_a_remedy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(SetupError, match="baton bench --find"):
        profiles.read(path)
    with pytest.raises(SetupError, match="Cannot read the profile"):
        profiles.read(tmp_path / "none.json")
