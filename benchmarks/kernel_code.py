"""
What kernels cost by their machine code: instructions per weight, and the rate above which they cannot go.

    python -m benchmarks.kernel_code [--target sm_90] [--device H200] [--formats Q8_0,INT4] [--all]

No device is needed: `tests/engine/kernels/compiling.py` compiles the kernels, and NVIDIA's disassembler comes
with Triton. Counted is the inner loop of a warp. **A ceiling is not a speed**: it assumes that no instruction
waits for another one or for memory. "of memory" is the rate of weights that the instructions allow, of that
at which the memory delivers them: below 100 %, the instructions are the limit. "of tensor cores" is the share
of the time in which they can be busy. "bound by" names what takes the most clocks: the issue of instructions,
or the pipe of a class. `--all` adds all kernels that are compiled, with the instructions of their inner loop.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from baton_engine.ops.kernels import packed
from baton_engine.ops.kernels.packed import Layout, merged, repack
from baton_engine.quantized import Format, Quantized, unpack
from tests.engine.kernels import compiling
from tests.engine.kernels.compiling import Launch

LANES = 32
"""Weights, or other numbers, that an instruction of a warp has at once."""

WARP_SCHEDULERS = 4
"""Of a multiprocessor; each issues one instruction of a warp per clock."""


class Device(NamedTuple):
    """A GPU by its maker's figures."""

    multiprocessors: int
    clock: float
    """Hz, the highest one: memory is relatively slower than at any other."""
    memory: float
    """Bytes per second."""
    tensor: int
    """Products of bf16 that are added per clock and scheduler."""


DEVICES = {
    "A100": Device(108, 1.41e9, 2.04e12, 256),
    "H100": Device(132, 1.83e9, 3.35e12, 512),
    "H200": Device(132, 1.83e9, 4.8e12, 512),
    "B200": Device(148, 1.85e9, 8.0e12, 1024),
}

CLASSES = {
    "tensor": "HMMA HGMMA IMMA IGMMA QGMMA OMMA QMMA UTCHMMA UTCQMMA",
    "convert": "I2F I2FP F2F F2FP F2I F2IP I2I I2IP FRND",
    "float": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 FMNMX FMNMX3 FSEL FSETP FSET FCHK HADD2 HMUL2 HFMA2 HMNMX2 "
    "HSETP2 MUFU",
    "integer": "LOP3 LOP PRMT SHF SHL SHR IADD IADD3 VIADD IMAD IMUL LEA ISETP IMNMX VIMNMX VIADDMNMX SEL "
    "SGXT MOV CS2R PLOP3 BFE BFI BMSK IABS FLO POPC BREV R2P P2R ISCADD",
    "load": "LDG LDGSTS LDGDEPBAR LD LDC LDL STL STG ST UTMALDG UBLKCP RED ATOMG",
    "shared": "LDS STS LDSM STSM LDTM STTM SHFL ATOMS MATCH VOTE REDUX",
}
"""Names of instructions, without what follows the first point. What is not here is "other": control,
barriers, and the unit for what all lanes share."""

CLASS_OF = {name: group for group, names in CLASSES.items() for name in names.split()}

CLOCKS = {
    "half": (
        2,
        "LOP3 LOP PRMT SHF SHL SHR IADD IADD3 VIADD LEA ISETP IMNMX VIMNMX VIADDMNMX SEL SGXT PLOP3 FMNMX "
        "FMNMX3 FSEL FSETP FSET F2FP I2FP CS2R BMSK",
    ),
    "multiplier": (2, "IMAD IMUL"),
    "float": (1, "FADD FMUL FFMA HADD2 HMUL2 HFMA2"),
    "slow": (8, "I2F F2F F2I FRND MUFU POPC FLO BREV"),
    "memory unit": (4, "LDG LDGSTS LD LDL STL STG ST LDS STS LDSM STSM SHFL ATOMS"),
}
"""Pipes, the clocks for which an instruction of a warp occupies its scheduler's share of them, and the
instructions. Those of the memory unit are for 4 bytes per lane. By NVIDIA's table of throughputs for compute
capability 9.0; conversions as for 8.0, which has fewer."""

