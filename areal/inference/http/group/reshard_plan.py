"""Which shard of each tensor a trainer rank sends, in the terms of NCCL's resharding: a mesh of the ranks, and a placement per tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from areal.engine.checkpoint.safetensors import TensorSpec

REPLICATE = -1
"""Placement on an axis of the mesh over which every rank has the same."""
MOST_SHARDS = 16
"""Maximum number of shards that NCCL's resharding joins into one full tensor (``MAX_SOURCES`` in its sources)."""
MOST_DIMENSIONS = 3

Numbers = tuple[tuple[int, int, int], ...]
"""Start, stop and step of a part in each dimension."""
Mesh = tuple[int, int]
"""Sizes of the two axes of a mesh of ranks, of which the second one counts first."""
Placements = tuple[int, int] | None
"""For each axis of the mesh the dimension that it divides, or :data:`REPLICATE`; ``None`` if every rank has the whole tensor."""


class HeldPart(NamedTuple):
    """A part of a tensor that a rank has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Numbers


@dataclass(frozen=True)
class PlannedTensor(TensorSpec):
    """One full tensor of an update.

    Attributes:
        placements: of what the ranks send.
        parts: parts that ranks exchange before, as pairs of a rank and the box that it has; empty if each has what it sends.
    """

    placements: Placements
    parts: tuple[tuple[int, Numbers], ...] = ()


@dataclass(frozen=True)
class ReshardPlan:
    """The tensors of an update in the order in which all ranks send them.

    Attributes:
        mesh: the ranks of the trainer.
        tensors: the tensors.
    """

    mesh: Mesh
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the full tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def cost(self) -> float:
        """Bytes that a rank sends at most: of its shards, if none of its replicas helps, and of the parts that ranks exchange."""
        ranks = self.mesh[0] * self.mesh[1]
        return sum(
            each.nbytes * (1 / self._shards(each.placements) + (1 - 1 / ranks if each.parts else 0))
            for each in self.tensors
        )

    def _shards(self, placements: Placements) -> int:
        divided = zip(self.mesh, placements or (REPLICATE, REPLICATE), strict=True)
        return max((size for size, dimension in divided if dimension != REPLICATE), default=1)

    def rows(self, placements: Placements, shape: Sequence[int], rank: int) -> slice:
        """Return the first dimension of what a rank sends of a full tensor, which is placed by rows or replicated."""
        start, stop, _ = box_of(shape, self.mesh, placements, rank)[0]
        return slice(start, stop)


def plan_resharding(held: Sequence[Sequence[HeldPart]]) -> ReshardPlan:
    """Return the plan for what each rank has, the same on every rank that has the same ``held``.

    A tensor that is divided evenly along one axis of the mesh, by at most 16 ranks, is sent as it lies. Of every other one the ranks exchange
    the parts and send rows of the full tensor. Of all meshes the one is taken that costs a rank the fewest bytes.

    Args:
        held: parts of each rank, by rank.

    Raises:
        ValueError: a tensor has no dimension or more than three, or a part of it is nowhere.
    """
    tensors = _by_name(held)
    ranks = len(held)
    meshes = [(ranks // inner, inner) for inner in range(1, ranks + 1) if ranks % inner == 0]

    plans = [ReshardPlan(mesh, tuple(each.planned(mesh) for each in tensors)) for mesh in meshes]
    return min(plans, key=lambda plan: plan.cost)


class _Spread:
    """One tensor, and the parts of it on each rank."""

    def __init__(self, part: HeldPart, ranks: int) -> None:
        self.name, self.dtype, self.shape = part.name, part.dtype, part.shape
        self.boxes: list[list[Numbers]] = [[] for _ in range(ranks)]

    def placed(self, mesh: Mesh) -> Placements:
        """Return the placements of what the ranks have; ``None`` if it is not divided along one axis."""
        for axis, size in enumerate(mesh):
            for dimension, length in enumerate(self.shape):
                placements = _along(axis, dimension)
                if 1 < size <= MOST_SHARDS and length % size == 0 and self._lies(mesh, placements):
                    return placements
        return None

    def planned(self, mesh: Mesh) -> PlannedTensor:
        if (direct := self.placed(mesh)) is not None:
            return PlannedTensor(self.name, self.dtype, self.shape, direct)
        axis = _row_axis(mesh)
        divides = 1 < mesh[axis] <= MOST_SHARDS and self.shape[0] % mesh[axis] == 0
        placements = _along(axis, 0) if divides else None
        # Whoever has all of it sends rows of it, and nothing is exchanged.
        parts = () if self._lies(mesh, None) else tuple(self._parts())
        return PlannedTensor(self.name, self.dtype, self.shape, placements, parts)

    def _lies(self, mesh: Mesh, placements: Placements) -> bool:
        """Return whether each rank has exactly its part."""
        return all(own == [box_of(self.shape, mesh, placements, rank)] for rank, own in enumerate(self.boxes))

    def _parts(self) -> Iterable[tuple[int, Numbers]]:
        """Return each part with the first rank that has it."""
        first: dict[Numbers, int] = {}
        for rank, own in enumerate(self.boxes):
            for box in own:
                first.setdefault(box, rank)
        have = sum(prod(len(range(*numbers)) for numbers in box) for box in first)
        if have != prod(self.shape):
            raise ValueError(
                f"{self.name}: the ranks have {have} of {prod(self.shape)} elements in {len(first)} different parts"
            )
        return ((rank, box) for box, rank in first.items())


def box_of(shape: Sequence[int], mesh: Mesh, placements: Placements, rank: int) -> Numbers:
    """Return the part of a tensor that a placement gives a rank."""
    box = [(0, length, 1) for length in shape]
    for axis, dimension in enumerate(placements or ()):
        if dimension != REPLICATE:
            length = shape[dimension] // mesh[axis]
            index = divmod(rank, mesh[1])[axis]
            box[dimension] = (index * length, (index + 1) * length, 1)
    return tuple(box)


def _along(axis: int, dimension: int) -> tuple[int, int]:
    return (dimension, REPLICATE) if axis == 0 else (REPLICATE, dimension)


def _row_axis(mesh: Mesh) -> int:
    """Return the axis that divides rows: the longer one that is not too long."""
    return max((0, 1), key=lambda axis: mesh[axis] if mesh[axis] <= MOST_SHARDS else 0)


def _by_name(held: Sequence[Sequence[HeldPart]]) -> list[_Spread]:
    """Return the tensors in the order of the first rank, then of those that the next one adds."""
    tensors: dict[str, _Spread] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            if not 1 <= len(part.shape) <= MOST_DIMENSIONS:
                raise ValueError(
                    f"{part.name} has {len(part.shape)} dimensions: NCCL's resharding takes 1 to {MOST_DIMENSIONS}; pass another carrier"
                )
            tensors.setdefault(part.name, _Spread(part, len(held))).boxes[rank].append(part.box)
    for each in tensors.values():
        joined = [join_boxes(own) for own in each.boxes]
        each.boxes = [own if one is None else [one.box] for own, one in zip(each.boxes, joined, strict=True)]
    return list(tensors.values())


class Joined(NamedTuple):
    """Parts that follow each other along one dimension.

    Attributes:
        box: what they are together.
        dimension: the dimension.
        order: their indices, from the first to the last.
    """

    box: Numbers
    dimension: int
    order: list[int]


def join_boxes(boxes: Sequence[Numbers]) -> Joined | None:
    """Return the parts of a tensor as one, such as the rows of neighbouring heads; ``None`` if they leave gaps."""
    if not boxes:
        return None
    order = sorted(range(len(boxes)), key=boxes.__getitem__)
    first, last = boxes[order[0]], boxes[order[-1]]
    dimension = next((d for d, numbers in enumerate(first) if numbers != last[d]), 0)
    box = [*first[:dimension], (first[dimension][0], last[dimension][1], first[dimension][2]), *first[dimension + 1 :]]
    stop = first[dimension][0]
    for index in order:
        numbers = boxes[index]
        start, _, step = numbers[dimension]
        others = [pair for d, pair in enumerate(zip(numbers, first, strict=True)) if d != dimension]
        if (start, step) != (stop, first[dimension][2]) or any(own != expected for own, expected in others):
            return None
        stop = start + len(range(*numbers[dimension])) * step
    return Joined(tuple(box), dimension, order)
