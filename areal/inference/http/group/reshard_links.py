"""Ends of the groups in which the ranks of a trainer send shards, one group with the workers of each server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from areal.inference.http.group.reshard_carrier import Link, ReshardCarrier, side
from areal.inference.http.group.reshard_plan import Mesh, Placements


@dataclass(frozen=True)
class Invitation:
    """What the ranks need to join the group of one server.

    Attributes:
        key: key of the group.
        size: number of members: the ranks of the trainer, then the workers.
        mesh: the workers: replicas of the model, and workers of each.
        rows: number of tensors, whose places the first worker tells.
    """

    key: str
    size: int
    mesh: Mesh
    rows: int


class Links:
    """This rank's ends of the groups, one per server. Implements :class:`~areal.inference.http.group.carrier.Meeting`.

    Args:
        carrier: carrier of this rank.
        rank, ranks: rank of this process in the trainer, and number of its ranks.
    """

    def __init__(self, carrier: ReshardCarrier, rank: int, ranks: int) -> None:
        self._carrier, self._rank, self._ranks = carrier, rank, ranks
        self._invitations: list[Invitation] = []
        self._links: list[Link] = []
        self._placements: list[list[Placements]] = []

    def open(self, size: int) -> Mapping[str, Any]:
        return {"nccl_unique_id_b64": self._carrier.new_key()}

    def accept(self, invitations: Sequence[Invitation]) -> None:
        """Leave the groups, and join others in :meth:`join`."""
        self.abort()
        self._invitations = list(invitations)

    def join(self, seconds: float) -> None:
        for each in self._invitations:
            link = self._carrier.join(each.key, self._rank, each.size, seconds)
            self._links.append(link)
            # A number below -1 stands for a worker that takes the whole tensor.
            table = link.receive(self._ranks, each.rows, seconds)
            self._placements.append([None if min(row) < -1 else (row[0], row[1]) for row in table])

    def send(self, index: int, shard: Tensor, mesh: Mesh, placements: Placements) -> None:
        """Send the shard of a tensor to all servers. Does not wait."""
        source = side(mesh, 0, placements)
        for link, each, targets in zip(self._links, self._invitations, self._placements, strict=True):
            link.reshard(shard, source, side(each.mesh, self._ranks, targets[index]))

    def wait(self, seconds: float) -> None:
        """Wait until everything is sent."""
        for link in self._links:
            link.wait(seconds)

    def abort(self) -> None:
        links, self._links, self._placements = self._links, [], []
        for link in links:
            link.abort()
