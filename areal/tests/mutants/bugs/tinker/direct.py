"""Bugs of the protocol's verbs as plain calls that the suite must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal.tests.mutants.planting import Function, mutant

TRAINER = "unit/tinker/direct/test_direct_trainer.py::test_{}"
SAMPLER = "unit/tinker/direct/test_direct_sampler.py::test_{}"


@mutant("areal.tinker.direct.trainer:_fold_weights", TRAINER.format("weights_multiply_a_clipped_loss"))
def weights_are_ignored(right: Function) -> Function:
    """Weights of a loss that does not read them are left out."""
    return lambda where, datum: replace(
        right(where, datum), values={name: x for name, x in datum.values.items() if name != "weights"}
    )


@mutant("areal.tinker.direct.trainer:_output", TRAINER.format("refused_request_fails_alone"))
def losses_without_weights(right: Function) -> Function:
    """The loss of each target is that of a weight of 1."""

    def wrong(batch: Any, result: Any) -> Any:
        output = right(batch, result)
        return replace(output, losses=[-logprobs for logprobs in result.logprobs])

    return wrong


@mutant("areal.tinker.direct.sampler:DirectSampler.release", SAMPLER.format("latest_snapshot_of_a_model_is_open"))
def snapshot_of_a_deleted_model_stays_open(right: Function) -> Function:
    """The sampler keeps the weights of a model that was deleted."""
    return lambda self, model_id: self.snapshots.pop(model_id, None)
