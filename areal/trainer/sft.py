"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from areal.api import TrainEngine
from areal.trainer.losses import sft_objective
from areal.trainer.supervised import SupervisedTrainer
from areal.utils.data import ShardedLoader, where_trained


def sft_trainer(engine: TrainEngine, loader: ShardedLoader, **options: Any) -> SupervisedTrainer:
    """A trainer that minimises the cross-entropy of the tokens that ``loss_mask`` weighs, per weight.

    Args:
        engine: initialized.
        loader: yields lists of samples with ``input_ids`` and perhaps ``loss_mask``; see :mod:`areal.utils.data.sequences`.
        options: of :class:`~areal.trainer.supervised.SupervisedTrainer`.
    """
    return SupervisedTrainer(engine, sft_objective(), loader, **{"prepare": _only_answers} | options)


def _only_answers(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [where_trained(sample) if "loss_mask" in sample else sample for sample in samples]
