"""Training on pairs of answers, one preferred to the other: reward models, and direct preference optimisation."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from areal.api import TrainEngine
from areal.trainer.losses import Objective, dpo_objective, reward_objective
from areal.trainer.reference import check_reference, start_reference
from areal.trainer.supervised import SupervisedOptions, SupervisedTrainer
from areal.utils.data import Segment, ShardedLoader, from_segments


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as token ids. Each answer includes the token that ends it."""

    prompt: collections.abc.Sequence[int]
    chosen: collections.abc.Sequence[int]
    rejected: collections.abc.Sequence[int]

    def samples(self, number: int = 0) -> list[dict[str, Tensor]]:
        """Return two samples, chosen and rejected, with ``loss_mask`` on the answers.

        Args:
            number: value of ``pair_ids`` in both samples, by which losses check that a pair is complete.
        """
        return [
            from_segments([Segment(list(self.prompt), trainable=False), Segment(list(answer), trainable=True)])
            | {"pair_ids": torch.tensor(number)}
            for answer in (self.chosen, self.rejected)
        ]


def flatten_pairs(pairs: collections.abc.Sequence[Pair]) -> list[dict[str, Any]]:
    """Return the samples of all pairs, the chosen one of each pair directly before the rejected one."""
    return [sample for number, pair in enumerate(pairs) for sample in pair.samples(number)]


def reward_trainer(
    engine: TrainEngine, loader: ShardedLoader, *, center_coef: float = 0.0, **options: Unpack[SupervisedOptions]
) -> SupervisedTrainer:
    """Return a trainer of a reward model: the value at the last token of the better answer is to be the larger one.

    Args:
        engine: initialized, with ``value_head=True`` and ``mb_spec.granularity=2``.
        loader: yields lists of :class:`Pair`.
        center_coef: weight of the term that keeps rewards near 0; see :func:`~areal.trainer.losses.reward_objective`.
        options: passed to :class:`~areal.trainer.supervised.SupervisedTrainer`.

    Raises:
        ValueError: the engine was created without a value head, or may split pairs.
    """
    if not engine.config.value_head:
        raise ValueError("value_head = False: a reward model is read from the value head: set value_head=True")
    _check_granularity(engine)
    # The objective checks center_coef.
    objective = reward_objective(center_coef=center_coef)
    return SupervisedTrainer(engine, objective, loader, prepare=flatten_pairs, **options)


def dpo_trainer(
    engine: TrainEngine,
    reference: TrainEngine,
    loader: ShardedLoader,
    *,
    objective: Objective | None = None,
    **options: Unpack[SupervisedOptions],
) -> SupervisedTrainer:
    """Return a trainer of DPO (Rafailov et al., 2023), or of another objective on pairs that reads ``ref_logprobs``.

    Args:
        engine: initialized, with ``mb_spec.granularity=2``.
        reference: initialized, without optimizer, on the same data-parallel layout. With adapters it may be the engine itself: its model
            without them is the reference.
        loader: yields lists of :class:`Pair`.
        objective: default :func:`~areal.trainer.losses.dpo_objective`; ``ipo_objective`` is another.
        options: passed to :class:`~areal.trainer.supervised.SupervisedTrainer`.

    Raises:
        ValueError: the engine may split pairs, or the reference has another data-parallel layout.
    """
    _check_granularity(engine)
    check_reference(engine, reference)

    # The reference's log-probs are computed per batch, immediately before the step that reads them.
    def prepare(pairs: collections.abc.Sequence[Pair]) -> list[dict[str, Any]]:
        samples = engine.put(flatten_pairs(pairs))
        return [
            sample | {"ref_logprobs": logprobs}
            for sample, logprobs in zip(samples, start_reference(engine, reference, samples).result(), strict=True)
        ]

    return SupervisedTrainer(engine, objective or dpo_objective(), loader, prepare=prepare, **options)


def _check_granularity(engine: TrainEngine) -> None:
    """Raise unless the engine keeps both sequences of a pair in one micro-batch.

    Raises:
        ValueError: ``mb_spec.granularity`` is odd.
    """
    granularity = engine.config.mb_spec.granularity
    if granularity % 2:
        raise ValueError(
            f"mb_spec.granularity = {granularity}: the two sequences of a pair must stay in one micro-batch: set it to 2"
        )
