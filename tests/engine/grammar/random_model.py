"""A model that draws random logits for each row, but for tokens that it prefers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from tests.engine import fake_model
from tests.engine.fake_model import FakeModel


class RandomModel(FakeModel):
    """Likes what ends things, so that its texts do."""

    def __init__(self, vocab: int, liking: Mapping[int, float]) -> None:
        super().__init__(dataclasses.replace(fake_model.SPEC, vocab=2))
        self.spec = dataclasses.replace(fake_model.SPEC, vocab=vocab)
        self._chance = torch.Generator().manual_seed(11)
        self._bias = torch.zeros(vocab)
        self._bias[list(liking)] = torch.tensor(list(liking.values()))

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        rows = len(batch.wanted_at)
        return torch.randn((rows, self.spec.vocab), generator=self._chance) + self._bias
