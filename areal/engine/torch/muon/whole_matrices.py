"""Whole matrices on the ranks that compute with them, from the parts of all ranks, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.collectives import exchange_rows
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

Matrix = tuple[str, int]
"""Name of a parameter, and the place of a matrix in it if it is a stack."""

Bounds = tuple[int, int, int, int]
"""Part of a matrix: first row, end of its rows, first column, end of its columns."""

Part = tuple[Matrix, Bounds]

_ROUND = 2**26
"""Elements of matrices that a rank has whole at one time; one matrix may have more."""


def part_of(name: str, place: int, box: Box) -> Part:
    """Return a part by its rows and columns."""
    rows, columns = box
    return (name, place), (rows.start, rows.stop, columns.start, columns.stop)


@dataclass(frozen=True)
class _Shared:
    """A part that ranks have.

    Attributes:
        bounds: of the part.
        sender: rank that sends it to the owner of the matrix.
        holders: all ranks that have it.
    """

    bounds: Bounds
    sender: int
    holders: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a matrix, as a view."""
        top, bottom, left, right = self.bounds
        return whole[top:bottom, left:right]


@dataclass(frozen=True)
class _Item:
    """A matrix, the rank that gets it whole, and its parts."""

    matrix: Matrix
    shape: tuple[int, int]
    owner: int
    parts: tuple[_Shared, ...]


class WholeMatrices:
    """Gives each matrix to one of the ranks that have parts of it, and returns to them what that rank makes of it.

    Matrices are divided over ranks by the work of products of their smaller side, largest first. Constructing one is collective.

    Args:
        parts: this rank's parts. Ranks have parts with equal bounds, or without common elements.
        control: control plane over all ranks.
        group: process group of the same ranks; ``None`` if there is one.
        like: tensor in the dtype of the parts, on the device of collectives.

    Raises:
        RuntimeError: ranks have not all of a matrix.
    """

    def __init__(
        self, parts: Iterable[Part], control: ControlPlane, group: dist.ProcessGroup | None, like: Tensor
    ) -> None:
        own = list(parts)
        self._group, self._rank, self._size = group, control.rank, control.size
        self._nothing = like.new_empty(0)
        self._number = {part: number for number, part in enumerate(own)}
        holders: dict[Matrix, dict[Bounds, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, theirs in enumerate(control.gather(own)):
            for matrix, bounds in theirs:
                holders[matrix][bounds].append(rank)
        self._rounds = self._plan(holders)

    def _plan(self, holders: Mapping[Matrix, Mapping[Bounds, list[int]]]) -> list[list[_Item]]:
        """Return the matrices of this rank, by round. All ranks have as many rounds."""
        shapes = {matrix: _shape(matrix, parts) for matrix, parts in holders.items()}
        work, held = [0.0] * self._size, [0] * self._size
        rounds: dict[int, list[_Item]] = defaultdict(list)
        last = -1
        for matrix in sorted(holders, key=lambda each: (-_cost(shapes[each]), each)):
            parts = holders[matrix]
            ranks = sorted({rank for some in parts.values() for rank in some})
            owner = min(ranks, key=lambda rank: (work[rank], rank))
            work[owner] += _cost(shapes[matrix])
            number = held[owner] // _ROUND
            held[owner] += shapes[matrix][0] * shapes[matrix][1]
            last = max(last, number)
            if self._rank in ranks:
                shared = [
                    _Shared(bounds, owner if owner in some else some[0], tuple(some)) for bounds, some in parts.items()
                ]
                rounds[number].append(_Item(matrix, shapes[matrix], owner, tuple(shared)))
        return [rounds[number] for number in range(last + 1)]

    @torch.no_grad()
    def replace(
        self, parts: Sequence[Tensor], function: Callable[[dict[Matrix, Tensor]], Mapping[Matrix, Tensor]]
    ) -> None:
        """Replace this rank's parts by those of what ``function`` makes of whole matrices. Collective.

        Args:
            parts: values of this rank's parts, in their order.
            function: called with whole matrices. Each is given to one rank. Returns matrices of the same shapes.
        """
        for items in self._rounds:
            made = function(self._gather(items, parts))
            self._return(items, made, parts)

    def _gather(self, items: Sequence[_Item], parts: Sequence[Tensor]) -> dict[Matrix, Tensor]:
        mine = [item for item in items if item.owner == self._rank]
        whole = {item.matrix: self._nothing.new_empty(item.shape) for item in mine}
        outgoing, incoming = self._by_rank(), self._by_rank()
        for item in items:
            for part in item.parts:
                if part.sender == self._rank:
                    outgoing[item.owner].append(parts[self._number[item.matrix, part.bounds]])
                if item.owner == self._rank:
                    incoming[part.sender].append(part.of(whole[item.matrix]))
        self._exchange(outgoing, incoming)
        return whole

    def _return(self, items: Sequence[_Item], made: Mapping[Matrix, Tensor], parts: Sequence[Tensor]) -> None:
        outgoing, incoming = self._by_rank(), self._by_rank()
        for item in items:
            for part in item.parts:
                if item.owner == self._rank:
                    for rank in part.holders:
                        outgoing[rank].append(part.of(made[item.matrix]))
                if self._rank in part.holders:
                    incoming[item.owner].append(parts[self._number[item.matrix, part.bounds]])
        self._exchange(outgoing, incoming)

    def _by_rank(self) -> list[list[Tensor]]:
        return [[] for _ in range(self._size)]

    def _exchange(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]) -> None:
        """Send tensors to each rank, and write those from each rank to the memory of ``incoming``, in order."""
        sent, received = ([sum(x.numel() for x in some) for some in each] for each in (outgoing, incoming))
        flat = torch.cat([self._nothing, *(x.reshape(-1).to(self._nothing) for some in outgoing for x in some)])
        if self._group is not None:
            flat = exchange_rows(flat, sent, received, self._group)
        targets = [x for some in incoming for x in some]
        for target, values in zip(targets, flat.split([x.numel() for x in targets]), strict=True):
            target.copy_(values.view(target.shape))


def _shape(matrix: Matrix, parts: Iterable[Bounds]) -> tuple[int, int]:
    """Return rows and columns of the matrix of these parts.

    Raises:
        RuntimeError: something of it is missing.
    """
    rows, columns = max(bounds[1] for bounds in parts), max(bounds[3] for bounds in parts)
    there = sum((bottom - top) * (right - left) for top, bottom, left, right in parts)
    if there != rows * columns:
        raise RuntimeError(f"{matrix}: ranks have {there} of the elements of a matrix of {rows} x {columns}")
    return rows, columns


def _cost(shape: tuple[int, int]) -> float:
    """Return the work of orthogonalising a matrix, in proportion."""
    return float(shape[0] * shape[1] * min(shape))
