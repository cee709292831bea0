"""
The engine against transformers' `generate`: same folder, same process, same number of threads, in turn.

    python -m benchmarks.engine FOLDER [--dtype bfloat16] [--threads 2]

Prompts are random token ids, new each time. A decode figure counts the tokens after every stream has its
first; a prefill figure is one prompt until its first token. The last line is what a step costs beyond the
model: the mean of whole steps less their forward passes, with the model given and 8 streams.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from baton_api.sampling import SamplingParams
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import load_spec, load_weights
from baton_engine.model.decoder import create_model
from baton_engine.model.resolve import resolve
from baton_engine.requests import Output, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import Quantize

DECODES = (1, 8, 32)
PREFILLS = (1024, 4096)
PROMPT, OUTPUT = 64, 64
CONTEXT = 4352


def _prompt(length: int) -> tuple[int, ...]:
    return tuple(random.randrange(300, 8000) for _ in range(length))


class Baton:
    """The engine, asked directly: no HTTP, no tokenizer."""

    def __init__(self, folder: str, dtype: torch.dtype, quantize: Quantize = "off") -> None:
        checkpoint = resolve(folder)
        spec = load_spec(checkpoint)
        weights = load_weights(checkpoint, spec, dtype, quantize=quantize)
        self.formats = weights.formats
        self.model = model = create_model(spec, weights, torch.device("cpu"), dtype)
        del weights
        blocks = 1 + max(32 * (PROMPT + OUTPUT), 2 * CONTEXT) // 16 + 64
        cache = KVCache(spec, blocks, dtype, torch.device("cpu"))
        limits = EngineLimits(max_model_len=min(CONTEXT, spec.context))
        self._arrivals: dict[str, list[float]] = {}
        self._open = 0
        self._ended = threading.Event()
        self.engine = Engine(model, cache, limits, on_outputs=self._arrived)
        self.engine.start()
        self._number = 0

    def _arrived(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            self._arrivals[output.request_id].extend([now] * len(output.tokens))
            self._open -= output.finish is not None
        if not self._open:
            self._ended.set()

    def run(self, streams: int, prompt: int, output: int) -> tuple[float, list[list[float]]]:
        """When it began, and when each stream's tokens came."""
        self._ended.clear()
        self._open = streams
        begun, names = time.perf_counter(), []
        requests = []
        for _ in range(streams):
            self._number += 1
            names.append(str(self._number))
            self._arrivals[names[-1]] = []
            sampling = SamplingParams(temperature=0.0, max_tokens=output)
            requests.append(Request(names[-1], _prompt(prompt), sampling))
        for request in requests:
            self.engine.submit(request)
        self._ended.wait()
        return begun, [self._arrivals.pop(name) for name in names]

    def decode(self, streams: int) -> float:
        _, times = self.run(streams, PROMPT, OUTPUT)
        begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
        return sum(begun < moment <= ended for each in times for moment in each) / (ended - begun)

    def prefill(self, prompt: int) -> float:
        begun, times = self.run(1, prompt, 1)
        return prompt / (times[0][0] - begun)

    def overhead(self) -> float:
        """Seconds of a decode step of 8 streams that are not the forward pass."""
        before = self.engine.snapshot()
        self.run(8, 16, 256)
        after = self.engine.snapshot()
        steps = after.step_times.count - before.step_times.count
        outside = (after.step_times.total_s - before.step_times.total_s) - (
            after.forward_times.total_s - before.forward_times.total_s
        )
        return outside / steps


class Transformers:
    """`generate` with static batches."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def seconds(self, streams: int, prompt: int, output: int) -> float:
        ids = torch.tensor([_prompt(prompt) for _ in range(streams)])
        begun = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
        )
        return time.perf_counter() - begun

    def decode(self, streams: int) -> float:
        first = statistics.median(self.seconds(streams, PROMPT, 1) for _ in range(3))
        return streams * (OUTPUT - 1) / (self.seconds(streams, PROMPT, OUTPUT) - first)

    def prefill(self, prompt: int) -> float:
        return prompt / self.seconds(1, prompt, 1)


def _median(measure: Callable[[int], float], argument: int, repeats: int) -> float:
    measure(argument)
    return statistics.median(measure(argument) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    ours, theirs = Baton(str(options.folder), dtype), Transformers(str(options.folder), dtype)
    print(f"| {options.folder.name}, {options.dtype}, {options.threads} threads | baton | generate | ratio |")
    print("|---|---|---|---|")
    for what, mine, other, arguments in (
        ("decode tok/s, streams:", ours.decode, theirs.decode, DECODES),
        ("prefill tok/s, tokens:", ours.prefill, theirs.prefill, PREFILLS),
    ):
        for argument in arguments:
            a, b = (_median(measure, argument, options.repeats) for measure in (mine, other))
            print(f"| {what} {argument} | {a:.1f} | {b:.1f} | {a / b:.2f} |", flush=True)
    print(f"| step beyond the model, ms | {ours.overhead() * 1e3:.3f} | | |")
    ours.engine.stop()


if __name__ == "__main__":
    main()
