"""The names of ``nccl.m2n`` that vLLM and the trainer use, over gloo. Runs in an environment without areal, too.

A layout that NCCL's resharding does not take is an error, as there.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60.0
ID_BYTES = 128
"""Size of the unique id of a group of NCCL."""
MOST_SHARDS = 16


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis has the same."""


@dataclass(frozen=True)
class Shard:
    """The axis divides a dimension."""

    dim: int


class Mesh:
    """Ranks of one side."""

    def __init__(self, dims: Sequence[int], start_rank: int = 0) -> None:
        self.dims, self.start_rank = tuple(dims), start_rank
        self.size = self.dims[0] * self.dims[1]

    def __contains__(self, rank: int) -> bool:
        return self.start_rank <= rank < self.start_rank + self.size


@dataclass(frozen=True)
class Config:
    """Options of a handle."""

    max_cta: int | None = None


class Handle:
    """Counts handles that are open."""

    opened = 0

    @classmethod
    def create(cls, config: Config) -> Handle:
        cls.opened += 1
        return cls()

    def destroy(self) -> None:
        Handle.opened -= 1


class Comm:
    """A group of all members, with what vLLM uses of ``PyNcclCommunicator``. ``sent`` is the number of bytes that this rank sent."""

    device = torch.device("cpu")

    def __init__(self, key: bytes, rank: int, size: int, seconds: float = SECONDS) -> None:
        timeout = timedelta(seconds=seconds)
        port = int(key.split(b"\0")[0])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        self.rank, self.sent = rank, 0
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.timeout = timeout

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = src, 0, self.timeout
        self.group.broadcast([tensor], options).wait(self.timeout)

    def destroy(self) -> None:
        self.group = None


def new_key() -> tuple[str, dist.TCPStore]:
    """Return a key in the form of a unique id, and the store at which the members meet."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return base64.b64encode(str(store.port).encode().ljust(ID_BYTES, b"\0")).decode(), store


Box = tuple[tuple[int, int], ...]


def reshard(
    src: torch.Tensor | None,
    dst: torch.Tensor | None,
    comm: Comm,
    stream: Any,
    *,
    src_mesh: Mesh,
    src_placements: Sequence[Any],
    dst_mesh: Mesh,
    dst_placements: Sequence[Any],
    handle: Handle,
) -> None:
    """Send the parts of ``src`` that others need, or receive those of ``dst``."""
    if (src is None) == (comm.rank in src_mesh) or (dst is None) == (comm.rank in dst_mesh):
        raise ValueError("a rank has a tensor of a side to which it does not belong")
    own = src if src is not None else dst
    assert own is not None
    if not own.is_contiguous():
        raise ValueError("a tensor must be contiguous")
    mesh, placements = (src_mesh, src_placements) if src is not None else (dst_mesh, dst_placements)
    shape = [length * factor for length, factor in zip(own.shape, factors(mesh, placements, own.ndim), strict=True)]
    sources, targets = boxes(src_mesh, src_placements, shape), boxes(dst_mesh, dst_placements, shape)
    holders: dict[Box, list[int]] = {}
    for rank, box in sources.items():
        holders.setdefault(box, []).append(rank)
    if len(holders) > MOST_SHARDS and len(set(targets.values())) == 1:
        raise ValueError(f"{len(holders)} source shards feed one destination shard")
    works = []
    for (target, wanted), (box, ranks) in product(targets.items(), holders.items()):
        sender = ranks[target % len(ranks)]
        part = overlap(wanted, box)
        if part is None or comm.rank not in (sender, target):
            continue
        if comm.rank == sender and src is not None:
            values = src[within(part, box)].contiguous()
            comm.sent += values.nbytes
            works.append((comm.group.send([values], target, 0), values, None))
        elif dst is not None:
            place = dst[within(part, wanted)]
            values = torch.empty_like(place, memory_format=torch.contiguous_format)
            works.append((comm.group.recv([values], sender, 0), values, place))
    for work, values, place in works:
        work.wait(comm.timeout)
        if place is not None:
            place.copy_(values)


def factors(mesh: Mesh, placements: Sequence[Any], dimensions: int) -> list[int]:
    """Return how often each dimension is divided."""
    if [type(each) for each in placements].count(Shard) != 1 or len(placements) != 2:
        raise ValueError(f"exactly one of two axes divides a dimension, and not {placements}")
    result = [1] * dimensions
    for size, placement in zip(mesh.dims, placements, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] *= size
    return result


def boxes(mesh: Mesh, placements: Sequence[Any], shape: Sequence[int]) -> dict[int, Box]:
    """Return start and end of each dimension, by rank."""
    found = {}
    for index in range(mesh.size):
        box = [(0, length) for length in shape]
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                length, rest = divmod(shape[placement.dim], mesh.dims[axis])
                if rest:
                    raise ValueError(f"{shape} is not divided evenly by {mesh.dims}")
                at = divmod(index, mesh.dims[1])[axis]
                box[placement.dim] = (at * length, (at + 1) * length)
        found[mesh.start_rank + index] = tuple(box)
    return found


def overlap(first: Box, second: Box) -> Box | None:
    """Return the part that both have; ``None`` without one."""
    part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return part if all(start < end for start, end in part) else None


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """Return a part relative to a box that has it."""
    return tuple(slice(start - origin, end - origin) for (start, end), (origin, _) in zip(part, box, strict=True))
