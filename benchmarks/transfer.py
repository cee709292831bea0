"""
How fast blocks move: GB/s by means, block size and order, and what a checksum costs.

    python -m benchmarks.transfer [--megabytes 64] [--repeats 7] [--busy 0]

Two processes on this machine, one pull of all blocks of the pool, both ends' memory touched before. The
result is the median of the repeats, with the least and the most. `contiguous` reads blocks 0, 1, 2 ... over
0, 1, 2 ...; `scattered` reads them in chance order. A plain copy within one process (`loopback`) is what
the machine's memory allows. `--busy` Python threads compete with the reader for the GIL, as in a worker that
generates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from baton_engine.kv.cache import KVCache
from baton_engine.spec import ModelSpec
from baton_engine.transfer import Transfer
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.kinds import create_transfer
from baton_engine.transfer.loopback import LoopbackTransfer

BLOCK_BYTES = (4 * 1024, 32 * 1024, 256 * 1024, 2 * 1024 * 1024)


def pool(block_bytes: int, megabytes: int) -> KVCache:
    """Blocks of just that size; every page of it touched."""
    layers = block_bytes // 4096
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=32,
        hidden=64,
        layers=layers,
        heads=1,
        kv_heads=1,
        head_dim=64,
        intermediate=64,
        context=1024,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
    )
    cache = KVCache(spec, megabytes * 2**20 // block_bytes, torch.bfloat16, torch.device("cpu"))
    cache.kv.fill_(1.0)
    return cache


def source(parent: Connection, tls: str, block_bytes: int, megabytes: int) -> None:
    """Run the process that is read from, until it receives the end message."""
    if tls:
        os.environ["UCX_TLS"] = tls

    async def serve() -> None:
        transfer = await create_transfer("nixl", pool(block_bytes, megabytes), "source")
        parent.send((transfer.metadata, transfer.pools))
        with transfer.serve():
            await asyncio.to_thread(parent.recv)
        await transfer.close()

    asyncio.run(serve())


async def rates(
    transfer: Transfer, cache: KVCache, remote: Transfer | Connection, repeats: int
) -> list[tuple[str, str, list[float]]]:
    """(transport, order, GB/s of each repeat) of both orders."""
    metadata, theirs = remote.recv() if isinstance(remote, Connection) else (remote.metadata, remote.pools)
    peer = await transfer.connect(metadata, theirs, "epoch")
    numbers = list(range(cache.blocks))
    orders: dict[str, Sequence[int]] = {
        "contiguous": numbers,
        "scattered": random.Random(1).sample(numbers, len(numbers)),
    }
    measured = []
    for order, blocks in orders.items():
        pulls = [await transfer.pull(peer, blocks, numbers).settled() for _ in range(repeats + 2)]
        measured.append(
            (pulls[-1].transport, order, [pulled.bytes / pulled.seconds / 1e9 for pulled in pulls[2:]])
        )
    await transfer.disconnect(peer)
    return measured


async def nixl(
    tls: str, block_bytes: int, megabytes: int, repeats: int
) -> list[tuple[str, str, list[float]]]:
    if tls:
        os.environ["UCX_TLS"] = tls
    cache = pool(block_bytes, megabytes)
    transfer = await create_transfer("nixl", cache, "reader")
    processes = get_context("spawn")
    here, remote_end = processes.Pipe()
    process = processes.Process(target=source, args=(remote_end, tls, block_bytes, megabytes), daemon=True)
    process.start()
    try:
        return await rates(transfer, cache, here, repeats)
    finally:
        os.environ.pop("UCX_TLS", None)
        here.send("end")
        process.join()
        await transfer.close()


async def loopback(block_bytes: int, megabytes: int, repeats: int) -> list[tuple[str, str, list[float]]]:
    cache = pool(block_bytes, megabytes)
    theirs = LoopbackTransfer(pool(block_bytes, megabytes), "source")
    transfer = LoopbackTransfer(cache, "reader")
    measured = await rates(transfer, cache, theirs, repeats)
    await transfer.close()
    await theirs.close()
    return measured


def checksum_rates(block_bytes: int, megabytes: int, repeats: int) -> list[float]:
    cache = pool(block_bytes, megabytes)
    measured = []
    for _ in range(repeats):
        begin = time.perf_counter()
        block_checksums(cache, range(cache.blocks))
        measured.append(cache.blocks * block_bytes / (time.perf_counter() - begin) / 1e9)
    return measured


def compute() -> None:
    """Hold the GIL as far as Python allows."""
    while True:
        sum(range(1000))


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def shown(block_bytes: int, means: str, order: str, measured: list[float]) -> None:
    row(
        f"{block_bytes // 1024} KiB",
        means,
        order,
        f"{statistics.median(measured):.2f}",
        f"{min(measured):.2f} to {max(measured):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of one pull")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--busy", type=int, default=0, help="Python threads that compute meanwhile")
    options = parser.parse_args()
    for _ in range(options.busy):
        threading.Thread(target=compute, daemon=True).start()
    torch.set_num_threads(1)
    row("block", "means", "order", "GB/s", "least to most")
    row("---", "---", "---", "---", "---")
    for block_bytes in BLOCK_BYTES:
        size = (block_bytes, options.megabytes, options.repeats)
        for measured in (
            asyncio.run(loopback(*size)),
            asyncio.run(nixl("", *size)),
            asyncio.run(nixl("tcp", *size)),
        ):
            for means, order, speeds in measured:
                shown(block_bytes, means, order, speeds)
        shown(block_bytes, "checksum", "contiguous", checksum_rates(*size))


if __name__ == "__main__":
    main()
