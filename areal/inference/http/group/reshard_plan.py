"""Which blocks of each tensor the trainer ranks send, in the terms of NCCL's resharding, and which parts they exchange before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.checkpoint.tensor_blocks import MOST_SHARDS, block_bytes, block_numbers
from areal.inference.http.group.boxes import Numbers, block_of, count_elements, join_boxes, overlap

REPLICATE = -1
"""Placement on an axis of the mesh over which every rank has the same."""
MOST_DIMENSIONS = 3
_MOST_ORDERS = 4

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


class Piece(NamedTuple):
    """Elements of the block of a rank.

    Attributes:
        source: rank that has them.
        target: rank that sends the block.
        part: box of the source in which they are.
        box: box of the elements.
    """

    source: int
    target: int
    part: Numbers
    box: Numbers


@dataclass(frozen=True)
class Exchange:
    """How the ranks assemble the blocks of a tensor.

    Attributes:
        blocks: block of each rank that sends one.
        pieces: pieces of each block, by the rank that sends the block. Pieces that a rank has itself are included.
        sent: pieces for the blocks of others, by the rank that has them.
    """

    blocks: Mapping[int, Numbers]
    pieces: Mapping[int, Sequence[Piece]]
    sent: Mapping[int, Sequence[Piece]]

    @cached_property
    def elements(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Number of elements that each rank sends to other ranks, and that it receives from them."""
        sent = {rank: sum(count_elements(each.box) for each in pieces) for rank, pieces in self.sent.items()}
        received = {
            rank: sum(count_elements(each.box) for each in pieces if each.source != rank)
            for rank, pieces in self.pieces.items()
        }
        return sent, received


@dataclass(frozen=True)
class PlannedTensor(TensorSpec):
    """One full tensor of an update.

    Attributes:
        placements: of the blocks over the ranks that send to one server.
        exchange: how the ranks assemble the blocks.
    """

    placements: Placements
    exchange: Exchange = field(repr=False)


class RankTraffic(NamedTuple):
    """Bytes of one rank in an update: sent to servers, sent to other ranks of the trainer, and received from them."""

    to_servers: int
    to_ranks: int
    from_ranks: int


@dataclass(frozen=True)
class ReshardPlan:
    """The tensors of an update in the order in which all ranks send them.

    Attributes:
        ranks: number of ranks of the trainer.
        servers: number of servers for which the plan was made.
        groups: for each block of a tensor the ranks that assemble it. Server ``i`` gets it from rank ``i`` of them, modulo their number.
        tensors: the tensors.
    """

    ranks: int
    servers: int
    groups: tuple[tuple[int, ...], ...]
    tensors: tuple[PlannedTensor, ...]

    @property
    def mesh(self) -> Mesh:
        """The ranks that send to one server."""
        return len(self.groups), 1

    @property
    def nbytes(self) -> int:
        """Size of the full tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def exchanges(self) -> bool:
        """True if ranks exchange parts."""
        return any(each.exchange.sent for each in self.tensors)

    @cached_property
    def cost(self) -> int:
        """Most bytes that a rank sends and receives."""
        return max(map(sum, self.traffic()))

    def senders(self, server: int) -> tuple[int, ...]:
        """Return the ranks that send to a server, in the order of their blocks."""
        return tuple(group[server % len(group)] for group in self.groups)

    def traffic(self) -> list[RankTraffic]:
        """Return the bytes of each rank. A server's workers pass on to each other what several of them need."""
        times = Counter(rank for server in range(self.servers) for rank in self.senders(server))
        totals = [[0, 0, 0] for _ in range(self.ranks)]
        sizes: Counter[int] = Counter()
        for each in self.tensors:
            sizes[id(each.exchange)] += each.dtype.itemsize
        for exchange in {id(each.exchange): each.exchange for each in self.tensors}.values():
            size = sizes[id(exchange)]
            for rank, block in exchange.blocks.items():
                totals[rank][0] += count_elements(block) * size * times[rank]
            for column, elements in enumerate(exchange.elements, 1):
                for rank, number in elements.items():
                    totals[rank][column] += number * size
        return [RankTraffic(*each) for each in totals]


def plan_resharding(held: Sequence[Sequence[HeldPart]], servers: int = 1) -> ReshardPlan:
    """Return the plan for what each rank has, the same on every rank that has the same ``held``.

    A tensor is sent in equal blocks along one dimension, each by another rank. A rank that has its block sends it as it lies; others
    receive the pieces that they miss. If there are more ranks than blocks, neighbouring ranks have the same block, and send to different
    servers. Of all numbers and orders of blocks those are taken with which a rank sends and receives the fewest bytes.

    Args:
        held: parts of each rank, by rank.
        servers: number of servers.

    Raises:
        ValueError: a tensor has no dimension or more than three, or a part of it is nowhere.
    """
    tensors = _by_name(held)
    ranks = len(held)
    candidates = [
        _Candidate(tensors, _groups(order, number, servers), servers)
        for number in block_numbers(ranks, MOST_SHARDS)
        for order in _orders(tensors, ranks)
    ]
    best: ReshardPlan | None = None
    # The size of the blocks is a lower bound of the cost.
    for candidate in sorted(candidates, key=lambda each: each.least):
        if best is not None and candidate.least >= best.cost:
            break
        plan = candidate.plan(ranks)
        best = plan if best is None or plan.cost < best.cost else best
    if best is None:
        raise ValueError("no rank has a tensor")
    return best


