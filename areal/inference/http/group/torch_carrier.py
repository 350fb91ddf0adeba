"""Broadcast over a named group of ``torch.distributed``, as SGLang's workers join it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from areal.inference.http.group.gloo_carrier import send_buffer
from areal.weight_sync.transport import ignore_errors

_NUMBERS = itertools.count()
"""Numbers of the groups of this process: names must be unique."""


class TorchCarrier:
    """Implements :class:`~areal.inference.http.group.carrier.Carrier` on a group of ``torch.distributed``.

    Args:
        address: host name of the trainer, as the servers see it.
        backend: ``"nccl"`` or ``"gloo"``.
        device: device of the buffers: a GPU for NCCL, the CPU for gloo.
        name: prefix of the group's name.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        backend: str = "nccl",
        device: torch.device | str = "cuda",
        name: str = "areal-weights",
    ) -> None:
        if (backend == "gloo") != (torch.device(device).type == "cpu"):
            raise ValueError(
                f"backend = {backend!r} with device = {str(device)!r}: choose gloo with cpu, or nccl with cuda"
            )
        self.device = torch.device(device)
        self._address, self._backend, self._prefix = address, backend, name
        self._size, self._name = 0, ""
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def open(self, size: int) -> Mapping[str, str | int]:
        self._size, self._name = size, f"{self._prefix}-{next(_NUMBERS)}"
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "group_name": self._name,
            "backend": self._backend,
        }

    def join(self, seconds: float) -> None:
        if self._store is None:
            raise RuntimeError("no group was opened")
        self._store.set_timeout(timedelta(seconds=seconds))
        # As the workers do: the prefixes of the keys must be equal, and they depend on this function.
        group, _ = _new_process_group_helper(
            self._size,
            0,
            [],
            dist.Backend(self._backend),
            dist.PrefixStore(self._name, self._store),
            group_name=GroupName(self._name),
            timeout=timedelta(seconds=seconds),
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self._size)}
        self._group = group

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        group = self._group
        for buffer in buffers:
            if group is None or group is not self._group:
                raise RuntimeError("the group was aborted")
            send_buffer(group, buffer, seconds)

    def abort(self) -> None:
        group, self._group = self._group, None
        self._store = None
        if group is not None:
            ignore_errors(group.abort)
            ignore_errors(lambda: dist.destroy_process_group(group))
