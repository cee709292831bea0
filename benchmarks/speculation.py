"""
Tokens per second with speculation and without, in turn, in one process with one model.

    python -m benchmarks.speculation [MODEL] [--threads 2] [--streams 1,4,8,32] [--quantize keep]

Tasks: edits of code, quotes from a text, a story, and a story whose text the request predicts (the ideal
case). Answers are greedy and must be equal with and without speculation. Prompts are in the prefix cache, so
that decoding is measured.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton_api.sampling import SamplingParams
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.counters import Totals
from baton_engine.model.checkpoint import load_spec, load_weights
from baton_engine.model.decoder import Model, create_model
from baton_engine.model.resolve import resolve
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.ops.plain import preferred_dtype
from baton_engine.requests import Output, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import Quantize

CONTEXT = 1024
OUTPUT = 128
DRAFT = 16
"""The default of --speculation-tokens."""

CODE = """class {name}:
    def __init__(self, items=None):
        self.items = list(items or [])

    def add(self, item):
        self.items.append(item)
        return len(self.items)

    def remove(self, item):
        if item not in self.items:
            raise KeyError(item)
        self.items.remove(item)

    def find(self, name):
        for item in self.items:
            if item.name == name:
                return item
        return None
"""

FACTS = (
    "The lighthouse of {name} was built in 1873 by the engineer Adam Holt. It is 41 meters high.",
    "Its lamp was lit with whale oil until 1911, when a power station was built north of the harbor.",
    "The keeper of {name} lived in a stone house beside the tower, together with two assistants.",
    "In the storm of 1927 the sea reached the door of the house, and the light failed for three nights.",
)

NAMES = ("Basket", "Shelf", "Drawer", "Crate", "Locker", "Cabinet", "Pantry", "Garage")
TASKS = ("code edit", "quote", "story", "predicted story")


def questions(task: str, streams: int) -> list[str]:
    """One prompt for each stream."""
    prompts = []
    for number in range(streams):
        name = f"{NAMES[number % len(NAMES)]}{number // len(NAMES) or ''}"
        if task == "code edit":
            code = CODE.format(name=name)
            ask = "Rename the method find to lookup and repeat the rest of the code unchanged:"
            prompts.append(f"{ask}\n\n```python\n{code}```")
        elif task == "quote":
            text = " ".join(FACTS).format(name=name)
            prompts.append(f"{text}\n\nRepeat the text above word for word.")
        else:
            prompts.append(f"Tell me a story about the old lighthouse of {name} and its keeper.")
    return prompts


@dataclass(frozen=True)
class Run:
    """One run of all streams of a task."""

    answers: dict[str, list[int]]
    seconds: float
    totals: Totals

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers.values())) / self.seconds


class Baton:
    """An engine on a model that it shares with another one; only one of them runs at a time."""

    def __init__(self, model: Model, dtype: torch.dtype, draft: int) -> None:
        limits = EngineLimits(max_model_len=CONTEXT, speculation_tokens=draft)
        cache = KVCache(model.spec, 1 + 40 * CONTEXT // 16, dtype, torch.device("cpu"))
        self._answers: dict[str, list[int]] = {}
        self._open = 0
        self._ended = threading.Event()
        self.engine = Engine(model, cache, limits, on_outputs=self._arrived)
        self.engine.start()

    def run(self, requests: Sequence[Request]) -> Run:
        self._answers = {request.id: [] for request in requests}
        self._open = len(requests)
        self._ended.clear()
        before, began = self.engine.snapshot().totals, time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        self._ended.wait()
        seconds, after = time.perf_counter() - began, self.engine.snapshot().totals
        return Run(
            self._answers,
            seconds,
            Totals(
                drafts=after.drafts - before.drafts,
                draft_tokens=after.draft_tokens - before.draft_tokens,
                accepted_tokens=after.accepted_tokens - before.accepted_tokens,
            ),
        )

    def _arrived(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._answers[output.request_id] += [choice.token for choice in output.tokens]
            self._open -= output.finish is not None
        if not self._open:
            self._ended.set()


def requests_of(task: str, streams: int, tokenizer: Tokenizer) -> list[Request]:
    requests = []
    for number, question in enumerate(questions(task, streams)):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
        sampling = SamplingParams(
            temperature=0.0, max_tokens=OUTPUT, stop_ids=frozenset(tokenizer.eos_ids), seed=number
        )
        requests.append(Request(f"{task} {number}", prompt, sampling))
    return requests


def copies(requests: Sequence[Request], answers: dict[str, list[int]] | None) -> list[Request]:
    """New requests; with `answers`, they predict these."""
    return [
        Request(one.id, one.prompt, one.sampling, prediction=tuple(answers[one.id]) if answers else ())
        for one in requests
    ]


def compare(
    task: str, streams: int, plain: Baton, drafting: Baton, tokenizer: Tokenizer, repeats: int
) -> str:
    """Return a row of the table. Raises AssertionError if an answer differs."""
    requests = requests_of(task, streams, tokenizer)
    expected = plain.run(copies(requests, None)).answers
    predicted = expected if task == "predicted story" else None
    drafting.run(copies(requests, predicted))
    rates: list[float] = []
    ratios: list[float] = []
    totals = Totals()
    for _ in range(repeats):
        without = plain.run(copies(requests, predicted))
        run = drafting.run(copies(requests, predicted))
        assert without.answers == run.answers == expected, f"{task}: answers differ with {streams} streams"
        rates.append(without.rate)
        ratios.append(run.rate / without.rate)
        totals = replace(
            run.totals,
            drafts=totals.drafts + run.totals.drafts,
            draft_tokens=totals.draft_tokens + run.totals.draft_tokens,
            accepted_tokens=totals.accepted_tokens + run.totals.accepted_tokens,
        )
    tokens = repeats * sum(map(len, expected.values()))
    return (
        f"| {task} | {streams} | {statistics.median(rates):.0f} | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f} to {max(ratios):.2f} | {totals.draft_tokens / tokens:.2f} "
        f"| {totals.accepted_tokens / max(1, totals.draft_tokens):.0%} "
        f"| {totals.accepted_tokens / tokens:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", default="1,4,8,32")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--quantize", choices=typing.get_args(Quantize), default="keep")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = preferred_dtype(torch.cpu.get_capabilities(), has_kernels=True)
    checkpoint = resolve(arguments.model)
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, dtype, quantize=arguments.quantize)
    model = create_model(spec, weights, torch.device("cpu"), dtype)
    tokenizer = load_tokenizer(checkpoint, spec)
    plain, drafting = Baton(model, dtype, 0), Baton(model, dtype, DRAFT)
    print(
        f"{checkpoint.name}, {dtype}, --quantize {arguments.quantize}, {arguments.threads} threads,", end=" "
    )
    print(f"at most {OUTPUT} tokens per answer")
    print(
        "| task | streams | tok/s without | ratio | all ratios | drafted per token | accepted | of answers |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for task in arguments.tasks.split(","):
        for streams in map(int, arguments.streams.split(",")):
            print(compare(task, streams, plain, drafting, tokenizer, arguments.repeats), flush=True)
    plain.engine.stop()
    drafting.engine.stop()


if __name__ == "__main__":
    main()
