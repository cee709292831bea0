"""
Compile all kernels for accelerators that need not be present.

    python -m tests.engine.kernels.compiling TARGET

All models and formats are compiled in bfloat16, and some in float32 and with keys in float8. For targets that
are not in `WHOLE` only a sample of them is, because all would take seven minutes. For the A100
latent attention is, whose tiles depend most on shared memory.

Prints for each kernel and model the bytes of shared memory, and the bytes (NVIDIA) or registers (AMD) that
were spilled. A kernel that the interpreter runs may still not compile: the compiler knows more types, and
fewer of Python's statements. `python -m benchmarks.kernel_code` counts the instructions of these kernels.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops import LowRankLinear, LowRankOutputs
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels import packed, sampling, scaled
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
    "A100": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

KIB = 1024

SHARED = {
    "sm_80": 99 * KIB,
    "A100": 163 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx942": 64 * KIB,
}
"""Bytes of shared memory per program. Of the devices that run sm_80's code, consumers' have the least, and
the A100 has the most."""

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
    "minimax m2": {"heads": 48, "kv_heads": 8, "head_dim": 128, "qk_norm": True, "qk_norm_joint": True},
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

CONVERTING = ("sm_90", "sm_100", "sm_120")
"""Targets with instructions that widen float8."""

EXPERT_FORMATS = (Format.Q4_K, Format.MXFP4, Format.INT4, Format.FP8)

FLOAT32_SPILLS = 2704
"""Products in float32 have no tensor cores: their tiles are in registers, and some spill."""

SPILLS = {
    ("llama, float32", "_attention"): FLOAT32_SPILLS,
    ("gemma 2, float32", "_attention"): FLOAT32_SPILLS,
    ("latents, 16 heads, float32", "_latent_attention"): 46,
    ("latents, 128 heads, float32", "_latent_attention"): 46,
    ("gemma 2, float8 keys", "_attention"): 24,
    ("llama, large tiles", "_attention"): 64,
    ("Q4_K", "_multiply"): 56,
    ("Q5_1", "_multiply"): 56,
    ("Q8_0, groups of 128", "_multiply_row"): 16,
    ("experts, many tokens", "_multiply_quantized"): 128,
    ("adapters, torch.bfloat16", "_expand"): 8,
    ("adapters, torch.float32", "_shrink"): 16,
    ("adapters, torch.float32", "_expand"): 16,
}
"""Bytes of a thread's stack, or registers, that may be spilled, by case and kernel: 0 for all others."""

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
        self.name: str = kernel.fn.__name__
        self.constants = {each.name: values[each.name] for each in kernel.params if each.is_constexpr}
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


def matrix_of(form: Format, joined: bool = False, outputs: int = 64) -> Quantized:
    """Return a matrix of 4096 inputs, whose groups are the format's own, or with `joined` of 128 inputs."""
    size = (outputs, ROW_BYTES[form])
    # Equal scales of all groups are joined. Bytes below 60 are no NaN in any format.
    rows = torch.zeros(size) if joined else torch.arange(size[0] * size[1]).view(size) % 59
    return Quantized((QuantizedPart(form, rows.to(torch.uint8), group=128),), 4096)


def quantized_launches(
    matrix: Quantized, dtype: torch.dtype, shared_memory: int, rows: Iterable[int] = (1, 3, 20, 50, 100, 300)
) -> list[Launch]:
    """Return what a product with a matrix launches for one row, a few, more and many."""
    captured = capturing()
    outputs, inputs = matrix.shape
    linear = QuantizedLinear(matrix, torch.zeros(outputs, dtype=dtype), shared_memory)
    for count in rows:
        linear(torch.zeros(count, inputs, dtype=dtype))
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
        rows = matrix_of(form, outputs=32 * 64).parts[0].rows[:, : ROW_BYTES[form] * 2816 // 4096]
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
    if spec.qk_norm_joint:
        norms = [torch.zeros(heads * spec.head_dim, dtype=dtype) for heads in (spec.heads, spec.kv_heads)]
        ops.norm_jointly(qkv, ops.mean_squares(qkv), *norms)
        norm = None
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


def disassembled(cubin: bytes, tool: str, *options: str) -> str:
    """Return what a tool of NVIDIA that comes with Triton says of machine code."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [program, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


def spilled(compiled: Any) -> int:
    """Return the bytes of a thread's stack, to which NVIDIA's compiler spills; for AMD spilled registers."""
    if "cubin" in compiled.asm:
        usage = re.search(r"STACK:(\d+)", disassembled(compiled.asm["cubin"], "cuobjdump", "-res-usage"))
    else:
        usage = re.search(r"vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
    assert usage is not None
    return int(usage[1])


def build(launch: Launch, target: str) -> Any:
    """Compile a launch; Triton's cache has what was compiled before."""
    return triton.compile(launch.source, target=TARGETS[target], options=launch.options)


def cases(target: str) -> dict[str, list[Launch]]:
    """Return what is compiled for a target, by model or format."""
    bf16, fp32, memory = torch.bfloat16, torch.float32, SHARED[target]
    captured = {name: launches(spec_of(name), bf16, bf16) for name in MODELS}
    captured |= {f"{name}, float8 keys": launches(spec_of(name), bf16, FLOAT8_CACHE) for name in OTHER_TYPES}
    captured |= {f"{name}, float32": launches(spec_of(name), fp32, fp32) for name in OTHER_TYPES}
    captured |= {
        f"{form.name}, float32": quantized_launches(matrix_of(form), fp32, memory)
        for form in (Format.INT4, Format.FP8)
    }
    captured |= {form.name: quantized_launches(matrix_of(form), bf16, memory) for form in ROW_BYTES}
    captured |= {
        f"{form.name}, groups of 128": quantized_launches(matrix_of(form, joined=True), bf16, memory)
        for form in (Format.INT4, Format.Q8_0)
    }
    captured |= {f"experts, {dtype}": expert_launches(dtype, memory) for dtype in (bf16, fp32)}
    captured |= {"experts, many tokens": expert_launches(bf16, memory, 400)}
    captured |= {"llama, large tiles": launches(spec_of("llama"), bf16, bf16, memory)}
    captured |= {name: latent_launches(spec_of(name), bf16, bf16, memory) for name in LATENTS}
    captured |= {
        f"{name}, float8": latent_launches(spec_of(name), bf16, FLOAT8_CACHE, memory) for name in LATENTS
    }
    captured |= {f"{name}, float32": latent_launches(spec_of(name), fp32, fp32, memory) for name in LATENTS}
    captured |= {"one row": row_launches(bf16), "rounded inputs": rounding_launches()}
    if target in CONVERTING:
        packed.converts_float8 = lambda device: True
        captured |= {"FP8, converted": quantized_launches(matrix_of(Format.FP8), bf16, memory)}
    captured |= {f"adapters, {dtype}": adapter_launches(dtype) for dtype in (bf16, fp32)}
    names = captured if target in WHOLE else LATENTS if target == "A100" else SAMPLE
    return {name: captured[name] for name in names}


def main(target: str) -> None:
    for name, kernels in cases(target).items():
        for launch in kernels:
            compiled = build(launch, target)
            print(f"{name} {launch.name} {compiled.metadata.shared} {spilled(compiled)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
