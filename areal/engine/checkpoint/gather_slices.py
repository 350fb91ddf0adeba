"""Puts the tensors of files together from the slices that ranks hold, each on the one rank that writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

Bounds = tuple[tuple[int, int], ...]
SliceKey = tuple[str, Bounds]
"""A box of a tensor on disk as a key: the tensor's name, and pairs of start and stop."""


@dataclass(frozen=True)
class _NamedBox:
    name: str
    box: Box

    @property
    def key(self) -> SliceKey:
        """Name and box."""
        return self.name, tuple((s.start, s.stop) for s in self.box)


@dataclass(frozen=True)
class Slice(_NamedBox):
    """A part of a tensor on disk that this rank holds.

    Attributes:
        name: key on disk.
        box: which part of it.
        values: a view of this rank's memory in the shape of ``box``: to be read into, or written from.
    """

    values: Tensor


@dataclass(frozen=True)
class ComputedSlice(_NamedBox):
    """One whose values are computed when they are wanted, without any collective, and not kept."""

    compute: Callable[[], Tensor]

    @property
    def values(self) -> Tensor:
        """In the shape of ``box``."""
        return self.compute()


class SliceGatherer:
    """Sends slices to the ranks that write them, over the control plane: unlike a gather over the groups of the model, a rank that dies
    lets nobody wait. Collective.

    Args:
        slices: what this rank holds, cut in any way. Their values must not change meanwhile.
    """

    def __init__(self, slices: Iterable[Slice | ComputedSlice], control: ControlPlane) -> None:
        self._slices = {s.key: s for s in slices}
        self._control = control
        self._bounds_by_rank: list[dict[str, list[Bounds]]] = []
        for theirs in control.gather(list(self._slices)):
            by_name: dict[str, list[Bounds]] = {}
            for name, bounds in theirs:
                by_name.setdefault(name, []).append(bounds)
            self._bounds_by_rank.append(by_name)

    def gather(self, spec: TensorSpec, writer: int) -> Tensor | None:
        """A tensor of a file. Every rank calls it, in the same order.

        Args:
            writer: the rank that needs it.

        Returns:
            On ``writer`` the tensor, in host memory of its own; elsewhere ``None``.

        Raises:
            RankLostError: a rank died; names it.
            RuntimeError: the slices of all ranks leave something out. On every rank.
        """
        owners, me = self._owners(spec, writer), self._control.rank
        if me != writer:
            mine = [self._slices[spec.name, bounds].values for bounds, rank in owners.items() if rank == me]
            self._control.exchange([(_bytes(values.cpu().contiguous()), writer) for values in mine], [])
            return None
        out = torch.empty(spec.shape, dtype=spec.dtype)
        arriving: list[tuple[Tensor, Tensor, int]] = []
        for bounds, rank in owners.items():
            target = out[tuple(slice(*pair) for pair in bounds)]
            if rank == me:
                target.copy_(self._slices[spec.name, bounds].values)
            else:
                arriving.append((target, torch.empty(target.shape, dtype=out.dtype), rank))
        self._control.exchange([], [(_bytes(buffer), rank) for _, buffer, rank in arriving])
        for target, buffer, _ in arriving:
            target.copy_(buffer)
        return out

    def _owners(self, spec: TensorSpec, writer: int) -> dict[Bounds, int]:
        """Which rank gives which part: of several that hold the same one the writer, or else the first."""
        found: dict[Bounds, int] = {}
        for rank in sorted(range(self._control.size), key=lambda rank: rank != writer):
            for bounds in self._bounds_by_rank[rank].get(spec.name, ()):
                found.setdefault(bounds, rank)
        covered = sum(math.prod(stop - start for start, stop in bounds) for bounds in found)
        if covered < math.prod(spec.shape):
            raise RuntimeError(
                f"{spec.name}: the ranks hold {covered} of the elements of {list(spec.shape)} between them"
            )
        return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
