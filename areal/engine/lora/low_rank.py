"""The low-rank factors of one linear layer on one rank, and their contribution to the layer's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from areal.engine.lora.adapter_plan import Target
from areal.engine.lora.row_products import Down, SavedInput
from areal.utils.collectives import all_gather_rows
from areal.utils.dtensor import Box, full_box, take_rows
from areal.utils.functional import HeadUpdate


def _identity(x: Tensor) -> Tensor:
    return x


def _input_itself(x: Tensor) -> None:
    return None


@dataclass(frozen=True)
class TensorParallelSplit:
    """How tensor-parallel ranks split a linear layer, and therefore its two factors.

    By default the layer is not split.

    Attributes:
        down_dim, up_dim: dimension along which ``A`` and ``B`` are split; ``None`` if replicated.
        down_summed, up_summed: whether the gradient on one rank is a partial sum over tensor-parallel ranks.
        before_down: function applied to the layer's input ``[T, inputs]`` before ``A``, e.g. a collective.
        before_up: function applied to the product ``[T, rank]`` before ``B``.
        saved_input: function of the layer's input that returns what the backward of ``A`` keeps of it, for one product; ``None`` for the
            input.
        up_rows: ranges of rows of a replicated ``B`` that give the outputs of the layer on this rank; ``None`` for all.
    """

    down_dim: int | None = None
    up_dim: int | None = None
    down_summed: bool = False
    up_summed: bool = False
    before_down: Callable[[Tensor], Tensor] = _identity
    before_up: Callable[[Tensor], Tensor] = _identity
    saved_input: Callable[[Tensor], SavedInput | None] = _input_itself
    up_rows: Sequence[slice] | None = None


HEAD_SPLIT = TensorParallelSplit(up_dim=0)
"""Split of an output head over tensor-parallel ranks. Its own backward sums the gradient of ``A @ x`` over ranks, so that the
gradient of ``A`` is complete on each."""


@dataclass(frozen=True)
class TensorParallelRanks:
    """The ranks that split layers; a group of ``None`` means a single rank."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def local_box(self, shape: tuple[int, ...], dim: int | None) -> Box:
        """Return this rank's box of a tensor that is split along ``dim``."""
        box = list(full_box(shape))
        if dim is not None and self.group is not None:
            # The rows of a vocabulary may be split unevenly: the last rank has fewer.
            length = -(-shape[dim] // self.size)
            start = dist.get_rank(self.group) * length
            box[dim] = slice(min(start, shape[dim]), min(start + length, shape[dim]))
        return tuple(box)


class Factor:
    """``A`` or ``B`` of an adapted layer.

    Args:
        name: name in peft's files.
        shape: shape of the full matrix.
        split_dim: dimension along which tensor-parallel ranks split it; ``None`` if replicated.
        summed: whether the gradient on one rank is a partial sum.

    Attributes:
        parameter: this rank's slice.
        box: position of the slice in the full matrix.
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
        """Copy this rank's slice of the full matrix."""
        self.parameter.copy_(full[self.box])

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """Return the full matrix from the slices of all ranks. Collective."""
        if self.split_dim is None or self._ranks.group is None:
            return local.detach().clone()
        # all_gather_rows gathers equally many rows along the first dimension: move the split one there, and pad it.
        extent = self.shape[self.split_dim]
        rows = local.movedim(self.split_dim, 0)
        rows = F.pad(rows, (0, 0, 0, -(-extent // self._ranks.size) - len(rows)))
        return all_gather_rows(rows, self._ranks.group)[:extent].movedim(0, self.split_dim).contiguous()


class LowRank:
    """The pair of factors of one layer: ``scale * B @ A``.

    Args:
        target: the adapted layer.
        split: how tensor-parallel ranks split the layer.
        ranks: tensor-parallel ranks.
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
        self.target, self.scale, self.split, self.tp_rank = target, target.scale, split, ranks.rank
        # ``A`` is [rank, inputs], ``B`` is [outputs, rank].
        self.down = Factor(target.down, down, split.down_dim, split.down_summed, ranks, device, dtype)
        self.up = Factor(target.up, up, split.up_dim, split.up_summed, ranks, device, dtype)

    def apply(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's contribution, computed in the dtype of ``x``.

        Args:
            out: ``[..., outputs]``. Output of the layer.
            x: ``[..., inputs]``. Input of the layer.
        """
        # Down to the rank, with the layer's own communication before and after.
        rows, down = self.split.before_down(x.flatten(0, -2)), self.down.parameter.to(x.dtype)
        saved = self.split.saved_input(x)
        low = F.linear(rows, down) if saved is None else Down.apply(rows, len(down), [(0, len(rows))], saved, down)
        # One fused product adds the contribution to the output.
        up = self.local_up().to(x.dtype)
        added = torch.addmm(out.flatten(0, -2), self.split.before_up(low), up.t(), alpha=self.scale)
        return added.view(out.shape)

    def local_up(self) -> Tensor:
        """Return the rows of ``B`` that give the outputs of the layer on this rank."""
        rows = self.split.up_rows
        return self.up.parameter if rows is None else take_rows(self.up.parameter, rows)

    def head_update(self) -> HeadUpdate:
        """Return the factors of an output head, which adds their product to its logits chunk by chunk."""
        return HeadUpdate(self.down.parameter, self.up.parameter, self.scale)


@dataclass(frozen=True)
class WeightDelta:
    """Update of a weight, ``scale * up @ down`` of shape ``[outputs, inputs]``, kept as factors."""

    up: Tensor
    down: Tensor
    scale: float

    @torch.no_grad()
    def add_to(self, weight: Tensor, box: Box) -> Tensor:
        """Return a slice of a weight, located at ``box``, plus the slice of the update, in new memory."""
        rows, columns = box
        # Multiply only the rows and columns of the slice.
        delta = (self.up[rows] @ self.down[:, columns]) * self.scale
        return (weight.to(delta.dtype) + delta.to(weight.device)).to(weight.dtype)
