"""Whole matrices on the ranks that compute with them, from the shards of all ranks, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.utils.collectives import exchange_rows
from areal.utils.dtensor import collective_device, local_part


@dataclass(frozen=True)
class _Axis:
    """Ranks of one axis of a mesh.

    Attributes:
        group: the ranks.
        rank: of this process.
        dim: dimension of a tensor that they divide; ``None`` if each has all of it.
    """

    group: dist.ProcessGroup
    rank: int
    dim: int | None

    @property
    def size(self) -> int:
        return self.group.size()


@dataclass(frozen=True)
class _Item:
    """A tensor, and the rank that gets it whole.

    Attributes:
        axes: axes over which it is divided, or replicated, in the order in which they are gathered.
        owner: rank on each axis.
        shapes: shape of this rank's piece before each axis is gathered, and whole at the end.
    """

    axes: tuple[_Axis, ...]
    owner: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def pieces(self, depth: int) -> list[tuple[int, ...]]:
        """Return the shapes of the pieces of all ranks of an axis."""
        axis, whole = self.axes[depth], self.shapes[depth + 1]
        if axis.dim is None:
            return [whole] * axis.size
        return [_resized(whole, axis.dim, n) for n in _chunks(whole[axis.dim], axis.size)]


class WholeMatrices:
    """Gives each of some tensors to one of the ranks that have it, whole, and returns what that rank makes of it.

    Work is divided over ranks by ``rows * columns * min(rows, columns)``. Ranks of an axis that divides the matrices of a stack keep their
    own: nothing is gathered over it.

    Args:
        tensors: this rank's tensors. Ranks that share a tensor have the same ones, in the same order.

    Raises:
        ValueError: two axes divide one dimension in an unknown order.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = collective_device(tensors[0]) if tensors else torch.device("cpu")
        self._nothing = torch.empty(0, dtype=tensors[0].dtype if tensors else None, device=self._device)
        made: dict[int, _Item] = {}
        loads: dict[tuple[str, ...], dict[tuple[int, ...], float]] = {}
        for number in sorted(range(len(tensors)), key=lambda k: (-_cost(tensors[k]), k)):
            x = tensors[number]
            axes = _axes(x)
            # The rank with the least work so far, on the same axes.
            ranks = loads.setdefault(tuple(axis.group.group_name for axis in axes), {})
            if not ranks:
                ranks |= dict.fromkeys(_coordinates([axis.size for axis in axes]), 0.0)
            owner = min(ranks, key=lambda rank: (ranks[rank], rank))
            ranks[owner] += _cost(x)
            made[number] = _Item(tuple(axes), owner, _shapes(x, axes))
        self._items = [made[number] for number in range(len(tensors))]
        # Groups exchange in the same order on all ranks, whatever a rank has.
        self._order: dict[str, int] = {}
        for number, item in enumerate(self._items):
            for axis in item.axes:
                self._order.setdefault(axis.group.group_name, number)

    @torch.no_grad()
    def apply(self, shards: Sequence[Tensor], function: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's shards of ``function(number, whole)``, of each tensor. Collective.

        Args:
            shards: this rank's shard of each tensor.
            function: called once among the ranks that share a tensor, with its number and the whole tensor. Returns one in its shape.
        """
        held: list[Tensor | None] = [x.to(self._device) for x in shards]
        depths = max((len(item.axes) for item in self._items), default=0)
        for depth in range(depths):
            self._move(held, depth, back=False)
        held = [None if x is None else function(number, x) for number, x in enumerate(held)]
        for depth in reversed(range(depths)):
            self._move(held, depth, back=True)
        return [held[number].to(shard.device) for number, shard in enumerate(shards)]  # type: ignore[union-attr]

    def _move(self, held: list[Tensor | None], depth: int, *, back: bool) -> None:
        """Gather tensors over one axis to their owners, or return them, in place."""
        by_group: dict[str, list[int]] = {}
        for number, item in enumerate(self._items):
            # On earlier axes, this rank is the owner, or has nothing any more.
            if len(item.axes) > depth and all(a.rank == o for a, o in zip(item.axes[:depth], item.owner, strict=False)):
                by_group.setdefault(item.axes[depth].group.group_name, []).append(number)
        for name in sorted(by_group, key=self._order.__getitem__):
            numbers = sorted(by_group[name], key=lambda k: (self._items[k].owner[depth], k))
            (self._return if back else self._gather)(held, numbers, depth)

    def _gather(self, held: list[Tensor | None], numbers: Sequence[int], depth: int) -> None:
        axis = self._items[numbers[0]].axes[depth]
        divided = [k for k in numbers if self._items[k].axes[depth].dim is not None]
        mine = [k for k in divided if self._items[k].owner[depth] == axis.rank]
        shapes = {k: self._items[k].pieces(depth) for k in mine}
        sent, pieces = [0] * axis.size, []
        for k in divided:
            pieces.append(_present(held[k]))
            sent[self._items[k].owner[depth]] += pieces[-1].numel()
        received = [sum(math.prod(shapes[k][rank]) for k in mine) for rank in range(axis.size)]
        incoming: list[Tensor] = []
        if divided:
            incoming = list(exchange_rows(_flat(pieces, self._nothing), sent, received, axis.group).split(received))
        for k in numbers:
            if self._items[k].owner[depth] != axis.rank:
                held[k] = None
        for k in mine:
            own = []
            for rank, shape in enumerate(shapes[k]):
                piece, incoming[rank] = incoming[rank].tensor_split([math.prod(shape)])
                own.append(piece.view(shape))
            held[k] = torch.cat(own, self._items[k].axes[depth].dim or 0)

    def _return(self, held: list[Tensor | None], numbers: Sequence[int], depth: int) -> None:
        axis = self._items[numbers[0]].axes[depth]
        outgoing: list[list[Tensor]] = [[] for _ in range(axis.size)]
        received = [0] * axis.size
        for k in numbers:
            item = self._items[k]
            received[item.owner[depth]] += math.prod(item.shapes[depth])
            if item.owner[depth] == axis.rank:
                whole, dim = _present(held[k]), item.axes[depth].dim
                sizes = [] if dim is None else [shape[dim] for shape in item.pieces(depth)]
                for rank, piece in enumerate([whole] * axis.size if dim is None else whole.split(sizes, dim)):
                    outgoing[rank].append(piece)
        sent = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        flat = _flat([piece for pieces in outgoing for piece in pieces], self._nothing)
        rest = exchange_rows(flat, sent, received, axis.group)
        for k in numbers:  # in the order of their owners
            shape = self._items[k].shapes[depth]
            piece, rest = rest.tensor_split([math.prod(shape)])
            held[k] = piece.view(shape)


def _axes(x: Tensor) -> list[_Axis]:
    """Return the axes over which the matrices of a tensor are divided, or replicated, in the order in which they are gathered."""
    if not isinstance(x, DTensor):
        return []
    mesh, axes, known = x.device_mesh, [], set[int]()
    for number, placement in enumerate(x.placements):
        dim = None if placement.is_replicate() else int(placement.dim) % x.dim()  # type: ignore[attr-defined]
        # Each rank keeps its own matrices of a stack.
        if mesh.size(number) == 1 or (x.dim() == 3 and dim == 0):
            continue
        # FSDP divides what tensor parallelism leaves, with strides, so that its axis comes first here.
        if dim in known and not any(hasattr(each, "split_factor") for each in x.placements[:number]):
            raise ValueError(f"{x.placements} of {tuple(x.shape)}: two axes divide one dimension in an unknown order")
        if dim is not None:
            known.add(dim)
        axes.append(_Axis(mesh.get_group(number), mesh.get_local_rank(number), dim))
    return axes


def _shapes(x: Tensor, axes: Sequence[_Axis]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of this rank's piece of a tensor before each axis is gathered, and at the end."""
    local = tuple(local_part(x).shape)
    shapes = [(local[0], *x.shape[1:]) if x.dim() == 3 else tuple(x.shape)]
    for axis in reversed(axes):
        shape = shapes[0]
        if axis.dim is not None:
            shape = _resized(shape, axis.dim, _chunks(shape[axis.dim], axis.size)[axis.rank])
        shapes.insert(0, shape)
    if shapes[0] != local:
        raise RuntimeError(f"a shard of {local} where {len(axes)} axes of {tuple(x.shape)} give {shapes[0]}")
    return tuple(shapes)


def _chunks(length: int, parts: int) -> list[int]:
    """Return the lengths of the parts of a dimension, as ``torch.chunk`` cuts it; 0 for those that are left."""
    most = -(-length // parts)
    return [min(most, max(0, length - most * part)) for part in range(parts)]


def _resized(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _cost(x: Tensor) -> float:
    """Return the work of orthogonalising a tensor, in proportion."""
    rows, columns = x.shape[-2:]
    return float(math.prod(x.shape[:-2]) * rows * columns * min(rows, columns))


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all ranks of some axes."""
    return list(itertools.product(*map(range, sizes)))


def _present(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("this rank has no piece of a tensor that it should send")
    return x


def _flat(pieces: Sequence[Tensor], nothing: Tensor) -> Tensor:
    """Return pieces end to end. ``nothing`` has their dtype and device: a rank may have no piece."""
    return torch.cat([nothing, *(piece.reshape(-1) for piece in pieces)])
