"""The two factors beside one linear layer, as a rank holds them, and what they add to the layer's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from areal.engine.lora.plan import Target
from areal.utils.collectives import all_gather_rows
from areal.utils.dtensor import Box, full_box


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class TensorParallelSplit:
    """How tensor-parallel ranks share a linear layer, and so its two factors. The default is a layer that is not shared.

    Attributes:
        down_dim, up_dim: the dimension along which each has a part of ``A``, of ``B``; ``None`` where each has all of it.
        down_summed, up_summed: whether a rank's gradient of it is a summand of the whole.
        before_down: what the layer's input ``[T, inputs]`` goes through first. before_up: likewise, between the two, ``[T, rank]``.
    """

    down_dim: int | None = None
    up_dim: int | None = None
    down_summed: bool = False
    up_summed: bool = False
    before_down: Callable[[Tensor], Tensor] = _identity
    before_up: Callable[[Tensor], Tensor] = _identity


@dataclass(frozen=True)
class TensorParallelRanks:
    """The ranks that share layers; a group of ``None`` is one rank."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def local_box(self, shape: tuple[int, ...], dim: int | None) -> Box:
        """What this rank has of a tensor that is cut along ``dim``."""
        box = list(full_box(shape))
        if dim is not None and self.group is not None:
            length = shape[dim] // self.size
            start = dist.get_rank(self.group) * length
            box[dim] = slice(start, start + length)
        return tuple(box)


class Factor:
    """One of the two matrices.

    Args:
        name: in peft's files.
        shape: of the full matrix.
        split_dim: the dimension along which tensor-parallel ranks share it; ``None`` where each has all of it.
        summed: whether a rank's gradient is a summand of the whole.

    Attributes:
        parameter: this rank's part. box: where that lies in the full matrix.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        split_dim: int | None,
        summed: bool,
        ranks: TensorParallelRanks,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.shape, self.split_dim, self.summed, self._ranks = name, shape, split_dim, summed, ranks
        self.box = ranks.local_box(shape, split_dim)
        local = [extent.stop - extent.start for extent in self.box]
        self.parameter = nn.Parameter(torch.zeros(local, device=device, dtype=dtype))

    @torch.no_grad()
    def fill(self, full: Tensor) -> None:
        """Take this rank's part of the full matrix."""
        self.parameter.copy_(full[self.box])

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """The full matrix from every rank's ``part``. Collective."""
        if self.split_dim is None or self._ranks.group is None:
            return local.detach().clone()
        return (
            all_gather_rows(local.movedim(self.split_dim, 0), self._ranks.group).movedim(0, self.split_dim).contiguous()
        )


class LowRank:
    """``scale * B @ A`` beside a layer.

    Args:
        split: how the layer is shared.
    """

    def __init__(
        self,
        target: Target,
        split: TensorParallelSplit,
        ranks: TensorParallelRanks,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        down, up = (target.rank, target.inputs), (target.outputs, target.rank)
        self.target, self.scale, self._split = target, target.scale, split
        self.down = Factor(target.down, down, split.down_dim, split.down_summed, ranks, device, dtype)
        self.up = Factor(target.up, up, split.up_dim, split.up_summed, ranks, device, dtype)

    def apply(self, out: Tensor, x: Tensor) -> Tensor:
        """A layer's output with what the adapter adds, computed in the dtype of ``x``.

        Args:
            out: ``[..., outputs]`` of the layer. x: ``[..., inputs]`` that it came from.
        """
        low = F.linear(self._split.before_down(x.flatten(0, -2)), self.down.parameter.to(x.dtype))
        up = self.up.parameter.to(x.dtype)
        added = torch.addmm(out.flatten(0, -2), self._split.before_up(low), up.t(), alpha=self.scale)
        return added.view(out.shape)


@dataclass(frozen=True)
class WeightDelta:
    """``scale * up @ down``, ``[outputs, inputs]``, not multiplied out yet."""

    up: Tensor
    down: Tensor
    scale: float

    @torch.no_grad()
    def add_to(self, weight: Tensor, box: Box) -> Tensor:
        """A part of a weight, which lies at ``box``, with what the adapter adds to it, in memory of its own."""
        rows, columns = box
        delta = (self.up[rows] @ self.down[:, columns]) * self.scale
        return (weight.to(delta.dtype) + delta.to(weight.device)).to(weight.dtype)
