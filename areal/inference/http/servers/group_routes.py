"""Interface of the requests with which a kind of server receives weights over a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.inference.http.servers.http_call import HTTPCall, LabelReply, ReplyBody

INTERRUPTED = "interrupted"
"""Label of the weights during an update over a process group, and after one that did not end."""


class GroupRoutes(Protocol):
    """Requests of one kind of server. Replies are read by the methods next to the requests."""

    @property
    def packs(self) -> bool:
        """True if tensors may be packed into buffers."""

    @property
    def workers(self) -> HTTPCall[ReplyBody]:
        """Request for the number of the server's workers."""

    def read_workers(self, reply: ReplyBody) -> int:
        """Return the number of workers.

        Raises:
            ValueError: the layout of the workers is not supported.
        """

    @property
    def label(self) -> HTTPCall[LabelReply]:
        """Request for the label of the server's weights, which a restart resets."""

    def join(self, where: Mapping[str, Any], offset: int, size: int, packed_bytes: int | None) -> HTTPCall[ReplyBody]:
        """Return the request to join a group. It returns when all members have joined.

        Args:
            where: values of the carrier.
            offset: rank of the server's first worker.
            size: number of members.
            packed_bytes: size of packed buffers; ``None`` if tensors are sent one by one.

        Raises:
            ValueError: the server does not support packed buffers.
        """

    @property
    def leave(self) -> Sequence[HTTPCall[ReplyBody]]:
        """Requests that leave the group. They fail if there is none."""

    @property
    def start(self) -> Sequence[HTTPCall[ReplyBody]]:
        """Requests before the first tensor. From here on the server has no complete weights."""

    def update(self, specs: Sequence[TensorSpec]) -> HTTPCall[ReplyBody]:
        """Return the request that announces tensors. It returns when they are received and loaded."""

    def finish(self, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        """Return the requests after the last tensor. The last of them names the weights."""

    @property
    def recover(self) -> Sequence[HTTPCall[ReplyBody]]:
        """Requests that end an interrupted update, so that the next one can start. Some fail, depending on where it was interrupted."""


Handles = Mapping[str, Any]
"""Unique id of a GPU -> handle with which another process opens memory of that GPU."""


class HandleRoutes(GroupRoutes, Protocol):
    """Requests with which a server's workers load tensors from memory of the trainer on their own GPUs. There is no group."""

    def load(self, specs: Sequence[TensorSpec], handles: Handles) -> HTTPCall[ReplyBody]:
        """Return the request to load tensors, which lie one after the other, without gaps. It returns when the memory may be changed.

        Args:
            specs: the tensors.
            handles: of the memory, on each GPU that has a worker.
        """


@runtime_checkable
class TakesHandles(Protocol):
    """Routes of a kind of server that has :class:`HandleRoutes` too."""

    @property
    def by_handles(self) -> HandleRoutes:
        """Those requests."""


@dataclass(frozen=True)
class SentShards:
    """What the ranks of a trainer send to the workers of one server.

    Attributes:
        mesh: sizes of the axes of the trainer's ranks that send to it.
        workers: number of replicas of the server's model, and of workers of each.
        specs: the full tensors, in the order in which they are sent.
        placements: of each tensor over the mesh; ``None`` if each of these ranks sends all of it.
    """

    mesh: tuple[int, int]
    workers: tuple[int, int]
    specs: Sequence[TensorSpec]
    placements: Sequence[tuple[int, int] | None]


@runtime_checkable
class ShardRoutes(GroupRoutes, Protocol):
    """Requests with which a server's workers receive shards of a trainer's ranks."""

    @property
    def workers_of_replica(self) -> HTTPCall[ReplyBody]:
        """Request for the number of workers that have one copy of the model, which :meth:`read_workers` reads."""

    def join_shards(self, where: Mapping[str, Any], offset: int, size: int, plan: SentShards) -> HTTPCall[ReplyBody]:
        """Return the request to join a group with ranks of the trainer. Arguments as of :meth:`join`, and what the ranks send."""

    def receive(self, names: Sequence[str]) -> HTTPCall[ReplyBody]:
        """Return the request to receive tensors in this order. It returns when they are loaded."""
