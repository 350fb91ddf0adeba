"""Interface of the carriers: broadcast buffers from the trainer, which is rank 0, to the workers of all servers."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor


class Carrier(Protocol):
    """A process group that is created again after each :meth:`abort`.

    Attributes:
        device: device of the buffers.
    """

    @property
    def device(self) -> torch.device: ...

    def open(self, size: int) -> Mapping[str, str | int]:
        """Prepare a new group. Does not wait.

        Args:
            size: number of members, including the trainer.

        Returns:
            Values with which the workers join, in addition to their rank and ``size``.
        """
        ...

    def join(self, seconds: float) -> None:
        """Wait until all members have joined.

        Raises:
            RuntimeError, TimeoutError: a member is missing. The group must be aborted.
        """
        ...

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        """Send buffers to all members, in order, and wait until they are sent.

        Raises:
            RuntimeError, TimeoutError: a member is lost. The group must be aborted.
        """
        ...

    def abort(self) -> None:
        """Leave the group at once, also during a call in another thread. Must not raise. May be called twice."""
        ...


def in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Start a function in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            # Frames hold the group. A gloo group closes its connections with its last reference, and its members wait until then.
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
