"""Copies between host and device that happen as late as allowed, so that a missing wait shows on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from areal.engine.torch.activations import layer_activations
from areal.utils import platform

GARBAGE = 255
"""Value of each byte that was not copied: NaN in every floating dtype."""


@dataclass
class _Copy:
    """A copy that has not happened. Its source may be freed."""

    target: Tensor
    source: StorageWeakRef
    offset: int

    def run(self) -> None:
        memory = None if self.source.expired() else torch.UntypedStorage._new_with_weak_ptr(self.source.cdata)
        if memory is None:
            self.target.fill_(GARBAGE)
        else:
            self.target.copy_(torch.empty(0, dtype=torch.uint8).set_(memory, self.offset, self.target.shape))


class LazyCopies:
    """Copies that happen when they are waited for, in their order. Implements :class:`areal.utils.platform.SideCopies`.

    A target is garbage until then. If the memory of a source was freed before, the target stays garbage.
    """

    def __init__(self) -> None:
        self._pending: deque[_Copy] = deque()
        self._enqueued = self._done = 0

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        for target, source in pairs:
            # A copy before this one may still have to read a buffer.
            if all(copy.source.cdata != target.untyped_storage()._cdata for copy in self._pending):
                target.fill_(GARBAGE)
            memory = StorageWeakRef(source.untyped_storage())
            self._pending.append(_Copy(target, memory, source.storage_offset()))
        self._enqueued += len(pairs)
        return self._enqueued

    def wait(self, mark: int) -> None:
        while self._done < mark:
            self._pending.popleft().run()
            self._done += 1


@contextmanager
def lazily(smallest_bytes: int = 256) -> Iterator[None]:
    """Let engines that start inside copy lazily, and move also the small activations of tiny models."""
    with (
        mock.patch.object(platform, "side_copies", side_effect=lambda device: LazyCopies()),
        mock.patch.object(layer_activations, "SMALLEST_BYTES", smallest_bytes),
    ):
        yield
