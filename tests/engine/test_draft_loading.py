"""Loading of draft models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.progress import SILENT
from baton_engine.model.spec import Quantize
from baton_engine.settings import WorkerSettings
from baton_engine.speculation.loading import load_draft
from baton_engine.worker import open_worker
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(("choice", "kept"), [("keep", "keep"), ("off", "off"), ("q4_0", "keep")])
def test_draft_model_keeps_its_formats(choice: str, kept: Quantize, tmp_path: Path) -> None:
    """`--quantize q4_0` converts the model that drafts are for, not the draft model."""
    path = write_gguf(make_model(tmp_path / "model"), tmp_path / "draft.gguf", quantised=True)
    checkpoint = Checkpoint(path, "draft")
    spec = load_spec(checkpoint)
    settings = WorkerSettings.model_validate(
        {"model": "m", "speculation": "draft", "draft_model": str(path), "quantize": choice}
    )
    model, taken = load_draft(settings, spec, CPU, torch.float32, SILENT, None)
    assert model is not None
    assert taken == load_weights(checkpoint, spec, torch.float32, quantize=kept).bytes


async def test_draft_model_that_would_never_draft_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernels round differently for other numbers of tokens, so drafts could change answers."""
    monkeypatch.setenv("BATON_KERNELS", "off")
    model = str(make_model(tmp_path / "model"))
    settings = WorkerSettings.model_validate(
        {"model": model, "speculation": "draft", "draft_model": model, "device": "cpu", "dtype": "float32"}
    )
    with pytest.raises(SetupError, match="--speculation draft has no effect with these kernels"):
        async with open_worker(settings):
            pass