class _Layout:
    """Boxes of a tensor on each rank. Tensors of many layers have the same."""

    def __init__(self, shape: tuple[int, ...], boxes: Sequence[Sequence[Numbers]]) -> None:
        self.shape, self.boxes = shape, boxes
        self.holders: dict[Numbers, list[int]] = {}
        for rank, own in enumerate(boxes):
            for box in own:
                self.holders.setdefault(box, []).append(rank)
        self.elements = sum(map(count_elements, self.holders))
        whole = block_of(shape, 1, None, 0)
        self._divided = [any(box[d] != whole[d] for box in self.holders) for d in range(len(shape))]

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The ranks in the order of their boxes; ``None`` if all have the same."""
        if len(self.holders) == 1 and len(next(iter(self.holders.values()))) == len(self.boxes):
            return None
        return tuple(sorted(range(len(self.boxes)), key=lambda rank: (not self.boxes[rank], self.boxes[rank], rank)))

    def dimensions(self, blocks: int) -> list[int | None]:
        """Return the dimensions along which equal blocks may be sent, those along which ranks have parts if possible."""
        even = [d for d, length in enumerate(self.shape) if length and length % blocks == 0]
        divided = [d for d in even if self._divided[d]]
        return [*(divided or even[:1])] or [None]

    def exchange(self, groups: Sequence[Sequence[int]], dimension: int | None) -> Exchange:
        """Return how ranks assemble the blocks along a dimension."""
        blocks: dict[int, Numbers] = {}
        pieces: dict[int, list[Piece]] = {}
        sent: dict[int, list[Piece]] = defaultdict(list)
        load: Counter[int] = Counter()
        for index, group in enumerate(groups):
            block = block_of(self.shape, len(groups), dimension, index)
            parts = [(part, box) for part in self.holders if (box := overlap(part, block)) is not None]
            for rank in group:
                blocks[rank], pieces[rank] = block, []
                for part, box in parts:
                    if part in self.boxes[rank]:
                        source = rank
                    else:
                        source = min(self.holders[part], key=lambda each: (load[each], abs(each - rank)))
                        load[source] += count_elements(box)
                        sent[source].append(Piece(source, rank, part, box))
                    pieces[rank].append(Piece(source, rank, part, box))
        return Exchange(blocks, pieces, dict(sent))


class _Spread(NamedTuple):
    """One tensor, and its layout."""

    name: str
    dtype: torch.dtype
    layout: _Layout


class _Candidate:
    """A number and an order of blocks.

    Attributes:
        least: bytes that the rank with the most servers sends, without what ranks exchange.
    """

    def __init__(self, tensors: Sequence[_Spread], groups: tuple[tuple[int, ...], ...], servers: int) -> None:
        self._tensors, self._groups, self._servers = tensors, groups, servers
        sizes = [(each.layout.shape, each.dtype.itemsize) for each in tensors]
        self.least = max(-(-servers // len(group)) for group in groups) * block_bytes(sizes, len(groups))

    def plan(self, ranks: int) -> ReshardPlan:
        best: dict[int, tuple[Placements, Exchange]] = {}
        planned = []
        for each in self._tensors:
            if id(each.layout) not in best:
                choices = [
                    (d, each.layout.exchange(self._groups, d)) for d in each.layout.dimensions(len(self._groups))
                ]
                dimension, exchange = min(choices, key=lambda choice: sum(choice[1].elements[1].values()))
                placements = None if dimension is None else (dimension, REPLICATE)
                best[id(each.layout)] = (placements if len(self._groups) > 1 else None, exchange)
            planned.append(PlannedTensor(each.name, each.dtype, each.layout.shape, *best[id(each.layout)]))
        return ReshardPlan(ranks, self._servers, self._groups, tuple(planned))


def _groups(order: Sequence[int], blocks: int, servers: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each block: neighbours in an order, of which at most one for each server is needed."""
    groups: list[list[int]] = [[] for _ in range(blocks)]
    for index, rank in enumerate(order):
        groups[index * blocks // len(order)].append(rank)
    return tuple(tuple(group[: max(1, servers)]) for group in groups)


def _orders(tensors: Sequence[_Spread], ranks: int) -> list[tuple[int, ...]]:
    """Return orders of the ranks: their own, and those in which they have the parts of the most bytes."""
    orders: Counter[tuple[int, ...]] = Counter()
    for each in tensors:
        if (order := each.layout.order) is not None:
            orders[order] += prod(each.layout.shape) * each.dtype.itemsize
    return list(dict.fromkeys([tuple(range(ranks)), *(order for order, _ in orders.most_common(_MOST_ORDERS - 1))]))


def _by_name(held: Sequence[Sequence[HeldPart]]) -> list[_Spread]:
    """Return the tensors in the order of the first rank, then of those that the next one adds."""
    first: dict[str, HeldPart] = {}
    boxes: dict[str, list[list[Numbers]]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            if not 1 <= len(part.shape) <= MOST_DIMENSIONS:
                raise ValueError(
                    f"{part.name} has {len(part.shape)} dimensions: NCCL's resharding takes 1 to {MOST_DIMENSIONS}; pass another carrier"
                )
            first.setdefault(part.name, part)
            if part.name not in boxes:
                boxes[part.name] = [[] for _ in held]
            boxes[part.name][rank].append(part.box)
    layouts: dict[tuple[object, ...], _Layout] = {}
    tensors = []
    for name, part in first.items():
        joined = tuple(tuple(own if (one := join_boxes(own)) is None else [one.box]) for own in boxes[name])
        layout = layouts.get(key := (part.shape, joined)) or _Layout(part.shape, joined)
        layouts[key] = layout
        if layout.elements != prod(part.shape):
            raise ValueError(
                f"{name}: the ranks have {layout.elements} of {prod(part.shape)} elements in {len(layout.holders)} different parts"
            )
        tensors.append(_Spread(name, part.dtype, layout))
    return tensors
