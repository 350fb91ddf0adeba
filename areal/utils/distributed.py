"""The default process group, and the control plane over which the ranks of an engine agree."""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from areal.utils import platform
from areal.utils.placement import VisibleGPUs, exchange, place

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ROLL_CALL = timedelta(seconds=15)


class RankLostError(RuntimeError):
    """A rank died or does not answer."""


def init_default_group() -> None:
    """Start the default process group, unless it runs: from torchrun's variables, or else with this process alone.

    Raises:
        ValueError: the ranks do not have fitting GPUs, see :func:`~areal.utils.placement.place`.
    """
    if dist.is_initialized():
        return
    store, rank, size = dist.HashStore(), 0, 1
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
    # Device and backend depend on the GPUs of all ranks, which must be known before the group starts.
    placement = place(exchange(store, rank, size, VisibleGPUs.of_this_process()), rank)
    platform.set_device(placement.device)
    dist.init_process_group(placement.backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=size)
    if placement.shared and rank == 0:
        logger.warning(
            "ranks %s share a GPU: collectives run over gloo, through host memory",
            "; ".join(", ".join(map(str, ranks)) for ranks in placement.shared),
        )


class ControlPlane:
    """Exchanges small Python values between all ranks of an engine, on the host, over process groups that no tensor of the model uses.

    An error on one rank is raised on all ranks. A dead rank raises :class:`RankLostError` with its number, without a timeout.

    Attributes:
        rank, size: rank of this process among the engine's ranks, and their number.

    Args:
        alone: a control plane of this process only, without a process group, in a world of any size.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None
        self._roll = dist.new_group(backend="gloo") if self.size > 1 else None  # for the roll call alone
        self._lost: str | None = None  # the message, once a rank was lost

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank. Collective.

        Args:
            value: any picklable object.

        Raises:
            RankLostError: a rank died; names it.
        """
        if self.size == 1:
            return [value]
        if self._lost is not None:
            raise RankLostError(self._lost)
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except Exception as error:
            raise self._call_the_roll(error) from None
        return values

    def exchange(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        """Send and receive tensors, all at once. The other ranks make the matching call.

        Args:
            sends: tensors with the ranks that receive them. Contiguous, on the CPU.
            receives: tensors to fill with the ranks that send them. Contiguous, on the CPU.

        Raises:
            RankLostError: a rank died; names it.
        """
        if not sends and not receives:
            return
        if self._lost is not None:
            raise RankLostError(self._lost)
        works: list[Any] = []
        try:
            works += [dist.isend(tensor, group=self._group, group_dst=rank) for tensor, rank in sends]
            works += [dist.irecv(tensor, group=self._group, group_src=rank) for tensor, rank in receives]
            for work in works:
                work.wait()
        except Exception as error:
            work = None
            works.clear()  # pending works keep the group open
            raise self._call_the_roll(error) from None

    def attempt(self, fn: Callable[[], _T], note: str = "") -> _T:
        """Call ``fn`` on this rank, and raise on every rank when it raised on any. Collective.

        Args:
            fn: function without arguments. An error in it must not leave other ranks waiting in a collective.
            note: as in :meth:`settle`.

        Returns:
            The result of ``fn`` on this rank.

        Raises:
            ValueError, RuntimeError: as in :meth:`settle`.
        """
        result, error = _call(fn)
        try:
            self.settle(error, note)
            return cast(_T, result)
        finally:
            del result, error  # a frame in a traceback would keep them alive

    def attempt_and_gather(self, fn: Callable[[], _T], note: str = "") -> list[_T]:
        """Call ``fn`` on this rank and gather its results, in the one exchange that also carries its errors. Collective.

        Args:
            fn, note: as in :meth:`attempt`. The result must be picklable.

        Returns:
            The results of all ranks, by rank.

        Raises:
            ValueError, RuntimeError: as in :meth:`settle`.
        """
        result, error = _call(fn)
        try:
            answers = self.gather((as_fault(error), result))
            raise_together([fault for fault, _ in answers], error, note)
            return [cast(_T, value) for _, value in answers]
        finally:
            del result, error

    def settle(self, error: BaseException | None, note: str = "") -> None:
        """Raise on every rank when any rank has an ``error``. Collective. :meth:`attempt` is for errors not yet caught.

        Args:
            note: text to add for the caller, such as what became of the gradients.

        Raises:
            ValueError: all errors are ``ValueError``. The text names the ranks and the error of each.
            RuntimeError: any error is of another type.
        """
        raise_together(self.gather(as_fault(error)), error, note)

    def close(self) -> None:
        """Close the process groups."""
        for group in (self._group, self._roll):
            if group is not None and self._lost is None:
                dist.destroy_process_group(group)
        self._group = self._roll = None

    def _call_the_roll(self, error: BaseException) -> RankLostError:
        """Find the ranks that are lost, and return the error to raise."""
        # Close the broken group and its connections, so that every survivor fails too and joins this roll call.
        traceback.clear_frames(error.__traceback__)
        dist.destroy_process_group(self._group)
        self._group = None
        gc.collect()
        # Exchange a message with each peer alone: a failed collective does not say which peer is dead.
        lost = [peer for peer in range(self.size) if peer != self.rank and not self._answers(peer)]
        names = ", ".join(map(str, lost)) or "unknown"
        self._lost = (
            f"rank {names} of {self.size} is gone; the engine cannot be used any more: "
            "restart the job from its last checkpoint"
        )
        return RankLostError(self._lost)

    def _answers(self, peer: int) -> bool:
        try:
            works = [
                dist.isend(torch.zeros(1), group=self._roll, group_dst=peer),
                dist.irecv(torch.zeros(1), group=self._roll, group_src=peer),
            ]
            for work in works:
                if work is not None:
                    work.wait(_ROLL_CALL)
        except RuntimeError:
            return False
        return True


def _call(fn: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return the result of ``fn``, or the error that it raised."""
    try:
        return fn(), None
    except Exception as error:
        return None, error


Fault = tuple[bool, str]
"""Form of an error that is sent between ranks: True for a ``ValueError``, and its text."""


def as_fault(error: BaseException | None) -> Fault | None:
    """Convert an error to the form that is sent between ranks. ``None`` stays ``None``."""
    if error is None:
        return None
    plain = isinstance(error, ValueError) or type(error) is RuntimeError
    return isinstance(error, ValueError), str(error) if plain else f"{type(error).__name__}: {error}"


def raise_together(faults: list[Fault | None], error: BaseException | None, note: str = "") -> None:
    """Raise one error for the faults of all ranks. Returns if there are none.

    Args:
        faults: fault of each rank, by rank, or ``None``.
        error: this rank's own error, chained as the cause.
        note: text that is added in brackets.

    Raises:
        ValueError: all faults are of type ``ValueError``.
        RuntimeError: any fault is of another type.
    """
    # Ranks with the same text are named once.
    by_text: dict[str, list[int]] = {}
    all_values = True
    for rank, fault in enumerate(faults):
        if fault is not None:
            all_values &= fault[0]
            by_text.setdefault(fault[1], []).append(rank)
    if not by_text:
        return
    named = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    message = "; ".join(named if len(faults) > 1 else by_text)
    kind = ValueError if all_values else RuntimeError
    raise kind(f"{message} ({note})" if note else message) from error
