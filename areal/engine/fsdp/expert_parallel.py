"""Expert parallelism: each rank has a subset of the experts of every layer, and tokens are exchanged between ranks.

The ranks that divide the experts are data-parallel (or context-parallel) for all other layers, so that each has
different tokens. A rank sends a copy of each token to the ranks of its experts and combines the weighted results
(Lepikhin et al., 2021). Tokens are never dropped, and experts do not have a capacity limit. The last ranks may have fewer
experts than the others, but at least one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.fsdp.activation_checkpointing import Remember
from areal.engine.model.stacked_experts import WEIGHTS, count_weightless, replaced_weights, stacked_experts
from areal.utils.collectives import ExchangeRows, exchange_counts
from areal.utils.dtensor import local_part
from areal.utils.platform import is_planned


def check_experts(config: PretrainedConfig, model: nn.Module, dims: ParallelDims) -> None:
    """Check that the experts of a model can be divided over the ranks of a layout.

    Raises:
        ValueError: the model does not have stacked experts, or has some without weights or with biases; a rank would not have any, a number
            is not divisible, or the layout also has ``t``.
    """
    if dims.ep == 1:
        return
    experts = stacked_experts(model)
    if not experts:
        raise ValueError(
            f"backend = '{dims}': model type {config.model_type!r} has no stacked experts to spread over ranks; leave e out"
        )
    taken = inspect.signature(type(experts[0]).forward).parameters.values()
    if len(taken) < 4 and not any(each.kind is each.VAR_POSITIONAL for each in taken):
        raise ValueError(
            f"backend = '{dims}': experts of model type {config.model_type!r} do not take the ids of experts, by which tokens are sent to "
            "ranks; leave e out"
        )
    if weightless := count_weightless(experts[0]):
        raise ValueError(
            f"backend = '{dims}': {weightless} experts of model type {config.model_type!r} have no weights, and tokens are sent to ranks by "
            "the weights of their experts; leave e out"
        )
    if others := [name for name, _ in experts[0].named_parameters(recurse=False) if name not in WEIGHTS]:
        raise ValueError(
            f"backend = '{dims}': experts of model type {config.model_type!r} also have {', '.join(others)}, and only {', '.join(WEIGHTS)} are "
            "divided over ranks; leave e out"
        )
    if dims.tp > 1 or dims.expert_tp > 1:
        raise ValueError(
            f"backend = '{dims}': the fsdp engine has no e together with t; leave one out, or use the megatron engine"
        )
    number, _, hidden = experts[0].gate_up_proj.shape
    shards = dims.dp_shard * dims.cp
    if shards % dims.ep:
        raise ValueError(
            f"backend = '{dims}': {shards} ranks that share parameters do not divide by e{dims.ep}; choose an e that divides them"
        )
    if (dims.ep - 1) * _experts_per_rank(number, dims.ep) >= number:
        raise ValueError(
            f"backend = '{dims}': {number} experts in slices of {_experts_per_rank(number, dims.ep)} leave a rank of e{dims.ep} "
            "without any; choose a smaller e"
        )
    # FSDP shards the rows of each expert over the remaining ranks, and they must divide evenly.
    for size in (hidden, experts[0].gate_up_proj.shape[1]):
        if size % (shards // dims.ep):
            raise ValueError(
                f"backend = '{dims}': each expert is shared by {shards // dims.ep} ranks, which do not divide its size {size}; "
                "choose a larger e, or fewer ranks"
            )


def _experts_per_rank(number: int, ranks: int) -> int:
    """Return the number of experts on each rank but the last ones, as DTensor shards them."""
    return -(-number // ranks)


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of each layer, in place. The model may be on the meta device.

    Args:
        model: model with stacked experts.
        mesh: one-dimensional mesh of the ranks that divide the experts.
    """
    for experts in stacked_experts(model):
        per_rank = _experts_per_rank(len(experts.gate_up_proj), mesh.size())
        for name in WEIGHTS:
            full = experts._parameters[name]
            # No communication: values are loaded or drawn later.
            shard = distribute_tensor(full.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts._parameters[name] = nn.Parameter(shard, requires_grad=full.requires_grad)
        experts.num_experts = len(experts.gate_up_proj.to_local())
        experts.forward = _DispatchedExperts(experts, per_rank, mesh.get_group())


def keep_dispatch(layer: nn.Module) -> Remember | None:
    """Let the experts of a layer keep the plans of their exchanges from the forward to its recomputation.

    Returns:
        A function that is called before each forward, as
        :attr:`~areal.engine.fsdp.activation_checkpointing.RecomputedForward.remember`. ``None`` if no experts of the layer are spread over
        ranks.
    """
    forwards = [module.forward for module in layer.modules()]
    spread = [forward for forward in forwards if isinstance(forward, _DispatchedExperts)]

    def remember() -> Callable[[], contextlib.AbstractContextManager[None]]:
        kept = [experts.keep() for experts in spread]

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            for experts, plans in zip(spread, kept, strict=True):
                experts.use(plans)
            yield

        return restore

    return remember if spread else None


class _DispatchedExperts:
    """Forward of a layer's experts, of which this rank has a subset.

    Args:
        experts: module with this rank's experts.
        per_rank: number of experts on the first rank. The last ranks may have fewer.
        group: ranks that divide the experts.
    """

    def __init__(self, experts: Any, per_rank: int, group: dist.ProcessGroup) -> None:
        self._experts, self._per_rank, self._group = experts, per_rank, group
        self._inner = experts.forward
        self._kept: list[Dispatch] = []  # of the next forward
        self._next: list[Dispatch] = []  # of the next recomputation

    def keep(self) -> list[Dispatch]:
        """Return a list that the next call adds its plan to."""
        # A recomputation that failed before its call leaves a plan behind.
        self._kept, self._next = [], []
        return self._kept

    def use(self, plans: list[Dispatch]) -> None:
        """Let the next call exchange rows as planned in the forward that it recomputes."""
        self._next = [*plans]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum over experts, ``[T, H]``.

        Args:
            hidden: ``[T, H]``. This rank's tokens.
            index: ``[T, K]`` int64. Experts of each token.
            weights: ``[T, K]``. Weight of each expert.
        """
        # A recomputation exchanges the rows of its forward: their numbers are on the host already.
        dispatch = self._next.pop() if self._next else Dispatch.of(index, self._per_rank, self._group)
        self._kept.append(dispatch)
        self._kept = []
        inverse = dispatch.order.argsort()
        # Copy, exchange, compute, exchange back.
        rows = _CopiedRows.apply(hidden, dispatch.order, inverse, index.shape[1])
        results = dispatch.combine(self._compute(dispatch.send(rows), dispatch.local()))
        # Undo the sorting, then weight and sum the K results of each token.
        combined = results.index_select(0, inverse).unflatten(0, index.shape)
        return (combined * weights[..., None]).sum(1).to(hidden.dtype)

    def _compute(self, rows: Tensor, local: Tensor) -> Tensor:
        """Apply one expert to each row.

        Args:
            rows: ``[N, H]``. Rows received by this rank.
            local: ``[N]`` int64. Index of each row's expert on this rank.
        """
        n = len(rows)
        if n == 0:  # a dummy row: the weights must have a gradient on all ranks or on none
            rows, local = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), local.new_zeros(1)
        # Compute with local tensors instead of DTensors.
        with replaced_weights(self._experts, {name: local_part(self._experts._parameters[name]) for name in WEIGHTS}):
            out: Tensor = self._inner(rows, local[:, None], rows.new_ones(len(rows), 1))
        return out[:n]


class _CopiedRows(torch.autograd.Function):
    """One copy of a row for each of its experts, in one gather. The backward sums the copies of a row without atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        """Return row ``order[i] // K`` at ``i``, ``[T * K, H]``.

        Args:
            ctx: of autograd.
            rows: ``[T, H]``.
            order: int64 ``[T * K]``. A permutation.
            inverse: int64 ``[T * K]``. The inverse permutation.
            copies: int. ``K``.
        """
        ctx.save_for_backward(inverse)
        ctx.shape = (len(rows), copies)
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse).unflatten(0, ctx.shape).sum(1), None, None, None


