"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from areal.api import TrainEngine
from areal.trainer.losses import sft_objective
from areal.trainer.supervised import SupervisedTrainer
from areal.utils.data import ShardedLoader


def sft_trainer(engine: TrainEngine, loader: ShardedLoader, **options: Any) -> SupervisedTrainer:
    """A trainer that minimises the cross-entropy of the tokens that ``loss_mask`` weighs, per weight.

    Args:
        engine: initialized.
        loader: yields lists of samples with ``input_ids`` and perhaps ``loss_mask``; see :mod:`areal.utils.data.sequences`.
        options: of :class:`~areal.trainer.supervised.SupervisedTrainer`.
    """
    return SupervisedTrainer(engine, sft_objective(), loader, **options)
