"""Names of blocks: the same everywhere, different for whatever decides the content."""

from __future__ import annotations

import pytest

from baton_api.hashing import HASH_BYTES, block_hashes, chain_hash, root_hash


def test_block_names_are_stable_across_releases() -> None:
    """Workers of two releases, and the router, must agree; a change here is a new protocol version."""
    assert root_hash().hex() == "5cb8c393df886e11f786ee02c6dcef59"
    assert chain_hash(root_hash(), range(16)).hex() == "7e5e32dbafdf55379f5fbaa651c1901d"


def test_partial_blocks_are_not_named() -> None:
    assert [len(block_hashes(range(count), 16, root_hash())) for count in (0, 1, 15, 16, 17, 32, 33)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_longer_prompt_begins_with_the_names_of_its_prefix() -> None:
    tokens = list(range(100))
    whole = block_hashes(tokens, 16, root_hash())
    for count in range(0, 100, 7):
        assert block_hashes(tokens[:count], 16, root_hash()) == whole[: count // 16]


def test_block_name_depends_on_all_tokens_before_it() -> None:
    one, two = list(range(64)), list(range(64))
    two[20] = 999
    first, second = (block_hashes(tokens, 16, root_hash()) for tokens in (one, two))
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_block_name_chains_from_its_parent() -> None:
    hashes = block_hashes(range(48), 16, root_hash())
    assert hashes[2] == chain_hash(hashes[1], range(32, 48))


ROOTS = [("", ""), ("tenant", ""), ("", "tenant"), ("tenan", "t"), ("t", "enant"), ("tenant", "adapter")]


def test_salt_and_adapter_change_all_names() -> None:
    roots = {root_hash(salt, adapter) for salt, adapter in ROOTS}
    assert len(roots) == len(ROOTS)
    assert all(len(root) == HASH_BYTES for root in roots)


def test_partial_block_differs_from_the_full_one() -> None:
    assert chain_hash(root_hash(), range(15)) != chain_hash(root_hash(), range(16))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_outside_32_bits_raises(token: int) -> None:
    with pytest.raises(OverflowError):
        chain_hash(root_hash(), [token])
