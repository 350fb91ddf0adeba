"""The part of a vocabulary that one rank holds, and how the parts of all ranks become one distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class VocabShard:
    """The consecutive rows of a head's weight that this rank holds.

    Ranks of ``group`` hold consecutive blocks in group-rank order; blocks need not be equal. Every method that talks to
    other ranks must be called by all of them, and gives all of them the same numbers. Without a group each is the
    identity.

    Attributes:
        rows: rows that this rank holds.
        start: the token id of this rank's first row. A 0-dim tensor in a group: reading it would wait for the device.
        total: the size of the vocabulary; a 0-dim tensor in a group.
        group: the ranks that hold the vocabulary between them; ``None`` where this rank holds it all.
    """

    rows: int
    start: Tensor | int
    total: Tensor | int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard that ``weight`` ``[rows, H]`` is; one small all-gather in a group."""
        rows = weight.shape[0]
        if group is None or dist.get_world_size(group) == 1:
            return cls(rows=rows, start=0, total=rows)
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
        dist.all_gather_into_tensor(sizes, torch.full((1,), rows, dtype=torch.int64, device=weight.device), group=group)
        return cls(rows=rows, start=sizes[: dist.get_rank(group)].sum(), total=sizes.sum(), group=group)

    def localize(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``ids`` stand among this rank's rows (0 where they do not), and whether they do."""
        local = ids - self.start
        mine = (local >= 0) & (local < self.rows)
        return local.masked_fill(~mine, 0), mine

    def merge(self, lse: Tensor, entropy: Tensor | None, picked: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Make statistics of the vocabulary from those of this rank's rows, in two all-reduces.

        With ``w_r`` the probability mass of rank ``r`` and ``H_r`` the entropy within it, the entropy of the mixture of
        disjoint parts is ``sum_r w_r (H_r - log w_r)`` (the chain rule of entropy).

        Args:
            lse: ``[T]``, log-sum-exp over this rank's logits.
            entropy: ``[T]``, entropy of the softmax over this rank's logits, or ``None``.
            picked: ``[T, K]``, logits of chosen tokens, 0 where this rank does not hold them.

        Returns:
            The same three over the whole vocabulary.
        """
        if self.group is None:
            return lse, entropy, picked
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        log_share = lse - top
        share = log_share.exp()
        surprise = share * (entropy - log_share) if entropy is not None else torch.zeros_like(share)
        sums = torch.cat([torch.stack([share, surprise], dim=1), picked], dim=1)
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.group)
        log_mass = sums[:, 0].log()
        whole_entropy = sums[:, 1] / sums[:, 0] + log_mass if entropy is not None else None
        return top + log_mass, whole_entropy, sums[:, 2:]

    def merge_topk(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Make the vocabulary's ``k`` largest logits ``[T, k]`` and their token ids from those of each rank."""
        if self.group is None:
            return values, ids
        all_values, all_ids = self._gather(values), self._gather(ids)
        best = all_values.topk(values.shape[1], dim=1)
        return best.values, all_ids.gather(1, best.indices)

    def sum(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        """``[T, k]`` of every rank side by side, ``[T, ranks * k]``."""
        ranks = dist.get_world_size(self.group)
        out = x.new_empty(ranks * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(ranks, *x.shape).transpose(0, 1).reshape(x.shape[0], ranks * x.shape[1])


class ReplicatedInput(torch.autograd.Function):
    """The identity on a tensor that all ranks hold alike; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.shard.sum(grad.clone(memory_format=torch.contiguous_format)), None  # type: ignore[attr-defined]


class GatheredVocab(torch.autograd.Function):
    """``[T, rows]`` of every rank as ``[T, V]`` on all of them; the gradient keeps this rank's columns.

    Reads the sizes of the blocks on the host.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard  # type: ignore[attr-defined]
        ranks = dist.get_world_size(shard.group)
        rows = torch.empty(ranks, dtype=torch.int64, device=x.device)
        dist.all_gather_into_tensor(rows, rows.new_full((1,), shard.rows), group=shard.group)
        sizes: list[int] = rows.tolist()
        # Equal blocks on the wire: not every backend gathers unequal ones.
        padded = torch.nn.functional.pad(x, (0, max(sizes) - shard.rows)).contiguous()
        out = x.new_empty(ranks, *padded.shape)
        dist.all_gather_into_tensor(out.view(-1, padded.shape[1]), padded, group=shard.group)
        return torch.cat([block[:, :size] for block, size in zip(out, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        start = int(shard.start)
        return grad[:, start : start + shard.rows], None
