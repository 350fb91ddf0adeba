"""Expert parallelism: each rank holds some of the experts of every layer, and tokens travel to theirs and back.

Ranks that share experts are data-parallel (or context-parallel) to the other layers, so that each of them has tokens of its own. A rank sends a
copy of each token to the ranks of its experts, they compute, and the results come back and are weighed (Lepikhin et al., 2021). Nothing is
dropped, and no expert has a limit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.utils.collectives import ExchangeRows, exchange_rows
from areal.utils.dtensor import local_part

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the stacked weights of experts, ``[E, 2 I, H]`` and ``[E, H, I]``, as transformers has them."""


def stacked_experts(module: nn.Module) -> list[Any]:
    """The modules in it that hold the experts of a layer, and take hidden states, the experts of each token, and their weights."""
    return [x for x in module.modules() if all(getattr(x, name, torch.empty(0)).dim() == 3 for name in WEIGHTS)]


def check_experts(config: PretrainedConfig, model: nn.Module, dims: ParallelDims) -> None:
    """Refuse a model whose experts cannot be spread over the ranks of a layout.

    Raises:
        ValueError: it has none, a number does not divide, or the layout has ``t`` too; says which.
    """
    if dims.ep == 1:
        return
    experts = stacked_experts(model)
    if not experts:
        raise ValueError(
            f"backend = '{dims}': model type {config.model_type!r} has no stacked experts to spread over ranks; leave e out"
        )
    if dims.tp > 1 or dims.expert_tp > 1:
        raise ValueError(
            f"backend = '{dims}': the fsdp engine has no e together with t; leave one out, or use the megatron engine"
        )
    number, _, hidden = experts[0].gate_up_proj.shape
    shards = dims.dp_shard * dims.cp
    if number % dims.ep or shards % dims.ep:
        what = f"{number} experts do" if number % dims.ep else f"{shards} ranks that share parameters do"
        raise ValueError(f"backend = '{dims}': {what} not divide by e{dims.ep}; choose an e that divides both")
    for size in (hidden, experts[0].gate_up_proj.shape[1]):
        if size % (shards // dims.ep):
            raise ValueError(
                f"backend = '{dims}': each expert is shared by {shards // dims.ep} ranks, which do not divide its size {size}; "
                "choose a larger e, or fewer ranks"
            )


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its share of the experts, in place. The model may be on the meta device.

    Args:
        mesh: one-dimensional, the ranks that share experts.
    """
    for experts in stacked_experts(model):
        for name in WEIGHTS:
            full = experts._parameters[name]
            shard = distribute_tensor(full.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts._parameters[name] = nn.Parameter(shard, requires_grad=full.requires_grad)
        experts.num_experts //= mesh.size()
        experts.forward = _DispatchedExperts(experts, mesh.get_group())


class _DispatchedExperts:
    """The forward of a layer's experts, of which this rank has some."""

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        self._experts, self._group = experts, group
        self._inner = experts.forward

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """From this rank's tokens ``[T, H]``, and the experts ``[T, K]`` of each with their weights, to their weighted sum ``[T, H]``."""
        copies = index.shape[1]
        order = index.flatten().argsort(stable=True)
        dispatch = Dispatch.of(index.flatten()[order], self._experts.num_experts, self._group)
        rows = hidden[:, None].expand(-1, copies, -1).flatten(0, 1).index_select(0, order)
        results = dispatch.combine(self._compute(dispatch.send(rows), dispatch.local))
        combined = results.index_select(0, order.argsort()).unflatten(0, (-1, copies))
        return (combined * weights[..., None]).sum(1).to(hidden.dtype)

    def _compute(self, rows: Tensor, local: Tensor) -> Tensor:
        """One expert for each row, by its number here."""
        n = len(rows)
        if n == 0:  # The weights must have a gradient on every rank, or on none.
            rows, local = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), local.new_zeros(1)
        experts = self._experts
        full = {name: experts._parameters[name] for name in WEIGHTS}
        experts._parameters.update({name: local_part(parameter) for name, parameter in full.items()})
        try:
            out: Tensor = self._inner(rows, local[:, None], rows.new_ones(len(rows), 1))
        finally:
            experts._parameters.update(full)
        return out[:n]


class Dispatch:
    """Where rows go and come from.

    Attributes:
        local: of each row that arrives here, the number of its expert on this rank, int64.
    """

    def __init__(self, sent: list[int], received: list[int], local: Tensor, group: dist.ProcessGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self.local = local

    @classmethod
    def of(cls, experts: Tensor, per_rank: int, group: dist.ProcessGroup) -> Dispatch:
        """Tell the others how many rows come. Collective, with one host read.

        Args:
            experts: of each row to send, int64 and ascending. per_rank: experts on each rank.
        """
        size = dist.get_world_size(group)
        bounds = torch.searchsorted(experts, torch.arange(size * per_rank + 1, device=experts.device))
        counts = bounds.diff().view(size, per_rank)
        arriving = exchange_rows(counts, [1] * size, [1] * size, group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        local_indices = torch.arange(per_rank, device=experts.device).expand(size, per_rank)
        local = local_indices.flatten().repeat_interleave(arriving.flatten(), output_size=sum(received))
        return cls(sent, received, local, group)

    def send(self, rows: Tensor) -> Tensor:
        """To the ranks of their experts."""
        return ExchangeRows.apply(rows, self._sent, self._received, self._group)

    def combine(self, rows: Tensor) -> Tensor:
        """To the ranks that they came from, in the order in which they were sent."""
        return ExchangeRows.apply(rows, self._received, self._sent, self._group)
