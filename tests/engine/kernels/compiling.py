"""
Compile all kernels in bfloat16 for accelerators that need not be present.

    python -m tests.engine.kernels.compiling

Prints for each kernel, model and target the bytes of shared memory and of registers that were spilled. A
kernel that the interpreter runs may still not compile: the compiler knows more types, and fewer of Python's
statements.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_engine.model.spec import ModelSpec
from baton_engine.ops.accelerator import AcceleratorOps
from tests.engine.kernels.cases import batch_of, caches
from tests.engine.random_weights import tiny_spec

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

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

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
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
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]
        self.name = kernel.fn.__name__
        self.source = ASTSource(kernel, signature, constants, attributes)
        self.options = kwargs


def launches(spec: ModelSpec, dtype: torch.dtype) -> Iterator[Launch]:
    """Return what a layer of a model launches for a chunk of a prompt, and for rows of one token."""
    captured: list[Launch] = []

    def capture(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        captured.append(Launch(kernel, args, kwargs))

    triton.JITFunction.run = capture
    ops, batch = AcceleratorOps(spec), batch_of([(0, 40), (300, 1)], random.Random(1))
    cache, _ = caches(spec, batch, dtype)
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
    yield from captured


def spilled(compiled: Any) -> int:
    """Return the bytes or registers that AMD's compiler spilled; 0 for others, which do not say."""
    spills = re.search(r"vgpr_spill_count:\s*(\d+)", compiled.asm.get("amdgcn", ""))
    return int(spills[1]) if spills else 0


def main() -> None:
    for name, changes in MODELS.items():
        for launch in launches(tiny_spec(hidden=4096, **changes), torch.bfloat16):
            for target, gpu in TARGETS.items():
                compiled = triton.compile(launch.source, target=gpu, options=launch.options)
                shared = compiled.metadata.shared
                print(f"{target} {name} {launch.name} {shared} {spilled(compiled)}", flush=True)


if __name__ == "__main__":
    main()
