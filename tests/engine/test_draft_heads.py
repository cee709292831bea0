"""Draft heads: MTP layers and EAGLE-3, against references, and in the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from baton_api.sampling import SamplingParams
from baton_engine.batch import Batch, BatchRow
from baton_engine.client import AsyncEngine
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.draft_head import DraftHead
from baton_engine.requests import Request
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.draft_heads import (
    FILE,
    LAYERS,
    CountingDecoder,
    Folders,
    decoder_of,
    make_eagle3,
    make_heads,
    make_mtp,
    mtp_layer,
)
from tests.engine.greedy import CPU
from tests.engine.models import VOCAB, make_model

DRAFTED = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_heads(tmp_path_factory.mktemp("heads"))


@torch.inference_mode()
def by_transformers(folder: Path, tokens: Sequence[int]) -> Any:
    """Return a model of transformers, and its states of tokens: of each layer's input, and the last ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    result = model.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return model, [each[0] for each in result.hidden_states], result.last_hidden_state[0]


def rms(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Return x normalized, as https://arxiv.org/abs/1910.07467 defines it."""
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@torch.inference_mode()
def mtp_reference(
    model: Path, head: Path | None, tokens: Sequence[int], drafted: Sequence[int]
) -> list[Tensor]:
    """Return the logits [V] of each draft token: section 2.2 of the paper, with a layer of transformers."""
    whole, _, states = by_transformers(model, tokens)
    prefix, epsilon = f"model.layers.{mtp_layer(model)}.", whole.config.rms_norm_eps
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(model / FILE).items()
        if name.startswith(prefix)
    }
    last = whole.model.layers[-1]
    layer = type(last)(whole.config, len(whole.model.layers) - 1).eval()
    experts = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    stacked = layer.state_dict()
    for name in stacked:
        if name in experts:
            stacked[name] = experts[name]
    count = whole.config.n_routed_experts
    of_each = {
        part: [own[f"mlp.experts.{number}.{part}.weight"] for number in range(count)]
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    gates = [torch.cat(pair) for pair in zip(of_each["gate_proj"], of_each["up_proj"], strict=True)]
    stacked["mlp.experts.gate_up_proj"] = torch.stack(gates)
    stacked["mlp.experts.down_proj"] = torch.stack(of_each["down_proj"])
    layer.load_state_dict(stacked)
    embeddings = whole.model.embed_tokens(torch.tensor([*tokens, *drafted]))
    previous, logits = states[:-1], []
    for number in range(len(drafted) + 1):
        joined = torch.cat(
            (
                rms(embeddings[1 : len(tokens) + number], own["enorm.weight"], epsilon),
                rms(previous, own["hnorm.weight"], epsilon),
            ),
            dim=-1,
        )
        x = functional.linear(joined, own["eh_proj.weight"])[None]
        length = x.shape[1]
        rotation = whole.model.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        result = layer(x, attention_mask=mask, position_embeddings=rotation)
        result = (result if isinstance(result, Tensor) else result[0])[0]
        normed = rms(result[-1], own["shared_head.norm.weight"], epsilon)
        logits.append(functional.linear(normed, whole.lm_head.weight))
        previous = torch.cat((previous, result[-1:]))
    return logits


@torch.inference_mode()
def eagle3_reference(
    model: Path, head: Path | None, tokens: Sequence[int], drafted: Sequence[int]
) -> list[Tensor]:
    """Return the logits [V] of each draft token, from the formulas of EAGLE-3."""
    assert head is not None
    whole, inputs, _ = by_transformers(model, tokens)
    stored = load_file(head / FILE)
    own = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
    n, heads, kv_heads, d = 64, 4, 2, 16
    config = json.loads((head / "config.json").read_text())
    parts = [inputs[number] for number in LAYERS]
    if config.get("fc_norm"):
        parts = [rms(part, own[f"fc_norm.{number}.weight"]) for number, part in enumerate(parts)]
    joined = torch.cat(parts, -1)
    if config.get("norm_before_fc"):
        joined = rms(joined, own["input_norm.weight"])
    states = functional.linear(joined, own["fc.weight"])
    normed_residual = config.get("norm_before_residual", "speculators_model_type" in config)
    embeddings = whole.model.embed_tokens(torch.tensor([*tokens, *drafted]))
    previous, logits = states[:-1], []
    for number in range(len(drafted) + 1):
        embedded = rms(embeddings[1 : len(tokens) + number], own["midlayer.input_layernorm.weight"])
        normed = rms(previous, own["midlayer.hidden_norm.weight"])
        x = torch.cat((embedded, normed), dim=-1)
        length = len(x)

        def projected(name: str, count: int) -> Tensor:
            rows = functional.linear(x, own[f"midlayer.self_attn.{name}.weight"])  # noqa: B023
            return rows.view(length, count, d).transpose(0, 1)  # noqa: B023

        angles = torch.arange(length)[:, None] * 5000.0 ** (-torch.arange(0, d, 2) / d)
        cos, sin = angles.cos(), angles.sin()

        def turned(rows: Tensor) -> Tensor:
            first, second = rows.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)  # noqa: B023

        q, k, v = (projected(name, count) for name, count in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)))
        k, v = (rows.repeat_interleave(heads // kv_heads, dim=0) for rows in (turned(k), v))
        scores = turned(q) @ k.transpose(1, 2) / d**0.5
        seen = torch.ones((length, length), dtype=torch.bool).tril()
        if "layer_types" in config:
            seen = seen.triu(1 - config["sliding_window"])
        scores = scores.masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, heads * d)
        residual = normed if normed_residual else previous
        result = residual + functional.linear(mixed, own["midlayer.self_attn.o_proj.weight"])
        normed = rms(result, own["midlayer.post_attention_layernorm.weight"])
        gate, up = (
            functional.linear(normed, own[f"midlayer.mlp.{name}.weight"]) for name in ("gate_proj", "up_proj")
        )
        result = result + functional.linear(functional.silu(gate) * up, own["midlayer.mlp.down_proj.weight"])
        last = rms(result[-1:], own["norm.weight"])
        of_head = functional.linear(last[0], own["lm_head.weight"])
        of_all = torch.full((VOCAB,), -torch.inf)
        of_all[own["t2d"]] = of_head
        logits.append(of_all)
        previous = torch.cat((previous, last if config.get("norm_output") else result[-1:]))
    assert n == previous.shape[1]
    return logits


REFERENCES = {
    "mtp": mtp_reference,
    "mtp of glm": mtp_reference,
    "eagle3": eagle3_reference,
    "eagle3 with a norm of its inputs": eagle3_reference,
    "eagle3 with norms of its inputs": eagle3_reference,
    "eagle3 with a window": eagle3_reference,
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_head_computes_what_the_papers_define(kind: str, folders: Folders) -> None:
    """Prompts in chunks, in scattered blocks, two sequences at once; then three draft tokens."""
    model = decoder_of(*folders[kind])
    assert model.drafts is not None
    model.drafts.reserve(8)
    cache = KVCache(model.spec, 12, torch.float32, CPU)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (40, 21)]
    blocks, drafted = [[7, 2, 9], [3, 8, 1]], [[11, 12], [13, 14]]
    for chunk in range(3):
        rows = []
        for text, own in zip(texts, blocks, strict=True):
            size = 7 if chunk == 0 else 6 if chunk == 1 else len(text) - 1 - 13
            start = (0, 7, 13)[chunk]
            rows.append(BatchRow(text[start : start + size], start, own, chunk % 2))
        model.forward(Batch(rows, BLOCK_SIZE, CPU), cache)
    ours = []
    for number in range(DRAFTED):
        rows = [
            BatchRow([([text[-1], *more])[number]], len(text) - 1 + number, own, 1)
            for text, own, more in zip(texts, blocks, drafted, strict=True)
        ]
        batch = Batch(rows, BLOCK_SIZE, CPU)
        if number:
            batch.continue_states()
        ours.append(model.drafts.forward(batch, cache))
    for row, (text, more) in enumerate(zip(texts, drafted, strict=True)):
        expected = REFERENCES[kind](*folders[kind], text, more)
        for number in range(DRAFTED):
            # Logits are up to 10. The processor's vectors decide in which order sums are rounded.
            torch.testing.assert_close(ours[number][row], expected[number], rtol=1e-4, atol=5e-4)


class LateHead:
    """Passes of a head. The first one takes longer, as where it compiles kernels."""

    def __init__(self, head: DraftHead, late_s: float) -> None:
        self._head, self._of_first = head, late_s
        self.late_s = 0.0

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.late_s = self._of_first
        return self._head.forward(batch, cache)


class Served:
    """The answers of an engine, and what it holds after them."""

    def __init__(
        self, model: CountingDecoder, drafted: int, blocks: int = 200, late_s: float = 0.0, **limits: Any
    ) -> None:
        """`drafted`: maximum draft tokens. 0: without speculation. `late_s`: time of the first draft pass."""
        self.model, head = model, model.drafts
        assert head is not None
        self.cache = KVCache(model.spec, blocks, torch.float32, CPU)
        usual: dict[str, Any] = {"max_model_len": 512, "chunk_tokens": 32, "max_running": 8}
        own = EngineLimits(**{**usual, **limits}, speculation_tokens=drafted)
        head.reserve(own.results)
        passes = LateHead(head, late_s)
        self.client = AsyncEngine(
            model,
            self.cache,
            own,
            clock=lambda: model.passes + passes.late_s,
            head=(head, passes) if drafted else None,
        )
        self.client.start()

    async def run(self, *requests: Request) -> list[list[int]]:
        """Return the tokens of each request."""
        try:
            return await asyncio.gather(*(self.tokens(request) for request in requests))
        finally:
            self.totals = self.client.snapshot().totals

    async def tokens(self, request: Request) -> list[int]:
        return [choice.token async for output in self.client.generate(request) for choice in output.tokens]

    async def close(self) -> dict[bytes, Tensor]:
        """End the engine. Returns the contents of all cached blocks by their hashes."""
        await self.client.close()
        blocks, _ = self.client.engine._pool.published()
        return {name: self.cache.kv[block].clone() for name, block in blocks.items()}


def request_of(name: str, prompt: Sequence[int], **sampling: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **sampling}))