class Dispatch:
    """Plan of an exchange of rows between ranks.

    Attributes:
        order: int64 ``[T * K]``. The copies of tokens in the order in which they are sent: those of an expert are neighbours.
    """

    def __init__(self, counts: tuple[list[int], list[int]], order: Tensor, arriving: Tensor, group: Any) -> None:
        (self._sent, self._received), self.order = counts, order
        self._arriving, self._group = arriving, group

    @classmethod
    def of(cls, index: Tensor, per_rank: int, group: dist.ProcessGroup) -> Dispatch:
        """Exchange the numbers of rows between ranks. Collective, with one host read.

        Args:
            index: int64 ``[T, K]``. Experts of each token.
            per_rank: number of experts on the first rank. On ranks with fewer, the missing ones do not get any rows.
            group: ranks that divide the experts.
        """
        size = dist.get_world_size(group)
        # Sort the T * K copies by expert, so that each rank receives one contiguous range.
        order = index.flatten().argsort(stable=True)
        # Rows per expert, from the positions at which the sorted ids change.
        bounds = torch.searchsorted(index.flatten()[order], torch.arange(size * per_rank + 1, device=index.device))
        counts = bounds.diff().view(size, per_rank)
        arriving = exchange_counts(counts, group)
        # One host read for both: sizes of collectives must be known on the host.
        sent, received = _read_counts(torch.stack([counts.sum(1), arriving.sum(1)]), index.numel())
        return cls((sent, received), order, arriving, group)

    def local(self) -> Tensor:
        """Return for each received row the index of its expert on this rank, int64 ``[N]``."""
        # Rows arrive by rank, and within a rank by expert.
        local_indices = torch.arange(self._arriving.shape[1], device=self._arriving.device).expand_as(self._arriving)
        return local_indices.flatten().repeat_interleave(self._arriving.flatten(), output_size=sum(self._received))

    def send(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts."""
        return ExchangeRows.apply(rows, self._sent, self._received, self._group)

    def combine(self, rows: Tensor) -> Tensor:
        """Return rows to the ranks of their tokens, in the order in which they were sent."""
        return ExchangeRows.apply(rows, self._received, self._sent, self._group)


def _read_counts(counts: Tensor, n_rows: int) -> list[list[int]]:
    """Return ``[2, size]`` numbers of rows on the host. Without values, in a plan, ``n_rows`` are spread evenly over the ranks."""
    if not is_planned():
        return counts.tolist()
    size = counts.shape[1]
    return [[n_rows // size + (rank < n_rows % size) for rank in range(size)]] * 2
