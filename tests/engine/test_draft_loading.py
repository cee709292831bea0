"""Loading of draft models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_api.errors import SetupError
from baton_api.sampling import SamplingParams
from baton_engine.metrics.counters import Totals
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.head_loading import eagle3_head, mtp_head
from baton_engine.model.progress import SILENT
from baton_engine.requests import Request
from baton_engine.settings import WorkerSettings
from baton_engine.spec import Quantize
from baton_engine.speculation.loading import load_draft, speculation_tokens, with_head
from baton_engine.tiers import namespace
from baton_engine.tiers.slab import WEIGHTS
from baton_engine.worker import open_worker
from tests.engine.draft_heads import FILE, change_config, drop_config, make_eagle3, make_mtp, mtp_layer
from tests.engine.encoders import make_encoder
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(("choice", "kept"), [("keep", "keep"), ("off", "off"), ("q4_0", "keep")])
def test_draft_model_keeps_its_formats(choice: str, kept: Quantize, tmp_path: Path) -> None:
    """`--quantize q4_0` converts the model that drafts are for, not the draft model."""
    path = write_gguf(make_model(tmp_path / "model"), tmp_path / "draft.gguf", quantised=True)
    checkpoint = Checkpoint(path, "draft")
    spec = load_spec(checkpoint)
    settings = WorkerSettings.model_validate(
        {"model": "m", "speculation": "draft", "draft_model": str(path), "quantize": choice}
    )
    model, taken = load_draft(settings, spec, CPU, torch.float32, SILENT, None)
    assert model is not None
    assert taken == load_weights(checkpoint, spec, torch.float32, quantize=kept).bytes


async def answers(settings: dict[str, Any], greedy: SamplingParams) -> tuple[list[int], Totals]:
    """The tokens of a worker with `settings`, and its counters."""
    async with open_worker(WorkerSettings.model_validate(settings)) as worker:
        request = Request("r", tuple(range(3, 40)), greedy)
        outputs = [output async for output in worker.client.generate(request)]
        return [
            choice.token for output in outputs for choice in output.tokens
        ], worker.client.snapshot().totals


async def test_draft_model_of_a_worker_with_torch_kernels_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch rounds a row of several tokens otherwise, which tokens of a model in float32 do not show."""
    monkeypatch.setenv("BATON_KERNELS", "off")
    model = str(make_model(tmp_path / "model"))
    usual: dict[str, Any] = {"model": model, "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"}
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    expected, without = await answers({**usual, "speculation": "off"}, greedy)
    ours, totals = await answers({**usual, "speculation": "draft", "draft_model": model}, greedy)
    assert ours == expected
    assert totals.draft_tokens >= totals.accepted_tokens > 0
    assert without.drafts == 0


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
async def test_draft_head_of_a_worker_drafts(kind: str, tmp_path: Path) -> None:
    """The heads are right, because their models predict the next token from the last one."""
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"}
    if kind == "mtp":
        usual["model"] = str(make_mtp(tmp_path / "model", right=True))
        head = {}
    else:
        usual["model"] = str(make_model(tmp_path / "model", num_hidden_layers=8))
        head = {"draft_model": str(make_eagle3(tmp_path / "head", tmp_path / "model", right=True))}
        head["speculation_tokens"] = "1"
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    expected, without = await answers({**usual, "speculation": "off"}, greedy)
    ours, totals = await answers({**usual, "speculation": kind, **head}, greedy)
    assert ours == expected
    assert totals.draft_tokens == totals.accepted_tokens > 0
    assert without.drafts == 0


