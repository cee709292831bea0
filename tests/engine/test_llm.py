"""The Python interface: the answers of a server, in order, without one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_api.errors import BatonError, InvalidRequest, NotReady
from baton_engine import LLM, SamplingParams
from tests.engine.models import make_model

PROMPTS = ["The capital of", "A relay has", "def hand", "List 3"]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    folder = make_model(tmp_path_factory.mktemp("models") / "llama")
    with LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="4MiB") as llm:
        yield llm
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def test_llm_outputs_are_in_the_order_of_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    together = llm.generate(PROMPTS * 5, params)
    assert len(together) == 20
    for place, prompt in enumerate(PROMPTS):
        (single,) = llm.generate(prompt, params)
        assert len(single.outputs[0].token_ids) <= 8
        assert all(one == single for one in together[place :: len(PROMPTS)])
    ids = together[0].prompt_token_ids
    assert llm.generate(ids, params) == [together[0]]
    assert llm.generate([ids, ids], params) == [together[0]] * 2


def test_llm_params_are_fields_of_the_api(llm: LLM) -> None:
    given = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "n": 2, "logprobs": 1}
    (one,), (same,) = llm.generate(PROMPTS[0], given), llm.generate(PROMPTS[0], given)
    assert one == same and [output.index for output in one.outputs] == [0, 1]
    assert one.outputs[0].logprobs is not None
    by_params = llm.generate(PROMPTS[0], SamplingParams(seed=7, max_tokens=12, logprobs=1), n=2)
    assert by_params == [one]
    (scored,) = llm.generate(PROMPTS[0], {"max_tokens": 0, "prompt_logprobs": 1})
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert scored.prompt_logprobs[0] is None and scored.outputs[0].text == ""


def test_llm_chat_has_a_message_for_each_conversation(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 6}
    (one,) = llm.chat(MESSAGES, params)
    assert one.outputs[0].message is not None
    assert one.outputs[0].message["content"] == one.outputs[0].text
    assert llm.chat([MESSAGES, MESSAGES], params) == [one, one]
    (scored,) = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=2, logprobs=2))
    assert scored.outputs[0].logprobs is not None


def test_llm_errors_name_the_field(llm: LLM) -> None:
    cases: dict[str, Any] = {
        "temperature": {"temperature": 9},
        "prompt": {},
        "max_tokens": {"max_tokens": 10**6},
    }
    for param, fields in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(["a", ""] if param == "prompt" else "a", fields)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="stop_ids"):
        llm.generate("a", SamplingParams(stop_ids=frozenset({1})))
    assert llm.generate([]) == []


def test_llm_closed_rejects_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    llm = LLM(str(make_model(tmp_path)), dtype="float32", threads=1, kv_cache_memory="1MiB")
    llm.close()
    llm.close()
    with pytest.raises(NotReady):
        llm.generate("a")
    assert threading.active_count() <= before
    with pytest.raises(BatonError, match="does not exist"):
        LLM(str(tmp_path / "missing"))
    assert threading.active_count() <= before
