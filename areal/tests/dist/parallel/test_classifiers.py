"""Critics and reward models that transformers stores as classifiers: loaded, trained and saved as such."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from areal.api import Batch, FinetuneSpec, OptimizerConfig, SaveLoadMeta, TokenOutputs
from areal.engine.registry import create_engine
from areal.tests.harness.tiny import config, family_dir, global_batch, layouts, local_batch, started, writing
from areal.tests.harness.world import world

KINDS: dict[str, Any] = {"tokens": AutoModelForTokenClassification, "sequences": AutoModelForSequenceClassification}
OPTIMIZER = OptimizerConfig(lr=0.01, gradient_clipping=None, eps=1e-4)


def classifier(kind: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Return a random classifier of the tiny Qwen3, and write it to a folder of this rank."""
    settings = copy.deepcopy(AutoConfig.from_pretrained(family_dir("qwen3")))
    for name, value in {"num_labels": 1, "pad_token_id": 0, "classifier_dropout": 0.0, **changes}.items():
        setattr(settings, name, value)
    torch.manual_seed(3)
    model = KINDS[kind].from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_()
    with writing():
        model.save_pretrained(folder)
    return model.train()


def squares(out: TokenOutputs, batch: Batch) -> Tensor:
    return ((out.values - batch["advantages"]).square() * batch["loss_mask"]).sum()


def values_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.score(model.base_model(ids[None])[0])[0, :, 0]


def mean_square(model: PreTrainedModel, samples: list[dict[str, Tensor]]) -> Tensor:
    """Compute the loss of a global batch with transformers. The last position of a sequence has no target, and no weight."""
    losses = [
        (values_of(model, x["input_ids"])[:-1] - x["advantages"][:-1]).square() @ x["loss_mask"][:-1].float()
        for x in samples
    ]
    return torch.stack(losses).sum() / sum(x["loss_mask"][:-1].sum() for x in samples)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", layouts(1, 2, also=("fsdp:t2", "megatron:t2", "jax:d1", "jax:d2")))
def test_classifier_is_trained_as_by_torch_and_saved_as_one(backend: str, kind: str, tmp_path: Path) -> None:
    start = tmp_path / f"start-{world().rank}"
    model = classifier(kind, start)
    inner = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    with started(backend, path=str(start), value_head=True, optimizer=OPTIMIZER) as engine:
        batch = local_batch(engine, global_batch())
        for actual, sample in zip(engine.forward_batch(batch, outputs=("values",)), batch, strict=True):
            torch.testing.assert_close(actual, values_of(model, sample["input_ids"]).detach(), rtol=1e-4, atol=1e-4)
        for number in range(3):
            expected = mean_square(model, global_batch())
            expected.backward()
            step = engine.train_batch(batch, squares, outputs=("values",))
            assert step.loss == pytest.approx(expected.item(), rel=1e-4), number
            inner.step()
            inner.zero_grad()
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        saved, report = KINDS[kind].from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(report.values()), report
        assert saved.config.architectures == [type(model).__name__]
        expected_weights = dict(model.named_parameters())
        assert "score.weight" in expected_weights
        assert ("score.bias" in expected_weights) == (kind == "tokens")
        for name, parameter in saved.named_parameters():
            torch.testing.assert_close(parameter, expected_weights[name], rtol=0, atol=2e-4)
        # A checkpoint with the optimizer goes on from here.
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp", with_optim=True))
        after = engine.train_batch(batch, squares, outputs=("values",)).loss
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp", with_optim=True))
        assert engine.train_batch(batch, squares, outputs=("values",)).loss == after
    with started(backend, path=str(tmp_path / "saved"), value_head=True, optimizer=None) as engine:
        for actual, sample in zip(engine.forward_batch(batch, outputs=("values",)), batch, strict=True):
            torch.testing.assert_close(actual, values_of(saved, sample["input_ids"]).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", layouts(1, also=("jax:d1",)))
def test_classifier_that_is_no_value_head_is_refused(backend: str, tmp_path: Path) -> None:
    classifier("tokens", tmp_path / "one")
    classifier("tokens", tmp_path / "three", num_labels=3)
    for name, value_head, message in (
        ("one", False, "is a Qwen3ForTokenClassification, which has no output head: set value_head = True"),
        ("three", True, "with num_labels = 3, and a value head has one row"),
    ):
        engine = create_engine(config(backend, path=str(tmp_path / name), value_head=value_head))
        with pytest.raises(ValueError, match=message):
            engine.initialize(FinetuneSpec(total_train_steps=1))
