"""Workers of one machine use each other's cores while these are idle, and only then."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.lending import SEAT_BYTES, Seat, compute_share, seats, take_seat
from baton_engine.model.native_decoder import NativeDecoder, native_decoder
from tests.engine.random_weights import random_weights, tiny_spec

CPU = torch.device("cpu")
WAIT_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The seats of two workers."""
    file = tmp_path / "seats"
    file.write_bytes(bytes(2 * SEAT_BYTES))
    return file


def test_seats_of_two_workers_share_memory() -> None:
    with seats(2) as settings:
        first, second = (take_seat(one, 1, 4) for one in settings)
    assert first is not None and second is not None
    assert (first.number, second.number, first.extra_threads) == (0, 1, 3)
    first.memory[5] = b"x"
    assert second.memory[5] == b"x"


def test_seat_of_a_single_worker_is_none() -> None:
    with seats(1) as settings:
        assert settings == ("",)
    assert take_seat("", 1, 4) is None


def test_seat_with_all_cores_is_none(place: Path) -> None:
    assert take_seat(f"{place}:0", 4, 4) is None


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("{}:2", "has the seats 0 to 1"),
        ("{}:x", "names no seat"),
        ("{}", "cannot be mapped"),
        ("{}.missing:0", "No such file"),
        ("/dev/null:0", "cannot be mapped"),
    ],
)
def test_setting_that_names_no_seat_is_refused(place: Path, where: str, reason: str) -> None:
    with pytest.raises(SetupError, match=reason) as refused:
        take_seat(where.format(place), 1, 4)
    assert "--shared-cores" in refused.value.message


class Neighbor:
    """The worker in seat 1. It says that it computes, whatever it does."""

    def __init__(self, memory: Seat) -> None:
        self._memory = memoryview(memory.memory).cast("B")

    def tell(self, *, computing: bool, at: int) -> None:
        self._memory[SEAT_BYTES : SEAT_BYTES + 24] = struct.pack("3q", 1, computing, at)


def others_seconds(model: NativeDecoder) -> tuple[float, float]:
    """Processor seconds of all other threads and of this one, while the model computes some prompts."""
    states = torch.ones((64, model.spec.hidden))
    began, mine = time.process_time(), time.thread_time()
    for _ in range(200):
        model.project(states)
    mine = time.thread_time() - mine
    return time.process_time() - began - mine, mine


def projecting(seat: Seat) -> NativeDecoder:
    spec = tiny_spec(vocab=4096)
    weights = random_weights(spec, torch.float32)
    model = native_decoder(spec, weights, torch.float32, os.environ, threads=1, seat=seat)
    if model is None:
        pytest.skip("the native kernels are unavailable: no C compiler is installed")
    return model


def test_kernels_use_the_cores_of_an_idle_neighbor_only(place: Path) -> None:
    seat = take_seat(f"{place}:0", 1, 2)
    assert seat is not None
    model, neighbor = projecting(seat), Neighbor(seat)
    until = time.monotonic() + WAIT_S
    neighbor.tell(computing=False, at=0)
    helped = mine = 0.0
    while helped < 0.1 * mine or not mine:
        assert time.monotonic() < until, f"other threads computed {helped} s beside {mine} s of this one"
        helped, mine = others_seconds(model)
    neighbor.tell(computing=True, at=time.monotonic_ns() + 10**12)  # it stays so, however slow the machine
    others_seconds(model)  # the last chunk of the spare thread
    helped, mine = others_seconds(model)
    assert helped < 0.05 * mine


def test_a_worker_rests_for_the_rest_of_its_share_beside_steps_of_others(place: Path) -> None:
    seat = take_seat(f"{place}:0", 1, 2, share=0.25)
    assert seat is not None
    model, neighbor = projecting(seat), Neighbor(seat)
    ended = threading.Event()

    def compute() -> None:
        while not ended.wait(0.001):  # time between two steps
            neighbor.tell(computing=True, at=time.monotonic_ns())
            time.sleep(0.02)
            neighbor.tell(computing=False, at=time.monotonic_ns())

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        began, mine = time.monotonic(), time.thread_time()
        states = torch.ones((64, model.spec.hidden))
        for _ in range(200):
            model.project(states)
        # A busy machine makes this share smaller, never larger.
        assert 0 < time.thread_time() - mine < 0.35 * (time.monotonic() - began)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("share", "workers", "of", "expected"),
    [
        pytest.param(0.5, 1, 2, 1.0, id="a pair that shares equally"),
        pytest.param(0.25, 1, 2, 0.5, id="the smaller half of a pair"),
        pytest.param(0.75, 1, 2, 1.0, id="the larger half gets more from the other's rests"),
        pytest.param(0.25, 3, 4, 1 / 3, id="three of four"),
        pytest.param(0.5, 1, 4, 1.0, id="one of four has a quarter at most by itself"),
    ],
)
def test_compute_share(share: float, workers: int, of: int, expected: float) -> None:
    assert compute_share(share, workers, of) == pytest.approx(expected)
