"""The checks of a batch: an engine makes them on each rank, and the driver of a group before it sends anything."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config import MicroBatchSpec
from areal.api.engine import BatchInput, Outputs, TrainEngine
from areal.engine.loss_step import check_outputs
from areal.engine.model.inputs import check_temperature
from areal.engine.moe.routing import RoutingRules
from areal.utils.data import BatchPlan, plan_batch


@dataclass(frozen=True)
class BatchRules:
    """Rules of an engine for a batch and the outputs of a call. They pickle, and are equal on all ranks.

    Attributes:
        spec: budget and granularity of micro-batches.
        align: divisor of the padded length of a micro-batch.
        vocab_size: upper bound of token ids.
        value_head: True if the model has a value head.
        routing: rules for the recorded routing of experts.
    """

    spec: MicroBatchSpec
    align: int
    vocab_size: int
    value_head: bool
    routing: RoutingRules

    def check_outputs(self, outputs: Outputs) -> None:
        """Check that the model has the requested outputs.

        Raises:
            ValueError: names the output and the way out.
        """
        check_outputs(outputs, value_head=self.value_head, vocab_size=self.vocab_size)
        self.routing.check_outputs(outputs)

    def plan(self, batch: BatchInput, outputs: Outputs, *, trees: bool = True) -> BatchPlan:
        """Check a batch and divide it into micro-batches, without communication.

        Args:
            batch: padded dict or list of samples.
            outputs: per-token outputs that the call computes.
            trees: as in :func:`~areal.utils.data.plan_batch`.

        Raises:
            ValueError: the batch or an output is invalid. Names the key, the value and the way out.
        """
        self.check_outputs(outputs)
        plan = plan_batch(batch, self.spec, align=self.align, vocab_size=self.vocab_size, trees=trees)
        check_temperature(plan)
        self.routing.check(plan)
        return plan


def rules_of(engine: TrainEngine) -> BatchRules | None:
    """Return the rules of an initialized engine; ``None`` for one that does not derive from the template, and checks batches itself."""
    return getattr(engine, "batch_rules", None)
