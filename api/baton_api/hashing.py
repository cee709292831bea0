"""
Hashes of KV blocks, which every worker and the router compute alike.

The hash of a block covers its tokens and, through its parent, all tokens before it. Equal hashes mean equal
prefixes, so a lookup needs no tree. The root hash covers the tenant's salt and the adapter, which also
determine the content of the cache. Hashes are SHA-256 truncated to 16 bytes, so no client can craft a prompt
that collides with another tenant's.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import sys
from collections.abc import Sequence

HASH_BYTES = 16


def root_hash(salt: str = "", adapter: str = "") -> bytes:
    """Return the parent hash of a request's first block."""
    fields = b"".join(len(field.encode()).to_bytes(4) + field.encode() for field in (salt, adapter))
    return hashlib.sha256(b"baton-block-root" + fields).digest()[:HASH_BYTES]


def client_salt(salt: str, cache_salt: str) -> str:
    """
    Return the salt of a request with a `cache_salt`, within the cache of `salt`.

    It is an HMAC with the tenant's salt, which clients do not know. So clients partition only their own
    cache. Without tenants `salt` is empty, and clients with the same `cache_salt` share a cache.
    """
    if not cache_salt:
        return salt
    text = b"baton-client-salt|" + cache_salt.encode(errors="surrogatepass")
    return hmac.new(salt.encode(), text, hashlib.sha256).hexdigest()[:32]


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of one block, full or not, whose predecessor's hash is `parent`."""
    words = array.array("I", tokens)  # 4 bytes wide on every platform that CPython supports
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(parent + words.tobytes()).digest()[:HASH_BYTES]


def block_hashes(tokens: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """
    One hash for each full block of `tokens`, in order.

    >>> len(block_hashes(range(33), 16, root_hash()))
    2
    """
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes
