"""
Compile all kernels for accelerators that need not be present.

    python -m tests.engine.kernels.compiling TARGET

All models and formats are compiled in bfloat16, and some in float32 and with keys in float8. For targets that
are not in `WHOLE` only a sample of them is, because all five would take seven minutes.

Prints for each kernel and model the bytes of shared memory, and the registers that were spilled. A
kernel that the interpreter runs may still not compile: the compiler knows more types, and fewer of Python's
statements.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops import LowRankLinear, LowRankOutputs
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels import quantized, sampling, scaled
from baton_engine.ops.kernels.checksums import mixed_sums
from baton_engine.ops.kernels.quantized import QuantizedLinear
from baton_engine.ops.plain import PlainLinear
from baton_engine.ops.token_weights import TokenRule
from baton_engine.quantized import Format, Quantized, QuantizedPart
from baton_engine.spec import LatentSpec, ModelSpec
from baton_engine.transfer.integrity import KEYS
from tests.engine.greedy import CPU
from tests.engine.kernels.cases import DEVICE, batch_of
from tests.engine.random_weights import tiny_spec

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

KIB = 1024

SHARED = {
    "sm_80": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx942": 64 * KIB,
}
"""Bytes of shared memory per program. Of the devices that run sm_80's code, consumers' have the least."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"heads": 8, "kv_heads": 2, "head_dim": 128},
    "gemma 2": {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 256,
        "sliding_window": 64,
        "attention_cap": 50.0,
        "activation": "gelu_tanh",
    },
    "gpt-oss": {"heads": 8, "kv_heads": 1, "head_dim": 64, "sliding_window": 64, "sinks": True},
    "qwen3": {"heads": 10, "kv_heads": 2, "head_dim": 128, "qk_norm": True},
    "llama 4": {
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 80,
        "sliding_window": 64,
        "window_chunks": True,
        "qk_norm_after": True,
        "temperature": (0.1, 8),
    },
}

LATENTS: dict[str, dict[str, Any]] = {
    f"latents, {heads} heads": {
        "heads": heads,
        "kv_heads": 1,
        "head_dim": 576,
        "rotary_dim": 64,
        "latent": LatentSpec(q_rank=0, kv_rank=512, plain=128, value=128),
    }
    for heads in (16, 128)
}
"""DeepSeek-V2-Lite and DeepSeek-V3."""

LATENTS["latents, a draft head"] = LATENTS["latents, 128 heads"] | {
    "sliding_window": 4096,
    "window_rest": True,
}

WHOLE = ("sm_90", "gfx942")
"""Targets for which everything is compiled: one of each maker."""

SAMPLE = (
    "gemma 2",
    "gpt-oss",
    "llama, large tiles",
    "FP8",
    "Q4_K",
    "one row",
    "rounded inputs",
    *LATENTS,
)
"""What is compiled for all targets: the largest heads and tiles, and each kind of arithmetic."""

OTHER_TYPES = ("llama", "gemma 2")
"""Models that are also compiled in float32, and for keys in float8."""

ROW_BYTES = {
    Format.Q4_0: 128 * 18,
    Format.Q5_1: 128 * 24,
    Format.IQ4_NL: 128 * 18,
    Format.Q8_0: 128 * 34,
    Format.Q4_K: 16 * 144,
    Format.Q6_K: 16 * 210,
    Format.MXFP4: 128 * 17,
    Format.INT4: 128 * 19,
    Format.FP8: 4096 + 4 * 32,
}
"""Bytes of a row of 4096 inputs, for one format of each kind."""

EXPERT_FORMATS = (Format.Q4_K, Format.MXFP4, Format.INT4, Format.FP8)

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}


class Launch:
    """A launch as Triton would compile it: types, constants, and what is a multiple of 16."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for number, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(number,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{TYPES[value.dtype]}"
                attributes[(number,)] = [["tt.divisibility", 16]]
            else:
                integer = "i32" if abs(value) < 2**31 else "i64"
                signature[parameter.name] = "fp32" if isinstance(value, float) else integer
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]
        self.name = kernel.fn.__name__
        self.source = ASTSource(kernel, signature, constants, attributes)
        self.options = kwargs


def capturing() -> list[Launch]:
    """Return a list, to which launches are added from now on instead of being run."""
    captured: list[Launch] = []

    def capture(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        captured.append(Launch(kernel, args, kwargs))

    triton.JITFunction.run = capture
    return captured


def row_launches(dtype: torch.dtype) -> list[Launch]:
    """Return what products with one row launch: few and many outputs, inputs that fill all steps or not."""
    captured = capturing()
    for outputs, inputs in ((4096, 4096), (128_256, 4096), (64, 2880)):
        linear = AcceleratorOps(tiny_spec()).prepare(torch.zeros(outputs, inputs, dtype=dtype))
        linear(torch.zeros(1, inputs, dtype=dtype))
    return captured


def quantized_launches(form: Format, dtype: torch.dtype, shared_memory: int) -> list[Launch]:
    """Return what a product with a matrix launches for one row, a few, more and many."""
    captured = capturing()
    inputs, size = 4096, ROW_BYTES[form]
    part = QuantizedPart(form, torch.zeros(64, size, dtype=torch.uint8), group=128)
    linear = QuantizedLinear(Quantized((part,), inputs), torch.zeros(64, dtype=dtype), shared_memory)
    for rows in (1, 3, 20, 50, 100, 300):
        linear(torch.zeros(rows, inputs, dtype=dtype))
    return captured


def rounding_launches() -> list[Launch]:
    """Return what rounds inputs to FP8 launches, with one scale for a row or one for each group."""
    captured = capturing()
    for recipe in scaled.SCALING:
        scaled.round_rows(torch.zeros(300, 4096, dtype=torch.bfloat16), 4096, recipe)
    return captured


def adapter_launches(dtype: torch.dtype) -> list[Launch]:
    """Return what the adapters of a layer launch for prompts of two lengths, and in a captured pass."""
    captured = capturing()
    spec = tiny_spec(hidden=4096, intermediate=14336)
    ops = AcceleratorOps(spec)
    a, b = torch.zeros(16, 4096, dtype=dtype), torch.zeros(4096, 16, dtype=dtype)
    layers = ({"output": LowRankLinear(a, (LowRankOutputs(0, 0, b),))},) * spec.layers
    adapter = ops.place_adapter(layers)
    prompts = (BatchRow([0] * tokens, 0, [1, 2, 3], 1, adapter=adapter) for tokens in (40, 5))
    x = torch.zeros(40, 4096, dtype=dtype)
    batches = [Batch([row], 16, CPU) for row in prompts]
    for batch in (*batches, StaticBatch(8, 4, 256, 16, CPU, adapter_rank=16)):
        adapted = ops.adapted(batch, wanted=False)
        assert adapted is not None
        adapted.add(x.clone(), x, 0, "output")
        gate_up = torch.zeros(batch.size, 2 * spec.intermediate, dtype=dtype)
        adapted.mlp(gate_up, x, 0, PlainLinear(torch.zeros(4096, spec.intermediate, dtype=dtype), None))
    return captured


def expert_launches(dtype: torch.dtype, shared_memory: int, tokens: int = 40) -> list[Launch]:
    """Return what the experts of a layer launch, with biases and without."""
    captured = capturing()
    ops, x = AcceleratorOps(tiny_spec(), shared_memory), torch.zeros(tokens, 2880, dtype=dtype)
    groups = ops.group_by_expert(torch.zeros(tokens, 4, dtype=torch.int64), 32)
    weights, biases = torch.zeros(32, 64, 2880, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
    results = ops.prepare_experts(weights, None, 32)(x, groups)
    ops.prepare_experts(weights, biases, 32)(x, groups)
    for form in EXPERT_FORMATS:
        rows = torch.zeros(32 * 64, ROW_BYTES[form] * 2816 // 4096, dtype=torch.uint8)
        matrix = Quantized((QuantizedPart(form, rows, group=128),), 2816)
        ops.prepare_experts(matrix, biases, 32)(x[:, :2816], groups)
    for shares in (None, torch.zeros(tokens, 4)):
        ops.sum_experts(results.view(tokens, 4, 64), shares)
    return captured


def launches(
    spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype, shared_memory: int = 0
) -> list[Launch]:
    """Return what a layer of a model launches for a chunk of a prompt, and for rows of one token."""
    captured = capturing()
    ops, batch = AcceleratorOps(spec, shared_memory), batch_of([(0, 40), (300, 1)], random.Random(1))
    cache = KVCache(spec, 1 + max(max(row.blocks) for row in batch.rows), kv_dtype, DEVICE)
    x = torch.zeros(batch.size, spec.hidden, dtype=dtype)
    ops.begin(batch)
    ops.add_rms_norm(x, x.clone(), x[0], 1e-5)
    ops.gated(x)
    qkv = torch.zeros(batch.size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dtype=dtype)
    norm = torch.zeros(spec.head_dim, dtype=dtype) if spec.qk_norm else None
    table = torch.zeros(batch.size, spec.head_dim // 2)
    for rotation in ((table, table), None):
        q = ops.rope_and_store(qkv, rotation, norm, norm, cache, 1, batch)
    sinks = torch.zeros(spec.heads, dtype=dtype) if spec.sinks else None
    for window in {None, spec.sliding_window}:
        ops.attention(q, cache, 1, batch, window, sinks)
    static = StaticBatch(batch.size, 1024, 2**20, batch.block_size, CPU)
    ops.begin(static)
    for window in {None, spec.sliding_window}:
        ops.attention(q, cache, 1, static, window, sinks)
    words = cache.kv.view(cache.blocks, -1).view(torch.int64)
    mixed_sums(words, torch.zeros(2, dtype=torch.int64), KEYS, (words.shape[1], words.shape[1], 0))
    for rule in (TokenRule(0.0), TokenRule(1.0)):
        sampling.select_on_device(torch.zeros(3, 128 * 1024), [rule] * 3)
    return captured


def latent_launches(
    spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype, shared_memory: int
) -> list[Launch]:
    """Return what latent attention of a layer launches for a chunk of a prompt, and for rows of one token."""
    captured = capturing()
    assert spec.latent is not None
    ops, batch = AcceleratorOps(spec, shared_memory), batch_of([(0, 40), (300, 1)], random.Random(1))
    cache = KVCache(spec, 1 + max(max(row.blocks) for row in batch.rows), kv_dtype, DEVICE)
    ops.begin(batch)
    q, latents, norm, keys = (
        torch.zeros(*shape, dtype=dtype)
        for shape in (
            (batch.size, spec.heads, spec.latent.plain + spec.rotated),
            (batch.size, spec.head_dim),
            (spec.latent.kv_rank,),
            (spec.heads, spec.latent.plain, spec.latent.kv_rank),
        )
    )
    table = torch.zeros(batch.size, spec.rotated // 2)
    queries = ops.store_latents(q, latents, (table, table), norm, keys, cache, 1, batch)
    ops.attention(queries, cache, 1, batch, spec.sliding_window)
    static = StaticBatch(batch.size, 1024, 2**20, batch.block_size, CPU)
    ops.begin(static)
    ops.attention(queries, cache, 1, static, spec.sliding_window)
    return captured


def spec_of(name: str) -> ModelSpec:
    return tiny_spec(hidden=4096, **(MODELS | LATENTS)[name])


def spilled(compiled: Any) -> int:
    """Return the registers that AMD's compiler spilled, or the bytes of the stack where NVIDIA's did."""
    if "cubin" not in compiled.asm:
        return int(re.findall(r"vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])[0])
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return int(re.findall(r" STACK:(\d+)", usage.stdout)[0])


def main(target: str) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    captured = {name: launches(spec_of(name), bf16, bf16) for name in MODELS}
    captured |= {f"{name}, float8 keys": launches(spec_of(name), bf16, FLOAT8_CACHE) for name in OTHER_TYPES}
    captured |= {f"{name}, float32": launches(spec_of(name), fp32, fp32) for name in OTHER_TYPES}
    captured |= {
        f"{form.name}, float32": quantized_launches(form, fp32, SHARED[target])
        for form in (Format.INT4, Format.FP8)
    }
    captured |= {form.name: quantized_launches(form, bf16, SHARED[target]) for form in ROW_BYTES}
    captured |= {f"experts, {dtype}": expert_launches(dtype, SHARED[target]) for dtype in (bf16, fp32)}
    captured |= {"experts, many tokens": expert_launches(bf16, SHARED[target], 400)}
    captured |= {"llama, large tiles": launches(spec_of("llama"), bf16, bf16, SHARED[target])}
    captured |= {name: latent_launches(spec_of(name), bf16, bf16, SHARED[target]) for name in LATENTS}
    captured |= {
        f"{name}, float8": latent_launches(spec_of(name), bf16, FLOAT8_CACHE, SHARED[target])
        for name in LATENTS
    }
    captured |= {
        f"{name}, float32": latent_launches(spec_of(name), fp32, fp32, SHARED[target]) for name in LATENTS
    }
    captured |= {"one row": row_launches(bf16), "rounded inputs": rounding_launches()}
    if target in ("sm_90", "sm_100", "sm_120"):
        quantized.converts_float8 = lambda device: True
        captured |= {"FP8, converted": quantized_launches(Format.FP8, bf16, SHARED[target])}
    captured |= {f"adapters, {dtype}": adapter_launches(dtype) for dtype in (bf16, fp32)}
    for name in captured if target in WHOLE else SAMPLE:
        kernels = captured[name]
        for launch in kernels:
            compiled = triton.compile(launch.source, target=TARGETS[target], options=launch.options)
            print(f"{name} {launch.name} {compiled.metadata.shared} {spilled(compiled)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
