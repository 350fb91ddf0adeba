"""Direct preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.api import TrainEngine
from areal.trainer.checks import check_granularity
from areal.trainer.losses import Objective, dpo_objective
from areal.trainer.pairs import Pair, flatten
from areal.trainer.reference import check_reference, reference_logprobs
from areal.trainer.supervised import SupervisedTrainer
from areal.utils.data import ShardedLoader


def dpo_trainer(
    engine: TrainEngine,
    reference: TrainEngine,
    loader: ShardedLoader,
    *,
    objective: Objective | None = None,
    **options: Any,
) -> SupervisedTrainer:
    """A trainer of DPO (Rafailov et al., 2023), or of another objective on pairs that reads ``ref_logprobs``.

    Args:
        engine: initialized, with ``mb_spec.granularity=2``.
        reference: the model to stay near to, initialized, without optimizer; on the same data-parallel layout. The engine itself, where it has
            adapters: its model without them.
        loader: yields lists of :class:`~areal.trainer.pairs.Pair`.
        objective: :func:`~areal.trainer.losses.dpo_objective` by default; ``ipo_objective`` is another.
        options: of :class:`~areal.trainer.supervised.SupervisedTrainer`.

    Raises:
        ValueError: the engine may split pairs, or the reference has another data-parallel layout.
    """
    check_granularity(engine)
    check_reference(engine, reference)

    def prepare(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        samples = flatten(pairs)
        return [
            sample | {"ref_logprobs": logprobs}
            for sample, logprobs in zip(samples, reference_logprobs(engine, reference, samples), strict=True)
        ]

    return SupervisedTrainer(engine, objective or dpo_objective(), loader, prepare=prepare, **options)
