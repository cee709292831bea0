"""
A prefill worker in a process of its own, for tests that need a second one: NIXL between two processes.

    python -m tests.decode.worker_process FOLDER CHUNK_TOKENS DEVICE

It prints its control address and the name of what computes on one line, and serves until its standard input
ends. It reads the caches of decode workers that name themselves as the source of a prompt.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from baton_engine.model.decoder import Decoder
from baton_engine.tiers.peers import PeerCaches
from baton_engine.transfer.kinds import create_transfer
from tests.decode.pair import PACE, Side, serve, slow_clock
from tests.decode.real_model import real_side


async def main(folder: Path, chunk_tokens: int, device: torch.device) -> None:
    side: Side = real_side("prefill", folder, chunk_tokens, device=device, clock=slow_clock())
    side.transfer = await create_transfer("nixl", side.cache, side.name)
    await side.open()
    peers = PeerCaches(side.client.engine, side.transfer, side.me, pace=PACE)
    server = serve(side, peer_caches=peers)
    await server.start()
    computing = side.model.ops if isinstance(side.model, Decoder) else side.model
    print(server.address, type(computing).__name__, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await peers.close()
    await side.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3])))
