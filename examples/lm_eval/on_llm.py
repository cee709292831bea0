"""
lm-evaluation-harness on `LLM`: model and evaluation in one process.

    pip install lm-eval
    HF_HUB_OFFLINE=1 python examples/lm_eval/on_llm.py MODEL capitals
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from baton_engine import LLM

SCORE = {"max_tokens": 0, "prompt_logprobs": 1}


class BatonModel(LM):  # type: ignore[misc]
    """The harness's interface to a model."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return the logprob of each continuation, and whether greedy decoding would give it."""
        pairs = [request.args for request in requests]
        contexts = self._llm.generate([context or " " for context, _ in pairs], {"max_tokens": 0})
        wholes = self._llm.generate([context + continuation for context, continuation in pairs], SCORE)
        starts = [
            len(one.prompt_token_ids) if context else 1
            for one, (context, _) in zip(contexts, pairs, strict=True)
        ]
        return [_scored(whole, start) for whole, start in zip(wholes, starts, strict=True)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the logprob of each text."""
        texts = [request.args[0] for request in requests]
        return [_scored(whole, 1)[0] for whole in self._llm.generate(texts, SCORE)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the text that follows each context, up to one of its stop strings."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for key, indexes in groups.items():
            given = json.loads(key)
            stop = [given["until"]] if isinstance(given.get("until"), str) else given.get("until")
            fields = {"max_tokens": given.get("max_gen_toks", 256), "stop": stop}
            fields["temperature"] = given.get("temperature", 0.0) if given.get("do_sample") else 0.0
            outputs = self._llm.generate([requests[index].args[0] for index in indexes], fields)
            for index, output in zip(indexes, outputs, strict=True):
                answers[index] = output.outputs[0].text
        return answers


def _scored(whole: Any, start: int) -> tuple[float, bool]:
    ids, scores = whole.prompt_token_ids, whole.prompt_logprobs
    chosen = [scores[index][str(ids[index])] for index in range(start, len(ids))]
    return sum(one["logprob"] for one in chosen), all(one["rank"] == 1 for one in chosen)


def main(model: str, *tasks: str) -> None:
    manager = TaskManager(include_path=str(Path(__file__).parent), include_defaults=False)
    with LLM(model) as llm:
        results = lm_eval.simple_evaluate(BatonModel(llm), tasks=list(tasks), task_manager=manager)
    print(json.dumps(results["results"], indent=2, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
