"""What the ranks of an engine agree on in a step: the number of micro-batches, the loss weights, the numbers reported.

Each is one exchange on the host that also carries any rank's fault, so that a fault raises on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from areal.api.loss import LossWeightFn
from areal.api.microbatch import MicroBatchList
from areal.engine.loss_step import LossResult, LossWeights, StepSums, local_weights, sum_results
from areal.engine.moe.balance_loss import RoutingSums
from areal.engine.moe.routing import Tally
from areal.engine.schedule import Schedule
from areal.utils.data import BatchPlan
from areal.utils.distributed import ControlPlane
from areal.utils.profiling.phase_timer import TimedCall

T = TypeVar("T")
Message = TypeVar("Message")


class StepSync:
    """Agreements over an engine's control plane. Made on every rank, collectively.

    Args:
        control: all ranks of the engine.
        mesh: of the engine. One rank speaks for each pipeline rank of each data-parallel coordinate; that with the last stage, where losses
            are, for the coordinate.
        last_stage: its pipeline rank.
    """

    def __init__(self, control: ControlPlane, mesh: DeviceMesh, last_stage: int) -> None:
        self._control = control
        at = {axis: mesh[axis].get_local_rank() for axis in ("dp", "pp", "cp", "tp")}
        of_stage = at["cp"] == at["tp"] == 0
        self._has_losses = at["pp"] == last_stage
        places = control.gather((at["dp"], of_stage and self._has_losses, of_stage))
        self._dp_ranks, self._mains, self._of_stages = zip(*places, strict=True)
        self._shared = not all(self._mains)

    def plan(self, plan_here: Callable[[], BatchPlan], schedule: Schedule) -> tuple[BatchPlan, int, int]:
        """Check and pack this rank's batch, and agree on the count.

        Args:
            plan_here: checks and packs; what it raises is raised on every rank.

        Returns:
            The plan, the number of micro-batches of every rank, and the longest padded length of any.

        Raises:
            ValueError: some rank's batch is wrong, or ranks of one data-parallel coordinate have different ones.
        """

        def plan_and_describe() -> tuple[BatchPlan, tuple[int, int, int]]:
            plan = plan_here()
            return plan, (plan.n_mbs, plan.padded_length, plan.digest() if self._shared else 0)

        plan, descriptions = self._exchange(plan_and_describe)
        counts, lengths, digests = zip(*descriptions, strict=True)
        self._check_same_batch(digests)
        return plan, schedule.round_up(max(1, *counts)), max(lengths)

    def _check_same_batch(self, digests: tuple[int, ...]) -> None:
        first: dict[int, int] = {}
        for rank, (digest, dp_rank) in enumerate(zip(digests, self._dp_ranks, strict=True)):
            known = first.setdefault(dp_rank, rank)
            if digests[known] != digest:
                raise ValueError(
                    f"ranks {known} and {rank} share data-parallel coordinate {dp_rank} but were passed different "
                    "batches: shard the data by engine.dp_rank, not by the global rank"
                )

    def weights(self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn, *, required: bool) -> LossWeights:
        """The loss weights of this rank's micro-batches and of the global batch.

        Args:
            required: refuse a global weight of 0.

        Raises:
            ValueError: the weights are wrong on some rank, or there is nothing to divide by.
        """

        def weigh() -> tuple[dict[int, dict[str, float]], tuple[bool, dict[str, float], tuple[int, int]]]:
            plain, per_mb = local_weights(mbs, loss_weight_fn)
            names = next(iter(per_mb.values()), {})
            sums = {name: sum(weights[name] for weights in per_mb.values()) for name in names}
            return per_mb, (plain, sums, (sum(len(mb.seqlens) for mb in mbs.real), mbs.n_tokens))

        per_mb, answers = self._exchange(weigh)
        # A rank without samples does not know the terms.
        terms = [(plain, sorted(sums)) for plain, sums, _ in answers if sums]
        if any(other != terms[0] for other in terms):
            raise ValueError(f"loss_weight_fn returned different terms on different ranks: {terms}")
        # Sum over the shards of the global batch.
        total: dict[str, float] = {}
        by_shard = self._once_per_shard(answers)
        for _, sums, _ in by_shard:
            total = {name: total.get(name, 0.0) + sums.get(name, 0.0) for name in {**total, **sums}}
        empty = [name for name, weight in total.items() if weight == 0]
        if required and (empty or not total):
            raise ValueError(
                f"the global loss weight is 0 over all ranks and micro-batches (terms: {empty or 'none'}): "
                "no position has both a target and a loss weight, so there is nothing to divide by; skip this batch"
            )
        sequences, tokens = (sum(column) for column in zip(*(counts for _, _, counts in by_shard), strict=True))
        return LossWeights(terms[0][0] if terms else True, per_mb, total, sequences, tokens)

    def sum_results(
        self, mbs: MicroBatchList, results: list[LossResult], tally: Tally, call: TimedCall, note: str, onloaded: int
    ) -> StepSums:
        """The sums that every rank's micro-batches reported.

        Args:
            tally: what the routers of this rank's stage found.
            call: that this belongs to.
            note: what to add to an error.
            onloaded: bytes that this rank brought back for the call.

        Raises:
            ValueError: a loss is not finite on some rank, or a metric is wrong.
        """

        def sum_locally() -> tuple[StepSums, RoutingSums]:
            # Every stage has the results, but the last one alone reports the faults in them.
            local = sum_results(mbs, results) if self._has_losses else StepSums()
            routed = tally.sums()
            local.seconds, local.timings = call.read()
            local.onloaded = onloaded
            return local, routed

        answers = self._control.attempt_and_gather(sum_locally, note)
        slowest = max((local for local, _ in answers), key=lambda local: local.seconds)
        total = StepSums(
            seconds=slowest.seconds, timings=slowest.timings, onloaded=sum(local.onloaded for local, _ in answers)
        )
        for local, _ in self._once_per_shard(answers):
            total.merge(local)
        total.add_routing([routed for (_, routed), speaks in zip(answers, self._of_stages, strict=True) if speaks])
        return total

    def _exchange(self, fn: Callable[[], tuple[T, Message]]) -> tuple[T, list[Message]]:
        """Call ``fn``, keep its first value on this rank, and gather the second of every rank."""
        kept: list[T] = []

        def call() -> Message:
            value, message = fn()
            kept.append(value)
            return message

        messages = self._control.attempt_and_gather(call)
        return kept[0], messages

    def _once_per_shard(self, answers: list[Any]) -> list[Any]:
        return [answer for answer, main in zip(answers, self._mains, strict=True) if main]