PIPE_OF = {name: (pipe, clocks) for pipe, (clocks, names) in CLOCKS.items() for name in names.split()}


class Instruction(NamedTuple):
    name: str
    """With its modifiers, as in "HMMA.16816.F32.BF16"."""

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def products(self) -> int:
        """Return the products that a warp's tensor core adds; 0 if the text does not say."""
        if shape := re.match(r"HMMA\.(16)(8)(8|16)\.", self.name):
            rows, columns, depth = (int(each) for each in shape.groups())
            return rows * columns * depth
        if shape := re.match(r"HGMMA\.64x(\d+)x(\d+)", self.name):  # four warps share the 64 rows
            return 16 * int(shape[1]) * int(shape[2])
        return 0

    @property
    def group(self) -> str:
        return CLASS_OF.get(self.base, "other")


class Pass(NamedTuple):
    """What one pass of a warp through a loop costs."""

    classes: Counter[str]
    """Instructions by class."""
    clocks: Counter[str]
    """Clocks of a scheduler by pipe, and its issue slots as "issue"."""
    products: int
    """Products of tensor cores; 0 if the text does not say."""

    @property
    def bound(self) -> str:
        """The pipe that takes the most clocks."""
        return max(self.clocks, key=lambda pipe: self.clocks[pipe])


