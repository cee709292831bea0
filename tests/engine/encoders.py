"""Tiny encoders with random weights, as embedders and as cross encoders, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.engine.models import CORPUS, SEED

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
CONTEXT = 64
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "Model", {}),
    "bert with gelu_new": ("Bert", "Model", {"hidden_act": "gelu_new"}),
    "roberta": ("Roberta", "Model", {}),
    "xlm-roberta": ("XLMRoberta", "Model", {}),
    "bert cross encoder": ("Bert", "ForSequenceClassification", {"num_labels": 1}),
    "xlm-roberta cross encoder": ("XLMRoberta", "ForSequenceClassification", {"num_labels": 1}),
    "bert classifier": ("Bert", "ForSequenceClassification", {"num_labels": 3}),
}
"""Family, head, and what the configuration sets beyond `SIZES`."""


def make_encoder(
    folder: Path, variant: str, *, pooling: str = "", normalizes: bool = False, **config: Any
) -> Path:
    """A checkpoint of `variant` in `folder`. `pooling` is sentence-transformers' mode; empty: no modules."""
    import transformers

    family, head, flags = VARIANTS[variant]
    tokenizer = _tokenizer(typed=family == "Bert")
    first = 0 if family == "Bert" else SPECIAL.index("[PAD]") + 1
    sizes: dict[str, Any] = SIZES | {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT + first,
        "type_vocab_size": 2 if family == "Bert" else 1,
        "pad_token_id": SPECIAL.index("[PAD]"),
    }
    torch.manual_seed(SEED)
    model = getattr(transformers, f"{family}{head}")(
        getattr(transformers, f"{family}Config")(**(sizes | flags | config))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "LayerNorm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: f"[{name[:3].upper()}]" for name in ("cls_token", "sep_token", "pad_token", "unk_token")},
    ).save_pretrained(folder)
    if pooling:
        _save_modules(folder, pooling, normalizes)
    return folder


def _tokenizer(*, typed: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    kind = ":1" if typed else ":0"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B{kind} [SEP]{kind}",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(8)  # as many such checkpoints have it; a worker rejects instead of cutting
    return tokenizer


def _save_modules(folder: Path, pooling: str, normalizes: bool) -> None:
    steps = ("Transformer", "Pooling", *(("Normalize",) if normalizes else ()))
    modules = [
        {
            "idx": place,
            "path": f"{place}_{step}" if place else "",
            "type": f"sentence_transformers.models.{step}",
        }
        for place, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
