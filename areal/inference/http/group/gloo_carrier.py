"""Broadcast over gloo, through host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GlooCarrier:
    """Implements :class:`~areal.inference.http.group.carrier.Carrier` over gloo.

    vLLM has no such backend. Its workers need a plugin that registers one and joins a ``ProcessGroupGloo`` on the store at
    ``master_address`` and ``master_port``.

    Args:
        address: host name of the trainer, as the servers see it.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.device = torch.device("cpu")
        self._address = address
        self._size = 0
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def open(self, size: int) -> Mapping[str, str | int]:
        self._size = size
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return {"master_address": self._address, "master_port": self._store.port}

    def join(self, seconds: float) -> None:
        if self._store is None:
            raise RuntimeError("no group was opened")
        timeout = timedelta(seconds=seconds)
        self._store.set_timeout(timeout)
        self._group = dist.ProcessGroupGloo(self._store, 0, self._size, timeout)

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        group = self._group
        for buffer in buffers:
            if group is None or group is not self._group:
                raise RuntimeError("the group was aborted")
            send_buffer(group, buffer, seconds)

    def abort(self) -> None:
        # Closes the connections, so that waiting workers fail at once: ``ProcessGroupGloo.abort`` closes none.
        self._group = self._store = None


def send_buffer(group: Any, buffer: Tensor, seconds: float) -> None:
    """Broadcast a buffer from rank 0, and wait for the end."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds)
    group.broadcast([buffer], options).wait(timedelta(seconds=seconds))
