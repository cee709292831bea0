"""
LoRA adapters in the engine: what they cost in a batch, and whether loading and unloading leaks.

    python -m benchmarks.lora MODEL [--ranks 8,16,64] [--quantize off]    cost of a forward pass
    python -m benchmarks.lora MODEL --churn 1000                          loads and unloads under load

The cost is the time of a pass with adapters beside that of one without, in turn. All seven projections of all
layers are adapted. The churn runs `baton serve` with streams of requests to the model and to adapters, and
prints the server's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import torch
from safetensors.torch import save_file

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import load_spec, load_weights
from baton_engine.model.decoder import Model, create_model
from baton_engine.model.lora import CONFIG, PREFIX, WEIGHTS, projection_shapes, read_lora
from baton_engine.model.resolve import resolve
from baton_engine.spec import ModelSpec, Quantize

CPU = torch.device("cpu")
DEPTH = 96
ROUNDS = 40
PROMPT = 512
STREAMS = 4
PORT = 8653


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """An adapter of all projections with random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (_, _, inputs, outputs) in projection_shapes(spec).items():
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = 0.02 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def batch_of(rows: int, tokens: int, adapters: list[Any]) -> Batch:
    """Rows of the same shape, with the adapters in turn."""
    width = -(-(DEPTH + tokens) // BLOCK_SIZE)
    return Batch(
        [
            BatchRow(
                [300 + row + i for i in range(tokens)],
                DEPTH if tokens == 1 else 0,
                [1 + row * width + block for block in range(width)],
                1,
                adapter=adapters[row % len(adapters)],
            )
            for row in range(rows)
        ],
        BLOCK_SIZE,
        CPU,
    )


def medians(model: Model, cache: KVCache, batches: list[Batch]) -> list[float]:
    """Median milliseconds of a pass of each batch, run in turn."""
    times: list[list[float]] = [[] for _ in batches]
    for number in range(ROUNDS + 3):
        for batch, taken in zip(batches, times, strict=True):
            began = time.perf_counter()
            model.forward(batch, cache)
            if number >= 3:
                taken.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(taken) for taken in times]


def cost(name: str, ranks: list[int], quantize: Quantize) -> None:
    checkpoint = resolve(name)
    spec, dtype = load_spec(checkpoint), torch.bfloat16
    model = create_model(spec, load_weights(checkpoint, spec, dtype, quantize=quantize), CPU, dtype)
    cache = KVCache(spec, 1 + 32 * (DEPTH + PROMPT) // BLOCK_SIZE, dtype, CPU)
    print(f"{name}, {type(model).__name__}, {torch.get_num_threads()} threads; milliseconds of a pass")
    print(f"{'rank':>5} {'batch':>16} {'none':>8} {'1 adapter':>16} {'8 adapters':>16}")
    with tempfile.TemporaryDirectory() as folder:
        for rank in ranks:
            folders = [write_adapter(Path(folder, f"{rank}-{n}"), spec, rank, n) for n in range(8)]
            adapters = [model.prepare_adapter(read_lora(one, spec, rank)) for one in folders]
            for rows, tokens in ((1, 1), (8, 1), (32, 1), (1, PROMPT)):
                kinds = ([None], adapters[:1], adapters)
                base, one, many = medians(model, cache, [batch_of(rows, tokens, kind) for kind in kinds])
                label = f"{rows} rows" if tokens == 1 else f"{tokens} tokens"
                shown = [f"{value:8.2f} ({value / base:.2f}x)" for value in (one, many)]
                print(f"{rank:5} {label:>16} {base:8.2f} {shown[0]:>16} {shown[1]:>16}", flush=True)


def resident(pid: int) -> float:
    """Resident memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def stream(
    client: httpx.AsyncClient, names: list[str], counts: dict[int, int], done: asyncio.Event
) -> None:
    """Requests to whatever is loaded, until `done`. 404 is right for an adapter that is gone."""
    number = 0
    while not done.is_set():
        number += 1
        body = {"model": names[number % len(names)], "prompt": f"Story {number}:", "max_tokens": 12}
        status = (await client.post("/v1/completions", json=body, timeout=120)).status_code
        counts[status] = counts.get(status, 0) + 1


async def churn(name: str, cycles: int) -> None:
    spec = load_spec(resolve(name))
    command = [sys.executable, "-m", "baton_cli.main", "serve", name, f"--port={PORT}", "--enable-lora"]
    command.append("--kv-cache-memory=64MiB")  # it is full soon: memory that grows afterward is a leak
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write_adapter(Path(folder, str(number)), spec, 4 + 4 * number, number) for number in range(3)
        ]
        quiet = asyncio.subprocess.DEVNULL
        server = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", trust_env=False) as client:
                await churned(client, server.pid, paths, cycles)
        finally:
            server.terminate()
            await server.wait()


async def churned(client: httpx.AsyncClient, pid: int, paths: list[Path], cycles: int) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get("/ready")).status_code == 200:
                break
        await asyncio.sleep(0.2)
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    counts: dict[int, int] = {}
    done = asyncio.Event()
    names = [model, *(f"a{number}" for number in range(3))]
    load = [asyncio.create_task(stream(client, names, counts, done)) for _ in range(STREAMS)]
    began = time.perf_counter()
    for cycle in range(cycles):
        body = {"lora_name": f"a{cycle % 3}", "lora_path": str(paths[cycle % 3])}
        (await client.post("/v1/load_lora_adapter", json=body, timeout=120)).raise_for_status()
        if cycle >= 2:
            gone = {"lora_name": f"a{(cycle - 2) % 3}"}
            (await client.post("/v1/unload_lora_adapter", json=gone, timeout=120)).raise_for_status()
        if cycle % (cycles // 10) == 0:
            print(
                f"{cycle:6} loads: {resident(pid):8.1f} MiB, answers {dict(sorted(counts.items()))}",
                flush=True,
            )
    for cycle in range(cycles - 2, cycles):
        await client.post("/v1/unload_lora_adapter", json={"lora_name": f"a{cycle % 3}"})
    done.set()
    await asyncio.gather(*load)
    listed = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
    took = time.perf_counter() - began
    print(f"{cycles:6} loads: {resident(pid):8.1f} MiB, answers {dict(sorted(counts.items()))}")
    print(f"{1e3 * took / cycles:.1f} ms for a load and an unload under load; listed at the end: {listed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ranks", default="8,16,64")
    parser.add_argument("--quantize", choices=get_args(Quantize), default="keep")
    parser.add_argument("--churn", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.churn:
        asyncio.run(churn(given.model, given.churn))
    else:
        cost(given.model, [int(rank) for rank in given.ranks.split(",")], given.quantize)


if __name__ == "__main__":
    main()
