"""Vocabulary parallelism: the shard of a vocabulary on one rank, and the merge of all shards to one distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class VocabShard:
    """Rows of the output head's weight on this rank.

    The ranks of ``group`` have consecutive blocks of rows in group-rank order, which may differ in size. Methods that
    communicate must be called by all ranks, and return the same values on all of them. Without a group they do nothing.

    Attributes:
        rows: number of rows on this rank.
        start: token id of this rank's first row. A 0-dim tensor with a group, because reading it would wait for the device.
        total: size of the vocabulary. A 0-dim tensor with a group.
        group: ranks that the vocabulary is sharded over. ``None`` if this rank has all rows.
    """

    rows: int
    start: Tensor | int
    total: Tensor | int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None) -> VocabShard:
        """Return the shard that consists of ``weight`` ``[rows, H]``. Collective with a group: one small all-gather."""
        rows = weight.shape[0]
        # Blocks may differ in size, so that the offset of a block is the sum of all blocks before it.
        if group is None or dist.get_world_size(group) == 1:
            return cls(rows=rows, start=0, total=rows)
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
        dist.all_gather_into_tensor(sizes, torch.full((1,), rows, dtype=torch.int64, device=weight.device), group=group)
        return cls(rows=rows, start=sizes[: dist.get_rank(group)].sum(), total=sizes.sum(), group=group)

    def localize(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Convert token ids to this rank's row indices (0 for ids of other ranks), and return a mask of this rank's ids."""
        local = ids - self.start
        is_local = (local >= 0) & (local < self.rows)
        return local.masked_fill(~is_local, 0), is_local

    def merge(
        self, lse: Tensor, entropy: Tensor | None, picked: Tensor, is_local: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Combine the statistics of all ranks to statistics of the full vocabulary, with two all-reduces.

        With ``w_r`` the probability mass of rank ``r`` and ``H_r`` the entropy within its rows, the entropy of the full
        distribution is ``sum_r w_r (H_r - log w_r)`` (chain rule of entropy).

        Args:
            lse: ``[T]``. Log-sum-exp over this rank's logits.
            entropy: ``[T]``. Entropy of the softmax over this rank's logits, or ``None``.
            picked: ``[T, K]``. Log-probs of the chosen tokens in the softmax over this rank's logits.
            is_local: bool ``[T, K]``. True for chosen tokens of this rank.

        Returns:
            The log-sum-exp over the full vocabulary; ``log w_r`` ``[T]``, or ``None`` without a group; the entropy and the
            log-probs over the full vocabulary. All but the second are equal on all ranks.
        """
        if self.group is None:
            return lse, None, entropy, picked
        # Shift by the largest log-sum-exp of all ranks, so that exp() cannot overflow.
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        # Unnormalized mass e^(lse_r - top) of this rank, and its term of the entropy.
        log_mass = lse - top
        mass = log_mass.exp()
        entropy_term = mass * (entropy - log_mass) if entropy is not None else torch.zeros_like(mass)
        # Sum all of them at once. Each chosen token is on exactly one rank, so that a sum collects its log-prob.
        local = (picked + log_mass.unsqueeze(1)).masked_fill_(~is_local, 0.0)
        sums = torch.cat([torch.stack([mass, entropy_term], dim=1), local], dim=1)
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.group)
        # Normalize: with total mass m, w_r = mass_r / m, hence H = sum(mass_r (H_r - log mass_r)) / m + log m.
        log_total = sums[:, 0].log()
        full_entropy = sums[:, 1] / sums[:, 0] + log_total if entropy is not None else None
        return top + log_total, log_mass - log_total, full_entropy, sums[:, 2:] - log_total.unsqueeze(1)

    def merge_topk(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ``k`` largest logits ``[T, k]`` of each rank, and their token ids, to those of the full vocabulary."""
        if self.group is None:
            return values, ids
        # The k largest logits are among the k largest of each rank.
        all_values, all_ids = self._gather(values), self._gather(ids)
        best = all_values.topk(values.shape[1], dim=1)
        return best.values, all_ids.gather(1, best.indices)

    def sum(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks of the group, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        """Gather ``[T, k]`` of every rank to ``[T, ranks * k]``."""
        ranks = dist.get_world_size(self.group)
        out = x.new_empty(ranks * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(ranks, *x.shape).transpose(0, 1).reshape(x.shape[0], ranks * x.shape[1])


class ReplicatedInput(torch.autograd.Function):
    """Identity on a tensor that is equal on all ranks. The backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.shard.sum(grad.clone(memory_format=torch.contiguous_format)), None  # type: ignore[attr-defined]


class GatheredVocab(torch.autograd.Function):
    """Gather logits ``[T, rows]`` of every rank to ``[T, V]`` on all ranks. The backward keeps this rank's columns.

    Waits for the device to read the sizes of the blocks.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard  # type: ignore[attr-defined]
        ranks = dist.get_world_size(shard.group)
        rows = torch.empty(ranks, dtype=torch.int64, device=x.device)
        dist.all_gather_into_tensor(rows, rows.new_full((1,), shard.rows), group=shard.group)
        sizes: list[int] = rows.tolist()
        # Pad blocks to equal sizes, because not every backend gathers unequal ones. Padding is cut off after the gather.
        padded = torch.nn.functional.pad(x, (0, max(sizes) - shard.rows)).contiguous()
        out = x.new_empty(ranks, *padded.shape)
        dist.all_gather_into_tensor(out.view(-1, padded.shape[1]), padded, group=shard.group)
        return torch.cat([block[:, :size] for block, size in zip(out, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        start = int(shard.start)
        return grad[:, start : start + shard.rows], None
