"""
A GGUF file of random weights in Qwen3-30B-A3B's shape, with fewer layers and experts.

    python -m benchmarks.expert_file OUT.gguf [--format Q4_K] [--layers 4] [--experts 64]

The file is for `benchmarks.quantized`. A token reads as much per layer as in the model: 8 experts. The
vocabulary has 8,192 tokens, of which those beyond single bytes never occur in text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from tokenizers.pre_tokenizers import ByteLevel

from baton_engine.quantized import Format
from tests.engine.test_quantized import random_blocks

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM = 2048, 32, 4, 128
INTERMEDIATE, CHOSEN, VOCAB, CONTEXT = 768, 8, 8192, 8192


def write(path: Path, form: Format, layers: int, experts: int) -> None:
    """Write the file. Matrices are in `form`, but for routers and norms."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    _add_vocabulary(writer)
    generator = torch.Generator().manual_seed(1)

    def matrix(name: str, outputs: int, inputs: int, count: int = 0) -> None:
        (part,) = random_blocks(max(count, 1) * outputs, inputs, form, generator).parts
        rows = part.rows.numpy().reshape(count, outputs, -1) if count else part.rows.numpy()
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType(form))

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(size, numpy.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    matrix("output", VOCAB, HIDDEN)
    norm("output_norm", HIDDEN)
    for number in range(layers):
        layer = f"blk.{number}"
        norm(f"{layer}.attn_norm", HIDDEN)
        norm(f"{layer}.attn_q_norm", HEAD_DIM)
        norm(f"{layer}.attn_k_norm", HEAD_DIM)
        norm(f"{layer}.ffn_norm", HIDDEN)
        matrix(f"{layer}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.attn_k", KEY_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.attn_v", KEY_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        router = torch.randn(experts, HIDDEN, generator=generator) / HIDDEN**0.5
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", router.numpy())
        matrix(f"{layer}.ffn_gate_exps", INTERMEDIATE, HIDDEN, experts)
        matrix(f"{layer}.ffn_up_exps", INTERMEDIATE, HIDDEN, experts)
        matrix(f"{layer}.ffn_down_exps", HIDDEN, INTERMEDIATE, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any) -> None:
    octets = sorted(ByteLevel.alphabet())
    tokens = [*octets, "ab", "<|end|>"]
    tokens += [f"<|{number}|>" for number in range(VOCAB - len(tokens))]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([normal if number <= len(octets) else control for number in range(VOCAB)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--format", choices=[form.name for form in Format if form.name != "FP8"], default="Q4_K"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    options = parser.parse_args()
    write(options.file, Format[options.format], options.layers, options.experts)
    print(f"{options.file}: {options.file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
