"""The default process group, and the control plane over which the ranks of an engine agree."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from areal.utils import platform
from areal.utils.fault_watch import FaultWatch, Verdict
from areal.utils.group_set import GroupSet, as_timeout
from areal.utils.rank_gpus import VisibleGPUs, exchange, place

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_TOGETHER = "_raised_on_every_rank"
"""Attribute of an error that every rank raises in the same call."""


class EngineLostError(RuntimeError):
    """A fault has left the ranks of an engine out of step, so that none of them can use it any more. Raised on every rank."""


class RankLostError(EngineLostError):
    """A rank died or does not answer."""


class StateLostError(RuntimeError):
    """Work failed after it had destroyed state of the engine. It ends the engine also on a single rank."""


TORCHRUN_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
"""Environment variables that :func:`enter_world` sets."""


def is_rank() -> bool:
    """Return whether this process was started as a rank, such as by torchrun."""
    return "WORLD_SIZE" in os.environ


def init_default_group() -> None:
    """Start the default process group, unless it runs: from torchrun's variables, or else with this process alone.

    Raises:
        ValueError: the ranks do not have fitting GPUs, see :func:`~areal.utils.rank_gpus.place`.
    """
    if dist.is_initialized():
        return
    store, rank, size = dist.HashStore(), 0, 1
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
    # Device and backend depend on the GPUs of all ranks, which must be known before the group starts.
    placement = place(exchange(store, rank, size, VisibleGPUs.of_this_process()), rank)
    platform.set_device(placement.device)
    # With the device, groups of some ranks split the communicator of all ranks instead of connecting anew.
    device = placement.device if placement.backend == platform.WORLD and size > 1 else None
    dist.init_process_group(
        placement.backend,
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=size,
        device_id=device,
    )
    if placement.shared and rank == 0:
        logger.warning(
            "ranks %s share a GPU: collectives run over gloo, through host memory",
            "; ".join(", ".join(map(str, ranks)) for ranks in placement.shared),
        )


def leave_world() -> None:
    """Leave the default process group, also after the loss of a rank, so that this process can enter another world."""
    if dist.is_initialized():
        # Destroying groups would wait for collectives of a lost rank.
        distributed_c10d._abort_process_group()


def rank_in_world() -> int:
    """Return the rank of this process, also before the default process group exists; 0 for a process alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def enter_world(rank: int, size: int, local: tuple[int, int], address: str, port: int) -> None:
    """Set torchrun's variables for a process that another launcher has started, before the default process group exists.

    Args:
        rank, size: rank of the process, and number of ranks.
        local: ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        address, port: address of a store that the launcher has opened. Every rank joins it as a client.
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local[0]),
        LOCAL_WORLD_SIZE=str(local[1]),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),
    )


class ControlPlane:
    """Exchanges small Python values between all ranks of an engine, on the host, over process groups that no tensor of the model uses.

    An error on one rank is raised on all ranks. A rank that dies or stops raises :class:`RankLostError` with its number on all others, and
    :meth:`fail` raises :class:`EngineLostError`: both at once, also where a rank waits in a collective.

    Attributes:
        rank, size: rank of this process among the engine's ranks, and their number.
        address: an address of this host that the other ranks can reach.
        verdict: the fault that has ended the engine, or ``None``.
        was_raised: the verdict has been raised on this rank.

    Args:
        alone: a control plane of this process only, without a process group, in a world of any size.
        groups: process groups that carry the engine's tensors. They are aborted when the engine ends by a fault.
        timeout: seconds that a rank may be late for an exchange. Defaults to no limit: a rank that lives is waited for.
        silence: seconds without a sign of life after which a rank is lost.
    """

    def __init__(
        self,
        *,
        alone: bool = False,
        groups: GroupSet | None = None,
        timeout: float | None = None,
        silence: float = 20.0,
    ) -> None:
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self.was_raised = False
        self._own_verdict: Verdict | None = None
        self._group, self._watch = None, None
        self.address = "localhost"
        # In a plan, this process speaks for all ranks.
        self._speaks_for_all = self.size == 1 or platform.is_planned()
        if self._speaks_for_all:
            return
        self._data_groups, self._groups = groups or GroupSet(), GroupSet()
        with self._groups.creating():
            self._group = dist.new_group(backend="gloo", timeout=as_timeout(timeout))
        self.address = self._groups.address()
        try:
            self._watch = FaultWatch(self.rank, self.size, self.gather, self.address, silence, self._abort)
        except Exception:
            self._groups.close()
            raise

    @property
    def verdict(self) -> Verdict | None:
        return self._own_verdict or (self._watch.verdict if self._watch else None)

    def require_usable(self) -> None:
        """Raise :class:`EngineLostError` if a fault has ended the engine. Not collective."""
        if self.verdict is not None:
            raise self._as_error(self.verdict)

    def fail(self, error: BaseException, *, final: bool, note: str = "") -> EngineLostError:
        """End the engine on every rank, because an error has left this rank out of step with the others. Not collective.

        Args:
            final: the process cannot use its device any more.
            note: text to add to that of the error.

        Returns:
            The error to raise: the same on every rank, and that of another rank if it failed first.
        """
        way_out = "restart the process, whose device is in an error state" if final else "make another"
        text = f"{_text(error)}; {note}" if note else _text(error)
        verdict = Verdict(f"rank {self.rank}: {text}" if self.size > 1 else text, way_out)
        self._own_verdict = self._watch.post(verdict) if self._watch else verdict
        return self._as_error(self._own_verdict)

    @contextlib.contextmanager
    def ending_on_error(self, note: str = "", *, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Context of work that other ranks wait for: an error inside ends the engine on every rank.

        Errors that all ranks raise together are raised as they are. On a single rank this holds for all errors, unless the device or the
        engine's state is lost.

        Args:
            note: text to add to the error.
            unless: types of further errors that are raised as they are.
        """
        try:
            yield
        except EngineLostError:
            raise
        except Exception as error:
            final = platform.is_device_lost(error)
            lost = final or isinstance(error, StateLostError)
            if getattr(error, _TOGETHER, False) or isinstance(error, unless) or (self.size == 1 and not lost):
                raise
            raise self.fail(error, final=final, note=note) from error

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank. Collective.

        Args:
            value: any picklable object.

        Raises:
            EngineLostError: a rank died, or failed; names it.
        """
        if self._speaks_for_all:
            return [value] * self.size
        self.require_usable()
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except Exception as error:
            raise self._after_failure(error) from None
        return values

    def exchange(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        """Send and receive tensors, all at once. The other ranks make the matching call.

        Args:
            sends: tensors with the ranks that receive them. Contiguous, on the CPU.
            receives: tensors to fill with the ranks that send them. Contiguous, on the CPU.

        Raises:
            EngineLostError: a rank died, or failed; names it.
        """
        if not sends and not receives:
            return
        self.require_usable()
        works: list[Any] = []
        try:
            works += [dist.isend(tensor, group=self._group, group_dst=rank) for tensor, rank in sends]
            works += [dist.irecv(tensor, group=self._group, group_src=rank) for tensor, rank in receives]
            for work in works:
                work.wait()
        except Exception as error:
            work = None
            works.clear()  # pending works keep the group open
            raise self._after_failure(error) from None

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
        result, error = self._call(fn)
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
        result, error = self._call(fn)
        try:
            answers = self.gather((as_fault(error), result))
            raise_together(self._named([fault for fault, _ in answers]), error, note)
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
        if platform.is_device_lost(error):
            raise self.fail(cast(BaseException, error), final=True) from error
        raise_together(self._named(self.gather(as_fault(error))), error, note)

    def _named(self, faults: list[Fault | None]) -> list[Fault | None]:
        """Return the faults of the ranks to name in an error: of all, or of this process if it speaks for all."""
        return faults[:1] if self._speaks_for_all else faults

    def close(self) -> None:
        """Close the process groups, and the connections over which ranks watch each other."""
        if self._watch is not None:
            self._own_verdict = self.verdict
            self._watch.close()
            self._groups.close()
        self._group = self._watch = None

    def _after_failure(self, error: BaseException) -> EngineLostError:
        """Return the error to raise after an exchange has failed."""
        # Frames refer to the group, and keep its connections open.
        traceback.clear_frames(error.__traceback__)
        return self._as_error(self._watch.after_failure(error)) if self._watch else EngineLostError(str(error))

    def _as_error(self, verdict: Verdict) -> EngineLostError:
        self.was_raised = True
        return (RankLostError if verdict.lost else EngineLostError)(str(verdict))

    def _abort(self) -> None:
        """Abort all process groups of the engine, so that no thread waits in one. Called from another thread."""
        self._groups.abort()
        self._data_groups.abort()

    def _call(self, fn: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
        """Return the result of ``fn``, or the error that it raised. Ends the engine if the device is lost."""
        try:
            return fn(), None
        except EngineLostError:
            raise
        except Exception as error:
            if platform.is_device_lost(error):
                raise self.fail(error, final=True) from error
            return None, error


Fault = tuple[bool, str]
"""Form of an error that is sent between ranks: True for a ``ValueError``, and its text."""


def as_fault(error: BaseException | None) -> Fault | None:
    """Convert an error to the form that is sent between ranks. ``None`` stays ``None``."""
    if error is None:
        return None
    return isinstance(error, ValueError), _text(error)


def _text(error: BaseException) -> str:
    plain = isinstance(error, ValueError) or type(error) in (RuntimeError, StateLostError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


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
    together = kind(f"{message} ({note})" if note else message)
    setattr(together, _TOGETHER, True)
    raise together from error
