"""A reward model from pairs of answers."""

from __future__ import annotations

from typing import Any

from areal.api import TrainEngine
from areal.trainer.checks import check_granularity
from areal.trainer.losses import reward_objective
from areal.trainer.pairs import flatten
from areal.trainer.supervised import SupervisedTrainer
from areal.utils.data import ShardedLoader


def reward_trainer(
    engine: TrainEngine, loader: ShardedLoader, *, center_coef: float = 0.0, **options: Any
) -> SupervisedTrainer:
    """A trainer after which the value at the last token of the better answer is the larger one.

    Args:
        engine: initialized, with ``value_head=True`` and ``mb_spec.granularity=2``.
        loader: yields lists of :class:`~areal.trainer.pairs.Pair`.
        center_coef: of :func:`~areal.trainer.losses.reward_objective`.
        options: of :class:`~areal.trainer.supervised.SupervisedTrainer`.

    Raises:
        ValueError: the engine has no value head, or may split pairs.
    """
    if not engine.config.value_head:
        raise ValueError("value_head = False: a reward model is read from the value head: set value_head=True")
    check_granularity(engine)
    return SupervisedTrainer(engine, reward_objective(center_coef=center_coef), loader, prepare=flatten, **options)
