"""Chain of one trainer rank and all receivers: each member receives from the one before it and sends on to the next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.weights import LocalTensor

_END, _BROKEN_OFF = 0, -1
"""Lengths in a header that announce no slices: the end of an update, and its end before all slices were sent."""


class Chain:
    """One member of a chain, over gloo. The first member sends each byte once, whatever the number of receivers.

    Args:
        store: store at which the members meet.
        name: name of the chain.
        rank, size: place of this member, 0 for the trainer rank, and number of members.
        seconds: time limit for all members to join, and of each message.

    Attributes:
        sent_bytes: number of bytes that this member has sent.

    Raises:
        RuntimeError: a member did not join in time.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size, self._timeout = rank, size, timedelta(seconds=seconds)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, self._timeout)
        self.sent_bytes = 0

    def send(self, slices: Sequence[LocalTensor]) -> None:
        """Send slices to the next member.

        Raises:
            RuntimeError: a member is lost.
        """
        table = [[each.name, str(each.tensor.dtype), box_numbers(each.box), list(each.shape)] for each in slices]
        head = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
        values = torch.cat([each.tensor.contiguous().reshape(-1).view(torch.uint8) for each in slices])
        for message in (torch.tensor([len(head), len(values)]), head, values):
            self._wait(self._start(message))

    def end(self, *, complete: bool) -> None:
        """Tell the next member that no slices follow.

        Args:
            complete: all slices were sent.
        """
        self._wait(self._start(torch.tensor([_END if complete else _BROKEN_OFF, 0])))

    def receive(self) -> list[LocalTensor] | bool:
        """Return the next slices, which are sent on. At the end of an update, return whether it is complete.

        Raises:
            RuntimeError: a member is lost.
        """
        lengths = torch.zeros(2, dtype=torch.int64)
        sent = [self._receive(lengths)]
        head_bytes, value_bytes = lengths.tolist()
        if head_bytes in (_END, _BROKEN_OFF):
            self._wait(*sent)
            return bool(head_bytes == _END)
        head, values = (torch.empty(size, dtype=torch.uint8) for size in (head_bytes, value_bytes))
        sent += [self._receive(head), self._receive(values)]
        slices, offset = [], 0
        for name, dtype, numbers, shape in json.loads(head.numpy().tobytes()):
            box = tuple(slice(*each) for each in numbers)
            sizes = [len(range(*each)) for each in numbers]
            kind = getattr(torch, dtype.removeprefix("torch."))
            nbytes = torch.Size(sizes).numel() * kind.itemsize
            # A copy, because bytes of one tensor after another are not aligned.
            part = values[offset : offset + nbytes].clone().view(kind).view(sizes)
            slices.append(LocalTensor(name, part, box, tuple(shape)))
            offset += nbytes
        self._wait(*sent)
        return slices

    def _receive(self, message: Tensor) -> Any:
        """Receive into a tensor, and start to send it on. Returns what :meth:`_wait` takes."""
        self._group.recv([message], self._rank - 1, 0).wait(self._timeout)  # type: ignore[attr-defined]
        return self._start(message)

    def _start(self, message: Tensor) -> Any:
        if self._rank + 1 == self._size:
            return None
        self.sent_bytes += message.nbytes
        return self._group.send([message], self._rank + 1, 0)  # type: ignore[attr-defined]

    def _wait(self, *sent: Any) -> None:
        for work in sent:
            if work is not None:
                work.wait(self._timeout)


def box_numbers(box: tuple[slice, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return start, stop and step of each slice of a box, without negative numbers."""
    return tuple((part.start, part.stop, part.step or 1) for part in box)


def chain_rank(receiver: int, trainer_rank: int, receivers: int) -> int:
    """Return the place of a receiver in the chain of a trainer rank. Each trainer rank sends to another receiver first."""
    return 1 + (receiver - trainer_rank) % receivers
