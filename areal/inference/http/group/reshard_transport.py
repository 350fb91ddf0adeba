"""Transport that sends the shard of each trainer rank to the workers of servers, which NCCL's resharding joins."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.control import Control
from areal.api.weights import SelectName, WeightUpdateMeta
from areal.inference.http.group.chunk import CHUNK_BYTES
from areal.inference.http.group.held_tensors import HeldTensors
from areal.inference.http.group.reshard_carrier import ReshardCarrier
from areal.inference.http.group.reshard_exchange import assemble_block
from areal.inference.http.group.reshard_links import Invitation, Links
from areal.inference.http.group.reshard_plan import (
    HeldPart,
    Mesh,
    Placements,
    ReshardPlan,
    plan_resharding,
)
from areal.inference.http.group.reshard_sender import ReshardSender
from areal.inference.http.group.sender import INTERRUPTED_NOTE, Members
from areal.inference.http.servers.group_routes import ShardRoutes
from areal.weight_sync.chain import box_numbers
from areal.weight_sync.transport import Transport, sent_dtype

_BYTES_PER_LIMIT = 4 * 2**30


class ReshardTransport(Transport):
    """Each rank sends its blocks of all tensors, to every server or, if there are more than 16 ranks, to some of them.

    Args:
        control: control plane over all ranks of the trainer.
        servers: the servers, on the rank that owns them; ``None`` on all others.
        routes: requests of the servers' kind.
        carrier: carrier of this rank.
        cast: dtype in which floating-point tensors are sent.
        timeout: seconds for each request, for all to join, and for each 4 GiB of the model to arrive.
    """

    unsent_note = INTERRUPTED_NOTE

    def __init__(
        self,
        control: Control,
        servers: Members | None,
        routes: ShardRoutes,
        carrier: ReshardCarrier,
        *,
        cast: torch.dtype | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._carrier, self._device, self._timeout = carrier, carrier.device, timeout
        self._links = Links(carrier, control.rank)
        self._group: ReshardSender | None = None
        if servers is not None:
            self._group = ReshardSender(servers, routes, self._links, control.size, timeout=timeout)
        self._source: Any = None
        self._plan: ReshardPlan | None = None
        self._counts: Counter[str] = Counter()
        super().__init__(control, self._group, cast=cast)

    def close(self) -> None:
        super().close()
        self._links.abort()

    def _stream(self, source: Any, version: int, select: SelectName | None, note: str) -> WeightUpdateMeta:
        with self._aborting_on_error():
            try:
                plan = self._make_plan(source, note)
                self._meet(plan, note)
                # A source that refuses does so before servers are told of the update.
                parts = self._control.attempt(lambda: HeldTensors(source.local_tensors(), self._counts), note)
                self._control.attempt(partial(self._announce, plan), note)
                self._control.attempt(partial(self._send, parts, plan), note)
                self._control.attempt(self._end, note)
            except BaseException:
                self._leave()
                raise
        return WeightUpdateMeta(version, "full", len(plan.tensors), plan.nbytes)

    # ---- collective

    def _make_plan(self, source: Any, note: str) -> ReshardPlan:
        """Return the plan for a source and the number of servers. Collective."""
        counts = self._control.attempt_and_gather(lambda: 0 if self._group is None else self._group.servers, note)
        servers = max(1, *counts)
        if self._source is not source or self._plan is None or self._plan.servers != servers:
            held = self._control.attempt_and_gather(lambda: self._held(source), note)
            self._plan, self._source = plan_resharding(held, servers), source
            self._counts = Counter(part.name for part in held[self._control.rank])
        return self._plan

    def _meet(self, plan: ReshardPlan, note: str) -> None:
        """Join the groups, unless they exist."""

        def invite() -> list[Invitation] | None:
            # Servers wait for ranks that were invited, without a limit.
            self._carrier.check()
            return None if self._group is None else self._group.invite(plan)

        invitations = next(filter(None, self._control.attempt_and_gather(invite, note)), None)
        if invitations is not None:
            self._links.accept(invitations)
            meet = partial(self._links.join, self._timeout) if self._group is None else self._group.meet
            self._control.attempt(meet, note)

    # ---- this rank

    def _held(self, source: Any) -> list[HeldPart]:
        if not hasattr(source, "local_tensors"):
            raise ValueError(
                f"a {type(source).__name__} has no shards (local_tensors): send an engine, or pass another carrier"
            )
        return [
            HeldPart(name, sent_dtype(tensor, self._cast), tuple(shape), box_numbers(box))
            for name, tensor, box, shape in source.local_tensors()
        ]

    def _seconds(self, plan: ReshardPlan) -> float:
        """Return the time limit for all tensors."""
        return self._timeout * (1 + plan.nbytes / _BYTES_PER_LIMIT)

    def _announce(self, plan: ReshardPlan) -> None:
        if self._group is not None:
            self._group.announce(plan, self._seconds(plan))

    def _send(self, parts: HeldTensors, plan: ReshardPlan) -> None:
        """Send the blocks of this rank. After an error it goes on to exchange parts, for which the other ranks wait."""
        failure: Exception | None = None
        sending = Sending(self._links, self._seconds(plan))
        try:
            if plan.exchanges:
                # NCCL's communicator of all ranks must exist before some of them use it.
                dist.all_reduce(torch.zeros(1, device=self._device))
            for index, tensor in enumerate(plan.tensors):
                if failure is not None and not tensor.exchange.sent:
                    continue
                block = assemble_block(parts.take(tensor.name), tensor, self._control.rank, self._device)
                if failure is None and block is not None:
                    failure = sending.attempt(partial(sending.send, index, block, plan.mesh, tensor.placements))
            failure = failure or sending.attempt(sending.wait)
            if failure is None and self._group is not None and plan.ranks > len(plan.groups):
                # Other ranks may wait for a server to which this one does not send, and only this rank knows its error.
                self._group.end_round()
        finally:
            sending.end()
        if failure is not None:
            if self._group is not None:
                self._group.raise_error(failure)
            raise failure

    def _end(self) -> None:
        if self._group is not None:
            self._group.end_round()

    def _leave(self) -> None:
        self._links.abort()
        if self._group is not None:
            self._group.leave()


class Sending:
    """Shards of one rank on their way. It is stopped at the time limit, also in a call that does not return.

    Args:
        links: ends of the groups on this rank.
        seconds: time limit.
    """

    def __init__(self, links: Links, seconds: float) -> None:
        self._links, self._seconds = links, seconds
        self._shards: list[Tensor] = []
        self._nbytes = 0
        self._timer = threading.Timer(seconds, links.cancel)
        self._timer.daemon = True
        self._timer.start()

    def send(self, index: int, shard: Tensor, mesh: Mesh, placements: Placements) -> None:
        """Send a shard, and wait if many are on their way."""
        self._links.send(index, shard, mesh, placements)
        # Shards stay until they are sent.
        self._shards.append(shard)
        self._nbytes += shard.nbytes
        if self._nbytes >= CHUNK_BYTES:
            self.wait()

    def wait(self) -> None:
        """Wait until all shards are sent."""
        self._links.wait(self._seconds)
        self._shards, self._nbytes = [], 0

    def attempt(self, action: Callable[[], None]) -> Exception | None:
        """Call a function. After an error the groups are left, so that other ranks do not wait for this one. Returns the error."""
        try:
            action()
        except Exception as error:
            # Frames hold the group, and a gloo group closes its connections with its last reference.
            traceback.clear_frames(error.__traceback__)
            self._links.abort()
            return error
        return None

    def end(self) -> None:
        """Stop the clock."""
        self._timer.cancel()