async def test_draft_head_is_part_of_the_name_of_blocks_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "SETTLED_S", -60.0)  # its files were just written
    model = make_model(tmp_path / "model", num_hidden_layers=8)
    head = make_eagle3(tmp_path / "head", model)
    disk: dict[str, Any] = {"kv_disk_tier": str(tmp_path / "kv"), "kv_disk_tier_size": 2**21}
    settings = {"model": str(model), "speculation": "eagle3", "draft_model": str(head), "device": "cpu"}
    usual = {"kv_cache_memory": "8MiB", "kv_memory_tier": 2**20, **disk}
    async with open_worker(WorkerSettings.model_validate({**settings, **usual})):
        pass
    _, states = json.loads((tmp_path / "kv" / WEIGHTS).read_text())
    files = [next(folder.glob("*.safetensors")).stat().st_ino for folder in (model, head)]
    assert [state[1] for state in states] == files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 400}, "for a vocabulary of 400 tokens, and the model has 320"),
        ({"target_hidden_size": 96}, "for a target of hidden size 96, and the model has 64"),
        ({"num_hidden_layers": 2}, "a head of 2 layers of LlamaForCausalLM is not supported"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}},
            r"needs inputs of layers \[2, 3, 8\], but the model has layers 0 to 7",
        ),
        ({"draft_vocab_size": 100}, r"lm_head.weight has shape \[200, 64\], .* require \[100, 64\]"),
        (
            {"norm_before_fc": True, "fc_norm": True},
            "or with both norm_before_fc and fc_norm",
        ),
        (
            {"layer_types": ["chunked_attention"], "sliding_window": 64},
            "a head with chunked_attention and a window of 64 tokens is not supported",
        ),
        ({"architectures": ["X"], "draft_vocab_size": None}, "neither such an architecture nor draft_vocab"),
    ],
)
async def test_eagle3_head_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=8)
    changed = {name: value for name, value in changes.items() if value is not None}
    head = make_eagle3(tmp_path / "head", model, **changed)
    if None in changes.values():
        drop_config(head, *(name for name, value in changes.items() if value is None))
    settings = {"model": str(model), "speculation": "eagle3", "draft_model": str(head), "device": "cpu"}
    with pytest.raises(SetupError, match=message):
        async with open_worker(WorkerSettings.model_validate(settings)):
            pass


async def test_eagle3_head_with_other_tensors_is_refused(tmp_path: Path) -> None:
    """A head whose configuration lacks an option would draft badly, and nothing would say why."""
    model = make_model(tmp_path / "model", num_hidden_layers=8)
    head = make_eagle3(tmp_path / "head", model, fc_norm=True)
    drop_config(head, "fc_norm")
    settings = {"model": str(model), "speculation": "eagle3", "draft_model": str(head), "device": "cpu"}
    with pytest.raises(
        SetupError, match=r"tensor fc_norm.0.weight, one of 3, is not part of an EAGLE-3 head"
    ):
        async with open_worker(WorkerSettings.model_validate(settings)):
            pass


