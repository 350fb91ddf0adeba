"""Gather full tensors from the slices of all ranks, each tensor on the one rank that writes it to a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

Bounds = tuple[tuple[int, int, int], ...]
"""A box as start, stop and step, for each dimension: unlike slices, they can be keys and can be sent."""

SliceKey = tuple[str, Bounds]
"""A box of a tensor on disk: the tensor's name and the bounds."""


@dataclass(frozen=True)
class _NamedBox:
    name: str
    box: Box

    @property
    def key(self) -> SliceKey:
        """Name and bounds."""
        return self.name, tuple((s.start, s.stop, s.step or 1) for s in self.box)


@dataclass(frozen=True)
class Slice(_NamedBox):
    """A slice of a tensor on disk, in this rank's memory.

    Attributes:
        name: key on disk.
        box: bounds of the slice within the tensor on disk.
        values: tensor in the shape of ``box``. A view of this rank's parameters, to load into or save from.
    """

    values: Tensor


@dataclass(frozen=True)
class ComputedSlice(_NamedBox):
    """A slice whose values are computed each time they are read. The computation calls no collective."""

    compute: Callable[[], Tensor]

    @property
    def values(self) -> Tensor:
        """Values in the shape of ``box``."""
        return self.compute()


class SliceGatherer:
    """Sends slices to the ranks that write them. Constructing one is collective.

    Slices travel over the control plane, where a dead rank is detected: it does not hang the others, as it would in a gather
    over the process groups of the model.

    Args:
        slices: slices of this rank, of any shapes; ranks may have equal ones. Their values must not change while gathering.
        control: control plane over all ranks.
    """

    def __init__(self, slices: Iterable[Slice | ComputedSlice], control: ControlPlane) -> None:
        self._slices = {s.key: s for s in slices}
        self._control = control
        self._bounds_by_rank: list[dict[str, list[Bounds]]] = []
        # Exchange the keys once: afterwards every rank knows which rank has which slices, without further messages.
        for keys in control.gather(list(self._slices)):
            by_name: dict[str, list[Bounds]] = {}
            for name, bounds in keys:
                by_name.setdefault(name, []).append(bounds)
            self._bounds_by_rank.append(by_name)

    def gather(self, spec: TensorSpec, writer: int) -> Tensor | None:
        """Gather one tensor on the rank that writes it. Every rank calls this for the same tensors in the same order.

        Args:
            spec: name, shape and dtype of the tensor.
            writer: rank that needs the tensor.

        Returns:
            On ``writer`` the tensor, in new host memory; on other ranks ``None``.

        Raises:
            RankLostError: a rank died. The error names it.
            RuntimeError: the slices of all ranks do not cover the tensor. Raised on every rank.
        """
        owners, this_rank = self._owners(spec, writer), self._control.rank
        # Other ranks send the slices that they own.
        if this_rank != writer:
            owned = [self._slices[spec.name, bounds].values for bounds, rank in owners.items() if rank == this_rank]
            self._control.exchange([(_bytes(values.cpu().contiguous()), writer) for values in owned], [])
            return None
        # The writer copies its own slices and prepares a receive buffer for each of the others.
        out = torch.empty(spec.shape, dtype=spec.dtype)
        incoming: list[tuple[Tensor, Tensor, int]] = []  # box of the result, buffer, sending rank
        for bounds, rank in owners.items():
            target = out[tuple(slice(*bound) for bound in bounds)]
            if rank == this_rank:
                target.copy_(self._slices[spec.name, bounds].values)
            else:
                incoming.append((target, torch.empty(target.shape, dtype=out.dtype), rank))
        # Buffers are contiguous, boxes of the result in general are not: receive first, then copy.
        self._control.exchange([], [(_bytes(buffer), rank) for _, buffer, rank in incoming])
        for target, buffer, _ in incoming:
            target.copy_(buffer)
        return out

    def _owners(self, spec: TensorSpec, writer: int) -> dict[Bounds, int]:
        """Return the rank that provides each slice of a tensor. Computed alike on every rank, without communication."""
        # Of ranks with the same slice, take the writer, which then sends nothing, else the first.
        owners: dict[Bounds, int] = {}
        for rank in sorted(range(self._control.size), key=lambda rank: rank != writer):
            for bounds in self._bounds_by_rank[rank].get(spec.name, ()):
                owners.setdefault(bounds, rank)
        # Distinct slices of a tensor never overlap, so that counting elements shows whether any are missing.
        covered = sum(math.prod(len(range(*bound)) for bound in bounds) for bounds in owners)
        if covered < math.prod(spec.shape):
            raise RuntimeError(
                f"{spec.name}: the ranks hold {covered} of the elements of {list(spec.shape)} between them"
            )
        return owners


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: gloo does not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)
