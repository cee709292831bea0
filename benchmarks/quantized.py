"""
Formats of one model's weights: memory, speed and perplexity, beside llama.cpp with the same file.

    python -m benchmarks.quantized FILE.gguf [--formats off,keep,q8_0] [--llama FOLDER] [--windows 16]

Each format of `--quantize` is measured in turn: tokens per second at 1, 8 and 32 streams, and prefill of
1024 tokens. A column has the share of the memory limit at one stream. The limit is the machine's read
rate, measured first, over the size of the weights. The perplexity is that of Python's own manual
(pydoc_data.topics), in windows of 512 tokens whose second half counts, as llama-perplexity computes it.
With `--llama`, a folder with llama.cpp's programs, the same file runs in llama-bench and, where they exist,
llama-batched-bench and llama-perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import load_spec
from baton_engine.model.decoder import Model
from baton_engine.model.resolve import resolve
from baton_engine.model.tokenizer import load_tokenizer
from baton_engine.spec import Quantize
from benchmarks.engine import OUTPUT, PROMPT, Baton
from benchmarks.limits import MemoryProbe

WINDOW = 512
PREFILL = 1024
DECODES = (1, 8, 32)
BATCHED = "llama-batched-bench"
CPU = torch.device("cpu")


def manual() -> str:
    """Text that every installation of this version of Python has."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def perplexity(model: Model, tokens: list[int], windows: int, bos: int | None, dtype: torch.dtype) -> float:
    """Of the second halves of `windows` windows. The first token of each becomes `bos`, if there is one."""
    blocks = -(-WINDOW // BLOCK_SIZE)
    cache = KVCache(model.spec, 1 + blocks, dtype, CPU)
    losses = []
    for start in range(0, windows * WINDOW, WINDOW):
        window = tokens[start : start + WINDOW]
        if bos is not None:
            window = [bos, *window[1:]]
        row = BatchRow(window, 0, range(1, 1 + blocks), WINDOW // 2)
        logits = model.forward(Batch([row], BLOCK_SIZE, CPU), cache)[:-1]
        targets = torch.tensor(window[WINDOW // 2 + 1 :])
        losses.append(torch.nn.functional.cross_entropy(logits, targets))
    return math.exp(float(torch.stack(losses).mean()))


def ours(file: str, text: str, choice: Quantize, options: argparse.Namespace, memory: float) -> str:
    """One line of the table."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    engine = Baton(file, dtype, choice)
    checkpoint = resolve(file)
    tokenizer = load_tokenizer(checkpoint, load_spec(checkpoint))
    speeds = [median(partial(engine.decode, count), options.repeats) for count in DECODES]
    prefill = median(partial(engine.prefill, PREFILL), options.repeats)
    engine.engine.stop()
    tokens = tokenizer.encode(text)[: options.windows * WINDOW]
    loss = perplexity(engine.model, tokens, options.windows, tokenizer.bos_id, dtype)
    size = sum(engine.formats.values())
    formats = ", ".join(f"{bytes / 1e6:.0f} MB {form}" for form, bytes in engine.formats.most_common(3))
    share = speeds[0] * size / memory
    decodes = " | ".join(f"{speed:.1f}" for speed in speeds)
    return f"| baton {choice} | {formats} | {decodes} | {prefill:.0f} | {100 * share:.0f} % | {loss:.3f} |"


def median(measure: Callable[[], float], repeats: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeats))


def unpacked(options: argparse.Namespace) -> list[str]:
    return ["--no-repack"] if options.no_repack else []


def their_streams(file: str, several: list[int], folder: Path, options: argparse.Namespace) -> list[str]:
    """Tokens per second of llama.cpp with each number of streams, as medians."""
    command = [str(folder / BATCHED), "-m", file, "-t", str(options.threads), "--output-format", "jsonl"]
    command += ["-npp", str(PROMPT), "-ntg", str(OUTPUT), "-npl", ",".join(map(str, several))]
    command += ["-c", str(several[-1] * (PROMPT + OUTPUT)), *unpacked(options)]
    rates: dict[int, list[float]] = {streams: [] for streams in several}
    for _ in range(options.repeats):
        written = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for line in written.splitlines():
            if line.startswith("{"):
                case = json.loads(line)
                rates[case["pl"]].append(case["speed_tg"])
    return [f"{statistics.median(rates[streams]):.1f}" for streams in several]


def theirs(file: str, text: str, folder: Path, options: argparse.Namespace, memory: float) -> str:
    """One line of the table."""
    command = [str(folder / "llama-bench"), "-m", file, "-t", str(options.threads), "-o", "json"]
    command += ["-p", str(PREFILL), "-n", str(OUTPUT), "-r", str(options.repeats)]
    command += ["--repack", str(int(not options.no_repack))]
    cases = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speeds = {case["n_prompt"]: float(case["avg_ts"]) for case in cases}
    size, loss = float(cases[0]["model_size"]), "-"
    if (folder / "llama-perplexity").exists():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as written:
            written.write(text)
            written.flush()
            command = [str(folder / "llama-perplexity"), "-m", file, "-f", written.name, "-c", str(WINDOW)]
            command += ["--chunks", str(options.windows), "-t", str(options.threads), *unpacked(options)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        loss = re.findall(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)[-1]
    share = 100 * speeds[0] * size / memory
    several = [streams for streams in DECODES if streams > 1]
    rates = ["-"] * len(several)
    if (folder / BATCHED).exists():
        rates = their_streams(file, several, folder, options)
    decode = " | ".join([f"{speeds[0]:.1f}", *rates])
    return f"| llama.cpp | {size / 1e6:.0f} MB | {decode} | {speeds[PREFILL]:.0f} | {share:.0f} % | {loss} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", help="a .gguf file, a folder, or the built-in model smollm2")
    parser.add_argument("--formats", default="off,keep,q8_0")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama", type=Path)
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp does not repack weights, where its kernels for repacked ones crash",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text, memory = manual(), MemoryProbe().read(options.threads)
    print(f"{options.file}, {options.threads} threads, memory {memory / 1e9:.1f} GB/s")
    print("| engine | weights | 1 stream | 8 | 32 | prefill | of the limit | perplexity |")
    print("|---|---|---|---|---|---|---|---|")
    for choice in options.formats.split(","):
        print(ours(options.file, text, choice, options, memory), flush=True)
    if options.llama:
        path = str(resolve(options.file).path)
        print(theirs(path, text, options.llama, options, memory), flush=True)


if __name__ == "__main__":
    main()
