"""Ends of the groups in which the ranks of a trainer send shards, one group with the workers of each server."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from areal.inference.http.group.reshard_carrier import Link, ReshardCarrier, leave, side
from areal.inference.http.group.reshard_plan import Mesh, Placements


@dataclass(frozen=True)
class Invitation:
    """What the ranks need to join the group of one server.

    Attributes:
        key: key of the group.
        senders: ranks of the trainer that are members, in their order in the group. The workers follow.
        size: number of members.
        mesh: the workers: replicas of the model, and workers of each.
        rows: number of tensors, whose places the first worker tells.
    """

    key: str
    senders: tuple[int, ...]
    size: int
    mesh: Mesh
    rows: int


class Links:
    """This rank's ends of the groups, one per server to which it sends. Implements :class:`~areal.inference.http.group.carrier.Meeting`.

    Args:
        carrier: carrier of this rank.
        rank: rank of this process in the trainer.
    """

    def __init__(self, carrier: ReshardCarrier, rank: int) -> None:
        self._carrier, self._rank = carrier, rank
        self._invitations: list[Invitation] = []
        self._links: list[Link] = []
        self._placements: list[list[Placements]] = []
        self._left = 0  # counts how often the groups were left
        self._busy = False
        self._lock = threading.Lock()

    def open(self, size: int) -> Mapping[str, Any]:
        return {"nccl_unique_id_b64": self._carrier.new_key()}

    def accept(self, invitations: Sequence[Invitation]) -> None:
        """Leave the groups, and join others in :meth:`join`: those of which this rank is a member."""
        self.abort()
        self._invitations = [each for each in invitations if self._rank in each.senders]

    def join(self, seconds: float) -> None:
        left, made, placements = self._left, list[Link](), list[list[Placements]]()
        try:
            for each in self._invitations:
                made.append(self._carrier.join(each.key, each.senders.index(self._rank), each.size, seconds))
                # A number below -1 stands for a worker that takes the whole tensor.
                table = made[-1].receive(len(each.senders), each.rows, seconds)
                placements.append([None if min(row) < -1 else (row[0], row[1]) for row in table])
            with self._lock:
                if self._left != left:
                    raise RuntimeError("the groups were left while their members joined")
                self._links, self._placements = made, placements
        except Exception:
            leave(made, busy=True)
            raise

    def send(self, index: int, shard: Tensor, mesh: Mesh, placements: Placements) -> None:
        """Send the shard of a tensor to the servers of this rank. Does not wait."""
        source, self._busy = side(mesh, 0, placements), True
        for link, each, targets in zip(self._links, self._invitations, self._placements, strict=True):
            link.reshard(shard, source, side(each.mesh, len(each.senders), targets[index]))

    def wait(self, seconds: float) -> None:
        """Wait until everything is sent."""
        for link in self._links:
            link.wait(seconds)
        self._busy = False

    def cancel(self) -> None:
        """Let a call in another thread fail. The groups must be left afterwards."""
        for link in self._links:
            link.revoke()

    def abort(self) -> None:
        with self._lock:
            links, self._links, self._placements = self._links, [], []
            self._left += 1
        busy, self._busy = self._busy, False
        leave(links, busy=busy)
