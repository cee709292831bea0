"""NIXL's start and its errors, the settings for UCX, and the integrity of metadata."""

from __future__ import annotations

import logging
import os
import random
import sys

import pytest

from baton_api.errors import IncompatiblePeer, SetupError, TransferFailed
from baton_engine.transfer import ucx
from baton_engine.transfer.integrity import seal, unseal
from baton_engine.transfer.kinds import create_transfer
from baton_engine.transfer.nixl_transfer import NixlTransfer
from tests.engine.transfer_links import Child, ucx_tls
from tests.engine.transfer_pools import pool


async def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as an import finds it where it is not installed
    with pytest.raises(SetupError, match=r"pip install .*\[nixl\]'.*--transfer loopback"):
        await create_transfer("nixl", pool(2), "worker")


@pytest.mark.nixl
async def test_ucx_that_cannot_start_names_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    with pytest.raises(SetupError, match=r"UCX_TLS=carrier_pigeon.*Check UCX_TLS"):
        await create_transfer("nixl", pool(2), "worker")


@pytest.mark.nixl
async def test_nixl_start_prints_nothing_and_keeps_the_environment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ), logging.raiseExceptions
    transfer = await create_transfer("nixl", pool(2), "worker")
    await transfer.close()
    assert (dict(os.environ), logging.raiseExceptions) == before
    assert capfd.readouterr().out == ""


@pytest.mark.nixl
async def test_nixl_starts_have_unique_names_and_metadata() -> None:
    first = await NixlTransfer.create(pool(2), "worker")
    second = await NixlTransfer.create(pool(2), "worker")
    assert first.metadata != second.metadata
    peer = await first.connect(second.metadata, second.pools, "epoch")
    assert peer.name.startswith("worker-") and len(peer.name) == len("worker-") + 32
    with pytest.raises(TransferFailed, match="an earlier start"):
        await first.connect(second.metadata, second.pools, "a later epoch")
    await first.close()
    await second.close()


@pytest.mark.nixl
def test_nixl_mutated_metadata_is_rejected_without_a_crash() -> None:
    # In a process of its own, as what is fed here is C++; it has been seen to hang on one mutant in forty.
    with ucx_tls("shm"), Child("fuzz", 7, 12) as child:
        assert {child.hear() for _ in range(12)} <= {"refused", "taken"}


def test_ucx_defaults_apply_unless_the_user_sets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ucx.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_LOG_FILE", "ucx.log")
    with ucx.environment():
        assert os.environ["UCX_LOG_FILE"] == "ucx.log"
        assert os.environ["UCX_TCP_TX_SEG_SIZE"] == ucx.SEGMENTS["UCX_TCP_TX_SEG_SIZE"]
    assert os.environ["UCX_LOG_FILE"] == "ucx.log"
    assert "UCX_TCP_TX_SEG_SIZE" not in os.environ


def test_ucx_host_id_is_shared_unless_copying_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx.host_id() == ucx.host_id() != ""
    for tls, copies in {"all": 1, "tcp,sm": 1, "^tcp": 1, "tcp": 0, "rc,tcp": 0}.items():
        monkeypatch.setenv("UCX_TLS", tls)
        assert bool(ucx.host_id()) == bool(copies), tls


def test_ucx_transport_name_is_never_too_specific() -> None:
    assert ucx.transport(False, copied=True, rdma=True) == "nixl/ucx shm"
    assert ucx.transport(False, copied=False, rdma=False) == "nixl/ucx tcp"
    assert ucx.transport(False, copied=False, rdma=True) == "nixl/ucx network"
    assert ucx.transport(True, copied=True, rdma=False) == "nixl/ucx"


def test_sealed_metadata_come_back_with_their_host_id() -> None:
    for metadata in (b"", b"x", b"two\nlines\n", bytes(range(256))):
        assert unseal(seal(metadata, "wire", "here"), "wire") == (metadata, "here")


def test_unseal_any_mutation_is_rejected() -> None:
    chance = random.Random(3)
    sealed = seal(chance.randbytes(200), "wire", "here")
    for position in range(len(sealed)):
        mutant = bytearray(sealed)
        mutant[position] ^= 1 << chance.randrange(8)
        with pytest.raises(TransferFailed):
            unseal(bytes(mutant), "wire")
        with pytest.raises(TransferFailed):
            unseal(sealed[:position], "wire")


def test_unseal_different_segment_sizes_are_rejected() -> None:
    with pytest.raises(IncompatiblePeer, match="Set the same values"):
        unseal(seal(b"metadata", "UCX_TCP_TX_SEG_SIZE=8k", "here"), "UCX_TCP_TX_SEG_SIZE=1m")
