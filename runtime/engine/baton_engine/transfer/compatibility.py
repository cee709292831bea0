"""
Compatibility of the KV blocks of two workers: a digest of everything that determines the bytes of a block.

Two workers compare digests before they exchange other data. The labels of the digest are sent with it, so
that an error can name the differences with both values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from baton_api.messages import PROTOCOL
from baton_engine.kv.cache import BLOCK_SIZE, FLOAT8_CACHE
from baton_engine.ops.native.products import ONE_ORDER
from baton_engine.spec import ModelSpec

LAYOUT = "block, layer, key/value, kv head, slot, dim"
"""The order of `KVCache.kv`'s dimensions."""

LATENT_LAYOUT = "block, layer, latent, slot, dim"
"""The order for latent attention, whose blocks have neither keys and values nor heads."""

BYTES_DO_NOT_DEPEND_ON = frozenset(
    {"context", "eos_ids", "bos_id", "tied_embeddings", "headless", "draft_layers"}
)
"""Fields of a spec that do not affect the bytes of blocks."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Everything that determines the bytes of a worker's KV blocks."""

    labels: Mapping[str, str]
    """Readable names and values. Equal labels have equal digests."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: str,
        block_size: int = BLOCK_SIZE,
        kv_dtype: torch.dtype | None = None,
        products: str = ONE_ORDER,
    ) -> Compatibility:
        """
        Create it from the model. `weights` is `weights_digest`.

        `dtype` is of weights, and of the KV cache without `kv_dtype`. `products` is `Products.sums` of a
        model that the native kernels compute in bfloat16. All others have the label of the kernels' basic
        way, so that they pair with CPU workers that have it.
        """
        model = {
            field.name.replace("_", " "): str(getattr(spec, field.name))
            for field in fields(spec)
            if field.name not in BYTES_DO_NOT_DEPEND_ON
        }
        kind, cache_kind = (str(given).removeprefix("torch.") for given in (dtype, kv_dtype or dtype))
        return cls(
            {
                "protocol": str(PROTOCOL),
                **model,
                "weights": weights,
                "dtype": kind,
                "kv dtype": "fp8" if kv_dtype == FLOAT8_CACHE else cache_kind,
                "products": products,
                "block size": str(block_size),
                "layout": LAYOUT if spec.latent is None else LATENT_LAYOUT,
            }
        )

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal on all machines for equal labels."""
        hasher = hashlib.sha256(b"baton-compatibility")
        for name, value in sorted(self.labels.items()):
            for text in (name.encode(), value.encode()):
                hasher.update(len(text).to_bytes(4) + text)
        return hasher.hexdigest()[:32]

    def differences(self, theirs: Mapping[str, str]) -> str:
        """
        Return the differing labels with both values, for an error message.

        >>> Compatibility({"dtype": "float32"}).differences({"dtype": "bfloat16"})
        'dtype is float32 here and bfloat16 there'
        """
        names = dict.fromkeys((*self.labels, *theirs))
        return ", ".join(
            f"{name} is {self.labels.get(name, 'unknown')} here and {theirs.get(name, 'unknown')[:200]} there"
            for name in names
            if self.labels.get(name) != theirs.get(name)
        )
