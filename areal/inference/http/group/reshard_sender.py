"""The servers of an update by shards, on the rank that owns them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from areal.inference.http.group.reshard_links import Invitation, Links
from areal.inference.http.group.reshard_plan import ReshardPlan
from areal.inference.http.group.sender import GroupSender, Members, Round
from areal.inference.http.servers.group_routes import SentShards, ShardRoutes
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody


class ReshardSender(GroupSender):
    """Makes a group for each server: of the ranks of the trainer that send to it, and of its workers.

    Args:
        servers, timeout: as in :class:`~areal.inference.http.group.sender.GroupSender`.
        routes: requests of the servers' kind.
        links: ends of the groups on this rank.
        ranks: number of ranks of the trainer.
    """

    def __init__(self, servers: Members, routes: ShardRoutes, links: Links, ranks: int, *, timeout: float) -> None:
        super().__init__(servers, routes, links, packed_bytes=None, timeout=timeout)
        self._shards, self._links, self._ranks = routes, links, ranks
        self._plan: ReshardPlan | None = None
        self._waiting: list[str] = []
        self._calls: dict[str, HTTPCall[ReplyBody]] = {}
        self._sizes: dict[str, int] = {}

    @property
    def servers(self) -> int:
        """Number of servers of the next update."""
        return len(self._waiting or self._joined)

    def _join(self, members: Sequence[str]) -> None:
        self._waiting = list(members)

    def invite(self, plan: ReshardPlan) -> list[Invitation] | None:
        """Return how to join the groups for a plan; ``None`` if they exist."""
        if self._plan is not plan and not self._waiting:
            # The plan is part of a group. The servers are the same.
            starts = self._starts
            self._make_group(list(self._joined))
            self._starts = starts
        if not self._waiting:
            return None
        self._plan, self._calls = plan, {}
        self._sizes = self._count(self._routes.workers)
        replicas = self._count(self._shards.workers_of_replica)
        invitations = []
        for server, (url, workers) in enumerate(self._sizes.items()):
            senders = plan.senders(server)
            mesh, size = (workers // replicas[url], replicas[url]), len(senders) + workers
            where = self._links.open(size)
            invitations.append(Invitation(where["nccl_unique_id_b64"], senders, size, mesh, len(plan.tensors)))
            shards = SentShards(plan.mesh, mesh, plan.tensors, [each.placements for each in plan.tensors])
            self._calls[url] = self._shards.join_shards(where, len(senders), size, shards)
        return invitations

    def _count(self, call: HTTPCall[ReplyBody]) -> dict[str, int]:
        """Return a number of workers of each server."""
        return {url: self._routes.read_workers(reply) for url, reply in self._ask(self._waiting, call).items()}

    def meet(self) -> None:
        """Join the groups together with the servers."""
        calls = {url: self._servers.call(url, call, self._timeout) for url, call in self._calls.items()}
        join = partial(self._links.join, self._timeout)
        Round("the process groups were not made", calls, self._links, join, self._timeout).end()
        self._joined, self.size, self._fresh, self._waiting = self._sizes, self._ranks, True, []

    def announce(self, plan: ReshardPlan, seconds: float) -> None:
        """Let the servers receive the tensors. An error of one of them stops this rank."""
        call = self._shards.receive([tensor.name for tensor in plan.tensors])
        self.start_round("the shards did not reach every server", call, lambda: None, seconds)
        if self._round is not None:
            self._round.on_error(self._links.cancel)

    def raise_error(self, own: Exception) -> None:
        """Raise the errors of the servers in place of one that they have caused."""
        errors = {} if self._round is None else self._round.failed()
        if errors:
            raise RuntimeError("; ".join(errors.values())) from own

    def leave(self) -> None:
        """Leave the groups: the next update makes others."""
        self._leave()
        self._waiting = []
