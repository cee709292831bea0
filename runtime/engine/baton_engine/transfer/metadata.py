"""
The metadata that a peer hands over, sealed against accidents on its way.

NIXL parses what it is given in C++ and has been seen to hang on mutated bytes. So they travel with a
version, a checksum, the settings that both ends of a wire must share, and the place they come from; nothing
that was cut, mixed up or made by another version reaches NIXL. This is no signature: the control
connection decides whom to trust.
"""

from __future__ import annotations

import xxhash

from baton_api.errors import IncompatiblePeer, TransferFailed

MAGIC = b"baton-nixl-1\n"
CHECKSUM_BYTES = 16
LIMIT = 1024 * 1024
"""Bytes. One agent has about 500, and some hundreds more for each device."""


def seal(metadata: bytes, wire: str, place: str) -> bytes:
    """`metadata` as it is sent."""
    body = f"{wire}\n{place}\n".encode() + metadata
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def unseal(sealed: bytes, wire: str) -> tuple[bytes, str]:
    """
    What was sealed, and its place.

    Raises TransferFailed if it is not whole, IncompatiblePeer for another `wire`.
    """
    if len(sealed) > LIMIT:
        raise TransferFailed(f"The peer's metadata of {len(sealed)} bytes is over the limit of {LIMIT}.")
    if not sealed.startswith(MAGIC):
        raise TransferFailed(
            "The peer's metadata is not of this version: start both workers with --transfer nixl."
        )
    begin = len(MAGIC) + CHECKSUM_BYTES
    body = sealed[begin:]
    parts = body.split(b"\n", 2)
    if xxhash.xxh3_128_digest(body) != sealed[len(MAGIC) : begin] or len(parts) < 3:
        raise TransferFailed("The peer's metadata was damaged on its way.")
    theirs, place, metadata = parts
    if theirs != wire.encode():
        raise IncompatiblePeer(
            f"The peer runs UCX with {theirs.decode(errors='replace')} and this worker with {wire}: "
            "set them alike on all workers, or nowhere."
        )
    return metadata, place.decode(errors="replace")
