"""The exchanges between the ranks of an engine in a step: number of micro-batches, loss weights, reported numbers.

Each is one exchange on the host. It also carries the faults of all ranks, so that a fault raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from areal.api.engine import Outputs
from areal.api.loss import LossWeightFn
from areal.api.microbatch import MicroBatchList
from areal.engine.batch_rules import empty_batch
from areal.engine.loss_step import LossResult, LossWeights, StepSums, local_weights, sum_results
from areal.engine.memory_limit import Claim, Kind, check_claims
from areal.engine.moe.balance_loss import RoutingSums
from areal.engine.moe.routing import Tally
from areal.engine.schedule import Schedule
from areal.utils.data import ADAPTER, BatchPlan
from areal.utils.distributed import ControlPlane
from areal.utils.profiling.moved_bytes import MovedBytes
from areal.utils.profiling.phase_timer import TimedCall

_T = TypeVar("_T")
_Message = TypeVar("_Message")


class AgreedPlan(NamedTuple):
    """What all ranks know before a call.

    Attributes:
        plan: this rank's batch, checked and packed.
        n_mbs: number of micro-batches on every rank.
        padded_length: largest padded length of a micro-batch of any rank, in tokens.
        longest: length of the longest sequence of any rank, in tokens.
    """

    plan: BatchPlan
    n_mbs: int
    padded_length: int
    longest: int


class _Description(NamedTuple):
    """What a rank tells the others of its call. ``digest`` is 0 where no rank compares it."""

    asked: tuple[Kind | None, Outputs]
    n_mbs: int
    padded_length: int
    longest: int
    digest: int
    dropped: int
    named: frozenset[int] | None
    claim: Claim | None


class StepSync:
    """Exchanges of a step over an engine's control plane. Every method, and the constructor, is collective.

    Numbers are summed over shards of the global batch, and each shard is counted once: by the rank with context- and tensor-parallel rank 0 on
    the last pipeline stage. Routing sums are counted once for each stage of each shard.

    Args:
        control: control plane over all ranks of the engine.
        mesh: batch mesh of the engine.
        last_stage: pipeline rank of the last stage, which computes the losses.
    """

    def __init__(self, control: ControlPlane, mesh: DeviceMesh, last_stage: int) -> None:
        self._control = control
        coordinate = {axis: mesh[axis].get_local_rank() for axis in ("dp", "pp", "cp", "tp")}
        counts_stage = coordinate["cp"] == coordinate["tp"] == 0
        self._has_losses = coordinate["pp"] == last_stage
        roles = control.gather((coordinate["dp"], counts_stage and self._has_losses, counts_stage))
        # By rank: data-parallel rank; whether the rank counts its shard; whether it counts its stage.
        self._dp_ranks, self._counts_shard, self._counts_stage = zip(*roles, strict=True)
        self._batch_is_shared = not all(self._counts_shard)
        # Ranks that have passed different batches once do divide the data: equal batches are a coincidence then.
        self._data_are_divided = len(set(self._dp_ranks)) == 1

    @property
    def speaks(self) -> bool:
        """Whether this rank computes losses and speaks for the first data-parallel rank in the log."""
        rank = self._control.rank
        return self._counts_shard[rank] and self._dp_ranks[rank] == 0

    def plan(
        self,
        plan_here: Callable[[], BatchPlan],
        schedule: Schedule,
        claim_of: Callable[..., Claim | None] | None,
        asked: tuple[Kind | None, Outputs],
        *,
        must_differ: bool,
    ) -> AgreedPlan:
        """Check and pack this rank's batch, and agree on the number of micro-batches.

        Args:
            plan_here: function that checks and packs. Its errors are raised on every rank.
            schedule: decides on the number of micro-batches.
            claim_of: returns this rank's claim on memory for a micro-batch of so many tokens; ``None`` without a limit.
            asked: kind of the pass and outputs to return, which must be the same on all ranks.
            must_differ: the call has a loss, which would count one batch on all data-parallel ranks several times.

        Raises:
            ValueError: the batch of a rank is wrong, ranks ask for different outputs, ranks of one data-parallel coordinate have different
                batches or all coordinates have the same one, the batches of some ranks only name adapters, the global batch is empty, or
                memory is short on a rank.
        """
        compares = must_differ and not self._data_are_divided

        def plan_and_describe() -> tuple[BatchPlan, _Description]:
            plan = plan_here()
            digest = plan.digest() if self._batch_is_shared or compares else 0
            longest = max((plan.form.seqlens[i] for members in plan.bins for i in members), default=0)
            length = plan.padded_length
            claim = None if claim_of is None else claim_of(length, always=schedule.equal_lengths)
            return plan, _Description(asked, plan.n_mbs, length, longest, digest, len(plan.dropped), plan.named, claim)

        plan, descriptions = self._exchange(plan_and_describe)
        asked_by_all, counts, lengths, longest, digests, dropped, named, claims = zip(*descriptions, strict=True)
        _check_asked(asked_by_all)
        self._check_same_batch(digests)
        if not any(counts):
            raise empty_batch(sum(self._once_per_shard(dropped)))
        if compares:
            self._check_divided(counts, digests)
        if any(claims):
            check_claims(claims, [max(lengths)] * len(lengths) if schedule.equal_lengths else lengths, longest)
        plan = plan.naming(_named_by_any(counts, named))
        # A rank without micro-batches does not know the keys from which fillers are built: they are those of the first rank that has some.
        if not all(counts):
            first = next(rank for rank, count in enumerate(counts) if count)
            keys = self._control.gather(plan.keys if self._control.rank == first else None)
            plan = plan.beside_idle_ranks(keys[first])
        return AgreedPlan(plan, schedule.round_up(max(1, *counts)), max(lengths), max(longest))

    def _check_divided(self, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Raise if all data-parallel ranks with samples, of which there are several, have one batch."""
        filled = [digest for count, digest in self._once_per_shard(list(zip(counts, digests, strict=True))) if count]
        if len(filled) > 1 and len(set(filled)) == 1:
            raise ValueError(
                f"all {len(filled)} data-parallel ranks passed the same batch, so that each sample would count {len(filled)} times: divide the "
                "data by engine.dp_rank and engine.dp_size, or set MicroBatchSpec.equal_batches='allow'"
            )
        self._data_are_divided = len(filled) > 1

    def _check_same_batch(self, digests: tuple[int, ...]) -> None:
        first_ranks: dict[int, int] = {}  # by data-parallel rank
        for rank, (digest, dp_rank) in enumerate(zip(digests, self._dp_ranks, strict=True)):
            first = first_ranks.setdefault(dp_rank, rank)
            if digests[first] != digest:
                raise ValueError(
                    f"ranks {first} and {rank} share data-parallel coordinate {dp_rank} but were passed different "
                    "batches: shard the data by engine.dp_rank, not by the global rank"
                )

    def result_of_a_peer(self, mbs: MicroBatchList, results: list[Any]) -> Any:
        """Return some rank's result of a micro-batch, without its tokens, if a rank has fillers only; else ``None``.

        Args:
            results: results of this rank's micro-batches: pytrees of per-token tensors.
        """
        if not mbs.idle_ranks:
            return None
        own = pytree.tree_map(lambda x: x[:0].cpu(), results[0]) if results else None
        return next(result for result in self._control.gather(own) if result is not None)

    def weights(self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn, *, required: bool) -> LossWeights:
        """Compute the loss weights of this rank's micro-batches and of the global batch.

        Args:
            required: raise if a global weight is 0.

        Raises:
            ValueError: the weights of a rank are wrong, or a required global weight is 0.
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
        self,
        mbs: MicroBatchList,
        results: list[LossResult],
        routed: Tally,
        call: TimedCall,
        note: str,
        moved: MovedBytes,
    ) -> StepSums:
        """Sum the results of all micro-batches of all ranks.

        Args:
            results: results of this rank's micro-batches.
            routed: counts of the routers on this rank's stage.
            call: the call that reports the sums.
            note: text that is added to an error.
            moved: bytes that this rank moved from and to host memory since the last step.

        Raises:
            ValueError: a loss is not finite on some rank, or a metric is wrong.
        """

        def sum_locally() -> tuple[StepSums, RoutingSums]:
            # Every stage has the results, but the last one alone reports the faults in them.
            local = sum_results(mbs, results) if self._has_losses else StepSums()
            routing = routed.sums()
            local.seconds, local.timings = call.read()
            local.moved = moved.copy()
            return local, routing

        answers = self._control.attempt_and_gather(sum_locally, note)
        # Times are those of the slowest rank. Everything else is summed.
        slowest = max((local for local, _ in answers), key=lambda local: local.seconds)
        moved_by_all = MovedBytes.of_ranks(local.moved for local, _ in answers)
        total = StepSums(seconds=slowest.seconds, timings=slowest.timings, moved=moved_by_all)
        for local, _ in self._once_per_shard(answers):
            total.merge(local)
        total.add_routing([routing for (_, routing), counts in zip(answers, self._counts_stage, strict=True) if counts])
        return total

    def _exchange(self, fn: Callable[[], tuple[_T, _Message]]) -> tuple[_T, list[_Message]]:
        """Call ``fn``, keep its first value on this rank, and gather the second of every rank."""
        kept: list[_T] = []

        def call() -> _Message:
            value, message = fn()
            kept.append(value)
            return message

        messages = self._control.attempt_and_gather(call)
        return kept[0], messages

    def _once_per_shard(self, answers: Sequence[Any]) -> list[Any]:
        return [answer for answer, counts in zip(answers, self._counts_shard, strict=True) if counts]


def _check_asked(asked: Sequence[tuple[Kind | None, Outputs]]) -> None:
    """Raise if ranks ask for different outputs, or only some for a backward: they would not compute and communicate alike."""
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise ValueError(
                f"rank 0 asked for {_text(*asked[0])}; rank {rank} asked for {_text(*other)}: call the same verb with the same outputs and "
                "returns on all ranks"
            )


def _text(kind: Kind | None, returns: Outputs) -> str:
    if kind is None:
        return "micro-batches"
    return f"{'a forward' if kind[0] else 'a forward and backward'} with outputs {kind[1:]} and returns {returns}"


def _named_by_any(counts: Sequence[int], named: Sequence[frozenset[int] | None]) -> frozenset[int] | None:
    """Return the adapters that samples of any rank name, or ``None`` if the batches do not name adapters.

    Args:
        counts: micro-batches of each rank.
        named: adapters that the samples of each rank name.

    Raises:
        ValueError: the batches of some ranks only name adapters.
    """
    filled = [rank for rank, count in enumerate(counts) if count]
    without = [rank for rank in filled if named[rank] is None]
    if len(without) == len(filled):
        return None
    if without:
        raise ValueError(
            f"key {ADAPTER!r} is missing in the batch of rank {without[0]}, and in that of rank "
            f"{next(rank for rank in filled if rank not in without)} it is not: give it to the samples of all ranks"
        )
    return frozenset(index for rank in filled for index in named[rank] or ())
