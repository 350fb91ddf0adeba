"""Shards of trainer ranks over gloo in place of NCCL's resharding."""

from __future__ import annotations

import base64
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.inference.http.group.reshard_carrier import Link, NCCLLink, ReshardCarrier, Side
from areal.tests.harness.servers.vllm_plugin import areal_fake_m2n as m2n


class GlooReshardCarrier(ReshardCarrier):
    """Implements the carrier over gloo. ``links`` are all that were made."""

    def __init__(self) -> None:
        self._device = torch.device("cpu", 0)
        self.links: list[GlooLink] = []
        self._stores: list[dist.TCPStore] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to servers."""
        return sum(link.sent for link in self.links)

    def check(self) -> None:
        return None

    def new_key(self) -> str:
        key, store = m2n.new_key()
        self._stores.append(store)
        return key

    def join(self, key: str, rank: int, size: int, seconds: float) -> Link:
        self.links.append(GlooLink(key, rank, size, seconds))
        return self.links[-1]


class GlooLink(NCCLLink):
    """Implements a link over gloo, with the descriptions of layouts that NCCL would get."""

    def __init__(self, key: str, rank: int, size: int, seconds: float) -> None:
        self._m2n: Any = m2n
        self._comm: Any = m2n.Comm(base64.b64decode(key), rank, size, seconds)
        self._handle = m2n.Handle.create(m2n.Config(max_cta=None))
        self._final, self._revoked = 0, False

    @property
    def sent(self) -> int:
        return self._final if self._comm is None else self._comm.sent

    def receive(self, root: int, rows: int, seconds: float) -> list[list[int]]:
        table = torch.empty((rows, 2), dtype=torch.int8)
        self._comm.broadcast(table, root)
        return table.tolist()

    def reshard(self, shard: Tensor, source: Side, target: Side) -> None:
        comm = self._comm
        if self._revoked:
            raise RuntimeError("the communicator was revoked")
        m2n.reshard(shard, None, comm, None, handle=self._handle, **self._layouts(source, target))

    def wait(self, seconds: float) -> None:
        return None

    def revoke(self) -> None:
        self._revoked = True

    def finalize(self) -> None:
        assert self._comm is not None, "the communicator is released before what the resharding has on it"
        self._handle.destroy()

    def abort(self) -> None:
        self._final, self._comm = self._comm.sent, None
