"""Counting the instructions of machine code, on short texts of nvdisasm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_engine.ops.kernels.packed import Layout
from benchmarks.kernel_code import DEVICES, Instruction, ceiling, cost, inner_loop, weights_of

SASS = """
_multiply:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0b30*/                   ULDC.64 UR22, c[0x0][0x220] ;
.L_x_1:
        /*0b40*/                   DEPBAR.LE SB0, 0x2 ;
        /*0bd0*/              @!P4 LDG.E.U16 R38, desc[UR20][R16.64] ;
        /*0d20*/                   LDSM.16.M88.4 R12, [R12+UR37] ;
        /*0d90*/                   SHF.R.U32.HI R32, RZ, 0x4, R4 ;
        /*0db0*/                   LOP3.LUT R20, R16.reuse, 0x43004300, R17, 0xec, !PT ;
        /*0e10*/                   HADD2.BF16_V2 R20, R20, -136, -136 ;
        /*0e70*/                   HMMA.16816.F32.BF16 R16, R16, R20, RZ ;
        /*1230*/              @!PT LDS.64 RZ, [RZ] ;
        /*12e0*/                   I2F.S8 R12, R38.B1 ;
        /*1390*/                   IMAD.MOV.U32 R3, RZ, RZ, R17 ;
        /*13a0*/              @!P6 BRA `(.L_x_1) ;
.L_x_2:
        /*13b0*/                   FADD R8, RZ, R39 ;
        /*13c0*/                   FADD R9, RZ, R39 ;
        /*13d0*/               @P0 BRA `(.L_x_2) ;
        /*18f0*/                   EXIT ;
.L_x_3:
        /*1900*/                   BRA `(.L_x_3);
        /*1910*/                   NOP;
"""


def test_inner_loop_is_the_one_with_tensor_cores() -> None:
    loop = inner_loop(SASS)
    assert [each.base for each in loop][:2] == ["DEPBAR", "LDG"]
    assert loop[-1].name == "BRA"
    counted = cost(loop, DEVICES["H100"].tensor)
    assert counted.classes == {
        "other": 2, "load": 1, "shared": 2, "integer": 3, "float": 1, "tensor": 1, "convert": 1,
    }  # fmt: skip
    # A load, four matrices of 8 x 8, and 8 bytes a lane.
    assert counted.clocks == {
        "issue": 11, "memory unit": 4 + 16 + 8, "half": 4, "multiplier": 2, "float": 1, "slow": 8,
        "tensor cores": 4,
    }  # fmt: skip
    assert counted.bound == "memory unit"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(SASS.replace("HMMA", "FFMA"), 11, id="no tensor cores: the longest loop"),
        pytest.param("/*0000*/ MOV R1, R2 ;\n/*0010*/ EXIT ;", 2, id="no loop: the whole program"),
        pytest.param(SASS + SASS.replace("_1", "_4").replace("/*0db0*/", "//"), 10, id="the shorter one"),
        pytest.param(".L_x_0:\n/*0000*/ NOP ;\n" + SASS + "/*1920*/ @P1 BRA `(.L_x_0) ;", 11, id="nested"),
    ],
)
def test_inner_loop_of(text: str, expected: int) -> None:
    assert len(inner_loop(text)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16", 16 * 128 * 16),
        ("UTCHMMA", 0),
        ("FFMA", 0),
    ],
)
def test_products_of_an_instruction(name: str, expected: int) -> None:
    assert Instruction(name).products == expected


LAYOUT = Layout(
    kind="int4", zero=0, offset="none", superblock=0, step=128, parts=4, group_parts=1, width=16, even=True,
    by_output=False,
)  # fmt: skip


def test_weights_of_a_pass() -> None:
    tile = {"LAYOUT": LAYOUT, "ROWS": 16, "COLUMNS": 64, "ROUNDED": False}
    assert weights_of(tile, 4, 0) == 64 * 128 / 4
    assert weights_of(tile, 4, 16 * 4096) == 4096, "the compiler unrolled the loop twice"
    minima = tile | {"LAYOUT": replace(LAYOUT, offset="minima")}
    assert weights_of(minima, 4, 16 * 4096) == 2048, "ones are multiplied, too"
    assert weights_of({"STEP": 64, "STEPS": 32, "OUTPUTS": 4}, 4, 0) == 2048


def test_ceiling_of_a_loop() -> None:
    """Twice the instructions for each weight, or each weight for two tiles of rows, are half the rate."""
    counted = cost(inner_loop(SASS.replace("LDSM.16.M88.4", "NOP")), 512)
    assert counted.bound == "memory unit"
    once, twice = ceiling(counted, 64), ceiling(counted, 64, tiles=2)
    assert once.clocks == 6
    assert once.per_clock() == 4 * 32 / 6
    assert twice.per_clock() == once.per_clock() / 2
    assert twice.instructions == 2 * once.instructions == 11
    device = DEVICES["H200"]._replace(multiprocessors=100, clock=1.5e9, memory=3.2e12)
    assert once.of_memory(device, 0.5) == pytest.approx(0.5)