def parsed(sass: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """Return the instructions of a text of nvdisasm, and the first and last one of each loop."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    loops = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(
            r"\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line
        ):
            instructions.append(Instruction(found[1]))
            target = re.search(r"\.L_x_\d+", found[2])
            # A program ends with a jump to itself.
            if (
                found[1].startswith("BRA")
                and target
                and labels.get(target[0], len(instructions)) < len(instructions) - 1
            ):
                loops.append((labels[target[0]], len(instructions) - 1))
    return instructions, loops


def inner_loop(sass: str) -> list[Instruction]:
    """
    Return the loop without loops in it that has the most tensor core instructions; of several the shortest,
    which has no masks. Without such instructions it is the longest one, and without loops the whole program.
    """
    instructions, loops = parsed(sass)
    innermost = [
        instructions[first : last + 1]
        for first, last in loops
        if not any(first <= other and end <= last and (other, end) != (first, last) for other, end in loops)
    ]

    def rank(loop: Sequence[Instruction]) -> tuple[int, int]:
        tensor = sum(each.group == "tensor" for each in loop)
        return tensor, -len(loop) if tensor else len(loop)

    return max(innermost, key=rank, default=instructions)


def cost(loop: Sequence[Instruction], tensor: int) -> Pass:
    """Count a loop. `tensor`: as of `Device`."""
    clocks: Counter[str] = Counter(issue=len(loop))
    for each in loop:
        if each.products:
            clocks["tensor cores"] += each.products // tensor
        elif each.base in PIPE_OF:
            pipe, needed = PIPE_OF[each.base]
            wide = re.search(r"\.(64|128)\b", each.name) if pipe == "memory unit" else None
            if each.base in ("LDSM", "STSM"):
                wide = re.search(r"\.([24])$", each.name)
                clocks[pipe] += needed * (int(wide[1]) if wide else 1)
            else:
                clocks[pipe] += needed * (int(wide[1]) // 32 if wide else 1)
    return Pass(Counter(each.group for each in loop), clocks, sum(each.products for each in loop))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A kernel's inner loop for one weight, or one key, in each lane."""

    classes: dict[str, float]
    """Instructions by class."""
    clocks: float
    """Clocks of a scheduler for 32 of them."""
    bound: str

    def per_clock(self) -> float:
        """Return weights per clock and multiprocessor."""
        return WARP_SCHEDULERS * LANES / self.clocks

    def of_memory(self, device: Device, size: float) -> float:
        """Return the share of the memory's rate that the instructions allow for weights of `size` bytes."""
        return self.per_clock() * device.multiprocessors * device.clock * size / device.memory

    @property
    def instructions(self) -> float:
        return sum(self.classes.values())


def ceiling(counted: Pass, weights: float, tiles: int = 1) -> Ceiling:
    """`weights`: of a warp in a pass. `tiles`: how often each weight is read, for several tiles of rows."""
    share = tiles * LANES / weights
    return Ceiling(
        {name: share * count for name, count in counted.classes.items()},
        share * counted.clocks[counted.bound],
        counted.bound,
    )


def weights_of(constants: dict[str, Any], warps: int, products: int) -> float:
    """Return the weights of a warp in a pass, by a kernel's constants and, if it is known, its products."""
    layout: Layout | None = constants.get("LAYOUT")
    step = int(constants["STEP"]) if layout is None else layout.step
    if "ROWS" not in constants:
        return float(constants["OUTPUTS"] * constants.get("STEPS", 1) * step / warps)
    if products:
        # The compiler may have unrolled the loop. With minima, inputs are multiplied by ones, too.
        doubled = layout is not None and layout.offset == "minima" and not constants["ROUNDED"]
        return products / float(constants["ROWS"]) / (2 if doubled else 1)
    return float(constants["COLUMNS"] * step / warps)


def bytes_per_weight(matrix: Quantized) -> float:
    weights = repack(unpack(merged(matrix.parts)[0], matrix.inputs))
    return weights.nbytes / (weights.outputs * weights.inputs)


def counted(compiled: Any, tensor: int) -> Pass:
    """Count the inner loop of a compiled kernel. `tensor`: as of `Device`."""
    return cost(inner_loop(compiling.disassembled(compiled.asm["cubin"], "nvdisasm", "-c")), tensor)


ROWS = (1, 8, 32, 100, 300)
"""Rows of a product. For the last one, the matrix is expanded, and a library multiplies."""

COLUMNS = {"integer": 7, "convert": 7, "float": 5, "tensor": 6, "load": 5, "shared": 6, "other": 5}
"""Widths of the columns of classes."""

HEADER = f"{'':>34} {' '.join(f'{name:>{width}}' for name, width in COLUMNS.items())} {'all':>6}"


def line(name: str, of: Ceiling, end: str) -> str:
    cells = " ".join(f"{of.classes.get(each, 0):>{width}.2f}" for each, width in COLUMNS.items())
    return f"{name:>34} {cells} {of.instructions:>6.2f}  {end} (bound by {of.bound})"


def multiplications(captured: Sequence[Launch]) -> Iterator[Launch]:
    """Yield the launches that read weights: not those that add splits."""
    return (each for each in captured if each.name != "_add_splits")


def product_lines(name: str, matrix: Quantized, target: str, device: Device) -> Iterator[str]:
    """Yield a line for each number of rows."""
    size = bytes_per_weight(matrix)
    for rows in ROWS:
        launches = compiling.quantized_launches(matrix, torch.bfloat16, compiling.SHARED[target], (rows,))
        for launch in multiplications(launches):
            yield weight_line(f"{name}, {rows} rows", launch, rows, size, target, device)


def weight_line(name: str, launch: Launch, rows: int, size: float, target: str, device: Device) -> str:
    """Return a line for a product of `rows` rows with weights of `size` bytes."""
    loop = counted(compiling.build(launch, target), device.tensor)
    weights = weights_of(launch.constants, launch.options.get("num_warps", 4), loop.products)
    tiles = -(-rows // launch.constants["ROWS"]) if "ROWS" in launch.constants else 1
    of = ceiling(loop, weights, tiles)
    if launch.name == "_expand":
        size += 2  # it writes them, too
    shares = f"{of.of_memory(device, size):>5.0%} of memory"
    if busy := loop.clocks["tensor cores"]:
        shares += f", {busy / loop.clocks[loop.bound]:>4.0%} of tensor cores"
    return line(name, of, shares)


def expert_lines(target: str, device: Device) -> Iterator[str]:
    """Yield lines for experts: of few tokens, whose weights count, and of many."""
    memory = compiling.SHARED[target]
    for tokens in (40, 400):
        launches = (
            each
            for each in compiling.expert_launches(torch.bfloat16, memory, tokens)
            if each.name.startswith("_multiply")
        )
        kinds = ("bf16", None, *(form.name for form in compiling.EXPERT_FORMATS))
        for kind, launch in zip(kinds, launches, strict=True):
            if kind is not None:
                rows = tokens * 4 // 32
                size = 2.0 if kind == "bf16" else bytes_per_weight(compiling.matrix_of(Format[kind]))
                yield weight_line(f"experts, {kind}, {rows} pairs each", launch, rows, size, target, device)


def attention_lines(target: str, device: Device) -> Iterator[str]:
    """Yield lines for the prompts and single tokens of a model. The unit is a key of a head in all lanes."""
    captured = compiling.launches(
        compiling.spec_of("llama"), torch.bfloat16, torch.bfloat16, compiling.SHARED[target]
    )
    seen = set()
    for launch in (each for each in captured if each.name == "_attention"):
        constants = launch.constants
        if constants["PARTIAL"] in seen:
            continue
        seen.add(constants["PARTIAL"])
        loop = counted(compiling.build(launch, target), device.tensor)
        of = ceiling(loop, constants["TILE"] / launch.options.get("num_warps", 4))
        if constants["PARTIAL"]:
            share = f"{of.of_memory(device, 2 * 2 * constants['D']):>5.0%} of memory"
        else:
            share = f"{loop.clocks['tensor cores'] / loop.clocks[loop.bound]:>5.0%} of tensor cores"
        yield line(f"attention, {'a token' if constants['PARTIAL'] else 'a prompt'}", of, share)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", default="sm_90", choices=[each for each in compiling.TARGETS if each.startswith("sm")]
    )
    parser.add_argument("--device", default="H200", choices=list(DEVICES))
    formats = ",".join(form.name for form in compiling.ROW_BYTES)
    parser.add_argument("--formats", default=formats, help="of quantized matrices; empty: none")
    parser.add_argument("--all", action="store_true", help="add all kernels that are compiled")
    options = parser.parse_args()
    device = DEVICES[options.device]
    packed.converts_float8 = lambda device: options.target in compiling.CONVERTING
    print(f"{options.target}, {options.device}; instructions of a warp for 32 weights\n{HEADER}")
    for name in filter(None, options.formats.split(",")):
        matrices = {name: compiling.matrix_of(Format[name])}
        if name in ("INT4", "Q8_0"):
            matrices[f"{name} of 128"] = compiling.matrix_of(Format[name], joined=True)
        for title, matrix in matrices.items():
            for each in product_lines(title, matrix, options.target, device):
                print(each, flush=True)
    for each in (*expert_lines(options.target, device), *attention_lines(options.target, device)):
        print(each, flush=True)
    if options.all:
        print("\ninner loops of all kernels, with the bytes of shared memory and stack")
        for name, captured in compiling.cases(options.target).items():
            for launch in captured:
                compiled = compiling.build(launch, options.target)
                loop = counted(compiled, device.tensor)
                classes = ", ".join(f"{count} {group}" for group, count in loop.classes.most_common())
                memory = f"{compiled.metadata.shared:>7} {compiling.spilled(compiled):>5}"
                print(f"{name:>24} {launch.name:>20} {memory}  {classes} (bound by {loop.bound})", flush=True)


if __name__ == "__main__":
    main()