async def test_workers_of_a_pair_load_the_same_head(tmp_path: Path) -> None:
    """Otherwise they would not pair. A prefill worker computes the head's part of blocks, but no drafts."""
    model = str(make_mtp(tmp_path / "model"))
    usual: dict[str, Any] = {"model": model, "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"}
    usual["transfer"] = "loopback"
    digests = []
    for role, speculation in (("prefill", "mtp"), ("decode", "mtp"), ("decode", "off")):
        settings = WorkerSettings.model_validate({**usual, "role": role, "speculation": speculation})
        async with open_worker(settings) as worker:
            digests.append(worker.compatibility.digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_heads_of_models_with_other_ends_of_a_text_are_equal(kind: str, tmp_path: Path) -> None:
    """Such models have equal blocks: their workers pair, with a head as without one."""
    names = []
    for name, ends in (("one", [1]), ("other", [1, 2])):
        model = make_mtp(tmp_path / name, num_hidden_layers=8)
        changed: dict[str, Any] = {"eos_token_id": ends, "bos_token_id": ends[-1]}
        changed["max_position_embeddings"] = 512 * len(ends)
        change_config(model, **changed)
        checkpoint = Checkpoint(model, name)
        spec = load_spec(checkpoint)
        assert spec.eos_ids == tuple(ends)
        if kind == "mtp":
            head = mtp_head(spec, checkpoint)
        else:
            own = make_eagle3(tmp_path / f"{name} head", model, **changed)
            head = eagle3_head(spec, Checkpoint(own, name))
        names.append(str(head))
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ({"speculation": "auto"}, True),
        ({"speculation": "off"}, False),
        ({"speculation": "auto", "tensor_parallel_size": 2}, True),
    ],
)
def test_mtp_layer_that_is_not_used_is_logged(
    given: dict[str, Any], logged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(make_mtp(tmp_path / "model"), "model")
    spec = load_spec(checkpoint)
    settings = WorkerSettings.model_validate({"model": "m", **given})
    with caplog.at_level("INFO"):
        assert with_head(settings, spec, checkpoint, CPU, torch.float32, SILENT) == (spec, None)
    assert ("model declares an MTP layer: with --speculation mtp" in caplog.text) == logged


async def test_mtp_of_a_model_that_has_no_tensors_of_it_is_refused(tmp_path: Path) -> None:
    """Conversions drop them, and keep the entry in the configuration."""
    model = make_mtp(tmp_path / "model")
    of_head = f"model.layers.{mtp_layer(model)}."
    tensors = {name: each for name, each in load_file(model / FILE).items() if of_head not in name}
    save_file(tensors, model / FILE, {"format": "pt"})
    settings = {"model": str(model), "speculation": "mtp", "device": "cpu"}
    with pytest.raises(SetupError, match="model has no tensors of its MTP layer, although"):
        async with open_worker(WorkerSettings.model_validate(settings)):
            pass


async def test_mtp_of_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(SetupError, match=r"model \(LlamaForCausalLM\) has none"):
        async with open_worker(WorkerSettings.model_validate({"model": model, "speculation": "mtp"})):
            pass


async def test_eagle3_head_as_a_draft_model_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=8)
    head = str(make_eagle3(tmp_path / "head", model))
    settings = {"model": str(model), "speculation": "draft", "draft_model": head}
    with pytest.raises(SetupError, match="head is an EAGLE-3 head, not a model"):
        async with open_worker(WorkerSettings.model_validate(settings)):
            pass


async def test_draft_model_is_not_loaded_by_prefill_workers(tmp_path: Path) -> None:
    """`baton up` gives prefill workers the settings of decode workers."""
    model = make_model(tmp_path / "model")
    settings = WorkerSettings.model_validate(
        {"model": "m", "role": "prefill", "speculation": "draft", "draft_model": "missing"}
    )
    spec = load_spec(Checkpoint(model, "m"))
    assert load_draft(settings, spec, CPU, torch.float32, SILENT, None) == (None, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculation": "draft"}, "requires a draft model. Set --draft-model."),
        ({"speculation": "eagle3"}, "requires the folder of an EAGLE-3 head. Set --draft-model."),
        ({"speculation": "mtp", "draft_model": "x"}, "--draft-model x has no effect with --speculation mtp"),
        ({"draft_model": "x"}, "--draft-model x has no effect with --speculation auto"),
        ({"speculation": "off", "draft_model": "x"}, "--draft-model x has no effect with --speculation off"),
    ],
)
async def test_draft_settings_that_contradict_each_other(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(SetupError, match=message):
        async with open_worker(WorkerSettings.model_validate({"model": model, **given})):
            pass


@pytest.mark.parametrize(
    ("given", "exact_rows", "expected"),
    [
        ({}, True, 16),
        ({}, False, 0),
        ({"speculation": "ngram"}, False, 16),
        ({"speculation": "draft", "speculation_tokens": 5}, False, 5),
        ({"speculation": "mtp"}, False, 16),
        ({"speculation": "off"}, True, 0),
        ({"role": "prefill"}, True, 0),
        ({"role": "prefill", "speculation": "ngram"}, False, 0),
    ],
)
def test_drafts_are_computed_where_answers_keep_their_bits_or_a_setting_asks(
    given: dict[str, Any], exact_rows: bool, expected: int
) -> None:
    settings = WorkerSettings.model_validate({"model": "m", **given})
    assert speculation_tokens(settings, exact_rows) == expected


async def test_draft_model_of_an_encoder_is_refused(tmp_path: Path) -> None:
    model = str(make_encoder(tmp_path / "model", "bert"))
    settings = WorkerSettings.model_validate({"model": model, "speculation": "draft", "draft_model": model})
    with pytest.raises(SetupError, match="--speculation draft has no effect: model generates no text"):
        async with open_worker(settings):
            pass
