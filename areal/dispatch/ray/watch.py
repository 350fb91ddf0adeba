"""Replies of the ranks: one thread receives them for all calls, and notices the loss of a process and hangs."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from areal.dispatch.errors import WorkerLostError, refusal
from areal.dispatch.executor import Reply, Work, error_of
from areal.dispatch.ray.actor import StackPosition, last_lines
from areal.dispatch.ray.processes import Processes
from areal.dispatch.ray.replies import Call, Event, Loss, Replies
from areal.dispatch.ray.results import pickle_work
from areal.dispatch.ray.stored import by_reference

SILENT_SECONDS = 5.0
"""Limit for ranks that do not move once the engine of another rank has reported a lost rank."""

STOPPED_FRACTION = 0.2
"""Fraction of the limit of silence. The driver was stopped if a check is overdue by more."""

JOIN_SECONDS = 10.0
"""Limit for the thread to be done with Ray, which may not reply any more."""


@dataclass(frozen=True)
class Limits:
    """Seconds after which ranks count as hung.

    Attributes:
        hang_seconds: without movement, while no rank has failed.
        grace_seconds: without movement, once another rank has answered the call with an error.
        ping_seconds: without an answer to the question where a rank is.
    """

    hang_seconds: float
    grace_seconds: float
    ping_seconds: float = 45.0

    def of(self, replies: Iterable[Reply | None]) -> float:
        """Return the limit of a call for ranks that do not move.

        Args:
            replies: replies so far, at least one with an error of each kind; ``None`` for ranks that still work.
        """
        kinds = {its.kind for its in replies if its is not None} - {""}
        if "RankLostError" in kinds:
            return min(self.hang_seconds, self.grace_seconds, SILENT_SECONDS)
        return min(self.hang_seconds, self.grace_seconds) if kinds else self.hang_seconds


@dataclass
class Sign:
    """The last sign of life of a rank.

    Attributes:
        asked: True if a question has no answer so far.
        mark, stack: its last position.
        heard: time of the last answer.
        moved: time at which the position last changed.
    """

    heard: float = 0.0
    moved: float = 0.0
    asked: bool = False
    mark: int | None = None
    stack: str = ""


class Watch:
    """Sends calls to all ranks, in one order, and completes their futures. After a loss it ends the lost process, and sends no more.

    Everything that arrives is an event in one queue: a call, a reply, the position of a rank, the end of a process. One thread takes them in
    turn.

    Args:
        processes: processes of the ranks.
        limits: limits of hangs.

    Attributes:
        error: error of later calls once the processes have ended.
    """

    def __init__(self, processes: Processes, limits: Limits) -> None:
        self._processes, self._limits = processes, limits
        self.error: Exception | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # Held while a call is submitted to all ranks: all of them get the calls of several threads in one order.
        self._lock = threading.Lock()
        # Of the thread: calls with replies to come, and signs of life by rank.
        self._replies = Replies(self._events.put, self._set_limit)
        self._signs = [Sign() for _ in processes.actors]
        self._limit, self._tick = limits.hang_seconds, 0.0
        for rank, actor in enumerate(processes.actors):
            self._deliver(actor.live.remote(), partial(self._take_end, rank))
        self._thread = threading.Thread(target=self._work, name="areal-ray-watch", daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Send a call to all ranks.

        Raises:
            ValueError: the call cannot be sent.
            WorkerLostError: a process was lost before.
            RuntimeError: the processes were closed.
        """
        with self._lock:
            if self.error is not None:
                raise refusal(f"{what} cannot run: {self.error}", self.error)
            refs: dict[int, ObjectRef] = {}
            try:
                pickled, nested = pickle_work(work)
                shared = ray.put(pickled) if by_reference(len(pickled), readers=len(arguments)) else pickled
                for rank, (actor, argument) in enumerate(zip(self._processes.actors, arguments, strict=True)):
                    refs[rank] = actor.run.remote(what, shared, argument, nested)
                call = Call(what, [None] * len(refs), refs)
                self._replies.send(call, partial(self._take_call, call))
            except Exception as error:
                if not refs:
                    raise ValueError(f"the arguments of {what} cannot be sent to the ranks: {error}") from error
                # Some ranks run the call and would wait for the others.
                failure = RuntimeError(f"{what} was sent to some ranks only: {error}: call restart()")
                self._processes.end()
                raise self._finish(failure) from error
        return call.future

    def end(self, error: Exception) -> None:
        """End all processes. Calls that still run raise ``error``, and later ones a ``RuntimeError`` with its text."""
        with self._lock:
            self._finish(error)
            self._processes.end()

    def join(self) -> None:
        """Wait until the thread is done with Ray, after :meth:`end`. A thread that calls Ray during its shutdown ends the whole process."""
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def lose(self, rank: int, reason: str, cause: BaseException | None = None) -> Exception:
        """End a lost process, and send no more calls to the others. Returns the error to raise.

        Args:
            rank: rank of the lost process.
            reason: verb phrase for the text of the error.
            cause: error of Ray.
        """
        with self._lock:
            if self.error is not None:
                return self.error
            error = self._lost(rank, reason)
            error.__cause__ = cause
            self._processes.end_rank(rank)
            return self._finish(error)

    def _finish(self, error: Exception) -> Exception:
        """End the thread, which fails the calls that still run. The caller has the lock."""
        if self.error is None:
            self.error = error
            self._events.put(lambda: None)
        return self.error

    # ---- the thread

    def _work(self) -> None:
        """Take one event after another until there are no more calls."""
        while self.error is None:
            try:
                self._next()()
            except Loss as loss:
                self._end_with(loss)
            except Exception as unexpected:
                what = f" during {self._running[0].what}" if self._running else ""
                self.end(RuntimeError(f"Ray does not reply{what}: {unexpected}: call restart()"))
        self._take_arrived()
        for call in self._running:
            call.future.set_exception(self.error)

    @property
    def _running(self) -> list[Call]:
        return self._replies.running

    def _next(self) -> Event:
        """Return the next event, or what is due: a question for replies, or the check of the ranks that still work."""
        if not self._running:
            return self._events.get()
        due, event = min((self._replies.due, self._replies.take_arrived), (self._tick, self._check), key=itemgetter(0))
        seconds = due - time.monotonic()
        if seconds <= 0:
            return event
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return event

    def _take_arrived(self) -> None:
        """Take the events and replies that have arrived, and ignore further losses."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                with suppress(Exception):
                    event()
        with suppress(Exception):
            self._replies.take_arrived()

    def _deliver(self, ref: ObjectRef, take: Callable[[Future[Any]], None]) -> None:
        """Call ``take`` in the thread with the future of an object, when the object is there."""
        ref.future().add_done_callback(lambda future: self._events.put(partial(take, future)))

    # ---- events

    def _take_call(self, call: Call) -> None:
        if not self._running:
            self._forget_signs()
        self._replies.add(call)

    def _take_end(self, rank: int, future: Future[Any]) -> None:
        """Raise a :class:`Loss`: a process has ended."""
        raise Loss(rank, "died", died=True) from future.exception()

    def _take_position(self, rank: int, future: Future[StackPosition]) -> None:
        """Note the position of a rank.

        Raises:
            Loss: its process died.
        """
        sign = self._signs[rank]
        try:
            position = future.result()
        except RayError as error:
            raise Loss(rank, "died", died=True) from error
        sign.asked, sign.heard = False, time.monotonic()
        if position.mark != sign.mark:
            sign.mark, sign.stack, sign.moved = position.mark, position.stack, sign.heard

    # ---- hangs

    def _forget_signs(self) -> None:
        """Count the time of all ranks from now on."""
        now = time.monotonic()
        for sign in self._signs:
            sign.heard = sign.moved = now
        self._tick = now + self._interval

    @property
    def _interval(self) -> float:
        """Seconds between two checks."""
        return min(max(1.0, len(self._signs) / 64), self._limit / 5)

    @property
    def _silence(self) -> float:
        """Seconds without an answer after which a rank counts as lost."""
        return min(self._limit, self._limits.ping_seconds)

    def _set_limit(self) -> None:
        """Set the limit that the replies so far demand. Once a rank has failed, the others have less time, which starts then."""
        limit = min(
            (self._limits.of(call.failed.values()) for call in self._running), default=self._limits.hang_seconds
        )
        shorter, self._limit = limit < self._limit, limit
        if shorter:
            self._forget_signs()

    def _check(self) -> None:
        """Ask the ranks that still work where they are.

        Raises:
            Loss: one is silent for too long, or none moves for too long. While one moves, the others may wait for it.
        """
        now = time.monotonic()
        overdue, self._tick = now - self._tick, now + self._interval
        late = sorted({rank for call in self._running for rank in call.waiting})
        # The driver was stopped, and did not ask the ranks meanwhile: ask again first.
        if overdue > STOPPED_FRACTION * self._silence:
            self._excuse(overdue)
        else:
            self._raise_if_hung(late, now)
        for rank in late:
            if not self._signs[rank].asked:
                self._signs[rank].asked = True
                self._deliver(self._processes.actors[rank].position.remote(), partial(self._take_position, rank))

    def _excuse(self, seconds: float) -> None:
        """Do not count the last seconds of any rank."""
        now = time.monotonic()
        for sign in self._signs:
            sign.heard, sign.moved = min(now, sign.heard + seconds), min(now, sign.moved + seconds)

    def _raise_if_hung(self, late: Sequence[int], now: float) -> None:
        """Raise the :class:`Loss` of a rank that is silent for too long, or does not move like all others.

        Args:
            late: ranks that still work.
            now: time of the check.
        """
        limit, silence = self._limit, self._silence
        silent = [rank for rank in late if self._signs[rank].asked and now - self._signs[rank].heard > silence]
        if silent:
            raise Loss(
                silent[0], f"has not answered for {silence:g} s (the process is stopped, or does not run Python)"
            )
        if all(now - self._signs[rank].moved > limit for rank in late):
            # A rank that waits in a collective, or in a later call, waits for another one: name that, if there is one.
            oldest = [rank for rank in late if rank in self._running[0].waiting]
            first = min(oldest, key=lambda rank: ("torch/distributed" in self._signs[rank].stack, rank))
            where = "\n".join(f"rank {rank} is at\n{self._signs[rank].stack or '  (no call)'}" for rank in late)
            raise Loss(first, f"has not moved for {limit:g} s (nor has any other rank that still works:\n{where}\n)")

    # ---- the end

    def _end_with(self, loss: Loss) -> None:
        """Fail all calls after a loss.

        A call whose ranks hang after the error of another one raises that error. If a process died, the errors of the others may be the
        consequence.
        """
        what = f"during {self._running[0].what}" if self._running else "between calls"
        self._take_arrived()
        if not ray.is_initialized():
            self.end(RuntimeError("Ray was shut down: call ray.init() and restart()"))
            return
        lost = self.lose(loss.rank, f"{loss.reason} {what}", loss.__cause__)
        for call in tuple(self._running):
            failed = error_of([its or Reply() for its in call.replies])
            if failed is not None:
                self._running.remove(call)
                call.future.set_exception(_both(lost, failed) if loss.died else _both(failed, lost))

    def _lost(self, rank: int, reason: str) -> WorkerLostError:
        """Make the error of a lost process, while others can still read what it has printed."""
        info = self._processes.process_infos[rank]
        output = self._output(rank)
        printed = f"\nlast lines that it printed:\n{output}" if output else ""
        return WorkerLostError(
            f"rank {rank} (pid {info.pid} on node {info.node_name}) {reason}; call restart() to go on from the last checkpoint"
            f"{printed}",
            rank,
            info.node_name,
            info.pid,
            output,
        )

    def _output(self, rank: int) -> str:
        """Return the last lines that a process printed, from a process of its node."""
        info = self._processes.process_infos[rank]
        if info.address == ray.util.get_node_ip_address() and (text := last_lines(info.files)):
            return text
        for other, actor in zip(self._processes.process_infos, self._processes.actors, strict=True):
            if other.node == info.node and other.pid != info.pid:
                with suppress(RayError):
                    return ray.get(actor.last_lines.remote(info.files), timeout=1.0)
        return ""


def _both(first: Exception, other: Exception) -> Exception:
    """Return the first error with the text of the other one behind its own."""
    both = copy.copy(first)
    both.args = (f"{first}\nAnd: {other}",)
    both.__cause__ = first.__cause__ or other.__cause__
    return both