def mixed() -> list[Request]:
    """Requests of several lengths and kinds. Some share their first 32 tokens."""
    common = text(32, 1)
    return [
        request_of("greedy", text(9, 2)),
        request_of("seeded", common + text(13, 3), temperature=1.0, seed=7, top_p=0.9),
        request_of("penalized", common + text(4, 4), repetition_penalty=1.3, presence_penalty=0.4),
        request_of("long", common + text(60, 5), max_tokens=25),
        request_of("one token", text(1, 6), temperature=0.7, seed=1),
    ]


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
async def test_head_changes_no_answer_and_completes_all_blocks(kind: str, folders: Folders) -> None:
    """
    Blocks whose drafts were rejected hold what a pass without drafts writes: keys, values and states.

    A block that lacks the head's part, or has it of a rejected token, makes later drafts of it worse, and
    differs from the same block of another worker.
    """
    plain, drafting = Served(decoder_of(*folders[kind]), 0), Served(decoder_of(*folders[kind]), 3)
    expected = await plain.run(*mixed())
    assert await drafting.run(*mixed()) == expected
    assert drafting.totals.draft_tokens > 0
    assert drafting.totals.draft_tokens > drafting.totals.accepted_tokens
    assert plain.totals.drafts == 0
    blocks, drafted = await plain.close(), await drafting.close()
    assert blocks.keys() == drafted.keys() and len(blocks) > 10
    for name, block in blocks.items():
        torch.testing.assert_close(drafted[name], block, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
async def test_head_that_is_right_saves_passes(kind: str, tmp_path: Path) -> None:
    """A second answer begins after blocks of the prefix cache."""
    model, head, drafted = tmp_path / "model", None, 3
    if kind == "mtp":
        make_mtp(model, right=True)
    else:
        make_model(model, num_hidden_layers=8)
        head, drafted = make_eagle3(tmp_path / "head", model, right=True), 1
    served, plain = Served(decoder_of(model, head), drafted), Served(decoder_of(model, head), 0)
    requests = [request_of(name, text(40, 1), max_tokens=32) for name in ("first", "second")]
    for request in requests:
        before, plainly = served.model.passes, plain.model.passes
        assert await served.run(request) == await plain.run(request)
        assert plain.model.passes - plainly >= 32
        assert served.model.passes - before <= 2 + 32 / (1 + drafted) + 1
    assert served.totals.draft_tokens == served.totals.accepted_tokens >= 30
    assert served.totals.prompt_tokens_cached == 32
    await served.close()
    await plain.close()


async def test_head_whose_first_pass_is_late_drafts(tmp_path: Path) -> None:
    served = Served(decoder_of(make_mtp(tmp_path / "model", right=True), None), 3, late_s=1000.0)
    await served.run(request_of("a", text(40, 1), max_tokens=32))
    assert served.totals.accepted_tokens >= 20
    await served.close()


async def test_head_changes_no_answer_of_retracted_requests(folders: Folders) -> None:
    plain = Served(decoder_of(*folders["mtp"]), 0)
    drafting = Served(decoder_of(*folders["mtp"]), 3, blocks=16, max_running=5)
    expected = await plain.run(*mixed())
    assert await drafting.run(*mixed()) == expected
    assert drafting.totals.retractions > 0
    assert drafting.totals.draft_tokens > 0
    blocks, drafted = await plain.close(), await drafting.close()
    common = blocks.keys() & drafted.keys()
    assert len(common) > 5
    for name in common:
        torch.testing.assert_close(drafted[name], blocks[name], rtol=1e-3, atol=1e-3)


async def test_head_that_fails_ends_no_request(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts then come from the requests' own tokens. Blocks stay complete, for workers that read them."""
    plain, drafting = Served(decoder_of(*folders["mtp"]), 0), Served(decoder_of(*folders["mtp"]), 3)
    requests = [request_of("a", text(20, 8) * 3, repetition_penalty=1.1, max_tokens=60)]
    assert drafting.model.drafts is not None
    monkeypatch.setattr(drafting.model.drafts, "forward", lambda batch, cache: 1 / 0)
    expected = await plain.run(*requests)
    assert await drafting.run(*requests) == expected
    assert drafting.totals.draft_tokens > drafting.totals.accepted_tokens
    blocks, drafted = await plain.close(), await drafting.close()
    for name, block in blocks.items():
        torch.testing.assert_close(drafted[name], block, rtol=1e-3, atol=1e-3)
