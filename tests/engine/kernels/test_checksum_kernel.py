"""The kernel of checksums against torch, and that it compiles is in `compiling`."""

from __future__ import annotations

import pytest
import torch

from baton_engine.ops.kernels.checksums import TILE, mixed_sums
from baton_engine.transfer.integrity import KEYS, WordLayout, word_sums
from tests.engine.kernels.cases import DEVICE


@pytest.mark.parametrize("layout", [(TILE * 4, 0, 0), (12, 36, 24), (1024, 4096, 1024)], ids=str)
@pytest.mark.parametrize("size", [4, 1024, TILE - 1, TILE, 2 * TILE + 5])
def test_checksum_kernel_gives_the_sums_of_torch(size: int, layout: WordLayout) -> None:
    """Words are a section of longer rows."""
    torch.manual_seed(size)
    rows = torch.randint(256, (5, 8 * (size + 6)), dtype=torch.uint8, device=DEVICE).view(torch.int64)
    words = rows[:, 2 : size + 2]
    blocks = torch.tensor([4, 0, 4, 2], device=DEVICE)
    assert (
        mixed_sums(words, blocks, KEYS, layout).tolist() == word_sums(words, blocks.tolist(), layout).tolist()
    )


def test_checksum_kernel_of_no_blocks_launches_nothing() -> None:
    words = torch.zeros(5, 8, dtype=torch.int64, device=DEVICE)
    assert mixed_sums(words, torch.zeros(0, dtype=torch.int64, device=DEVICE), KEYS, (8, 8, 0)).tolist() == []
