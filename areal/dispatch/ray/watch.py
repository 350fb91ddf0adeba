"""Replies of the ranks: a thread waits for any of them, and notices the loss of a process and hangs."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import Work
from areal.dispatch.rank_objects import Reply
from areal.dispatch.ray.actor import StackPosition, last_lines
from areal.dispatch.ray.processes import Processes
from areal.dispatch.ray.results import unseal

SILENT_SECONDS = 5.0
"""Limit for ranks that do not move once the engine of another rank has reported a lost rank."""


CALL_SECONDS = 0.5
"""Time for a running call to report the end of a process."""

JOIN_SECONDS = 10.0
"""Limit for a thread to be done with Ray, which may not reply any more."""


@dataclass(frozen=True)
class Limits:
    """Seconds without movement after which ranks count as hung.

    Attributes:
        hang_seconds: while no rank has failed.
        grace_seconds: once another rank has answered the call with an error.
    """

    hang_seconds: float
    grace_seconds: float

    def of(self, replies: Sequence[Reply | None]) -> float:
        """Return the limit of a call.

        Args:
            replies: by rank, ``None`` for those that still work.
        """
        kinds = {its.kind for its in replies if its is not None} - {""}
        if "RankLostError" in kinds:
            return min(self.hang_seconds, self.grace_seconds, SILENT_SECONDS)
        return min(self.hang_seconds, self.grace_seconds) if kinds else self.hang_seconds


@dataclass
class Sign:
    """The last sign of life of a rank within a call.

    Attributes:
        asked: question without a reply so far.
        mark, stack: its last position.
        heard: time of the last reply.
        moved: time at which the position last changed.
    """

    heard: float
    moved: float
    asked: ObjectRef | None = None
    mark: int | None = None
    stack: str = ""


@dataclass(frozen=True)
class Call:
    """A call on all ranks, with the replies to come."""

    what: str
    refs: list[ObjectRef]
    future: Future[list[Reply]] = field(default_factory=Future)


class Loss(Exception):
    """Ends the wait for a call: a process is lost, or all are."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.reason = rank, reason


class Watch:
    """Sends calls to all ranks, in one order, and completes their futures. After a loss it ends all processes.

    Args:
        processes: processes of the ranks.
        limits: limits of hangs.

    Attributes:
        error: error of later calls once the processes have ended.
    """

    def __init__(self, processes: Processes, limits: Limits) -> None:
        self._processes, self._limits = processes, limits
        self.error: Exception | None = None
        self._ended: list[Call] = []
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        # Held while a call is submitted to all ranks: all of them get the calls of several threads in one order.
        self._lock = threading.Lock()
        self._over = threading.Event()  # the processes have ended
        self._threads = [
            threading.Thread(target=self._work, name="areal-ray-watch", daemon=True),
            threading.Thread(target=self._guard, name="areal-ray-guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Send a call to all ranks.

        Raises:
            ValueError: the call cannot be sent.
            RuntimeError: the processes have ended.
        """
        with self._lock:
            if self.error is not None:
                raise RuntimeError(f"{what} cannot run: {self.error}")
            refs: list[ObjectRef] = []
            try:
                for actor, argument in zip(self._processes.actors, arguments, strict=True):
                    refs.append(actor.run.remote(what, work, argument))
            except Exception as error:
                if not refs:
                    raise ValueError(f"the arguments of {what} cannot be sent to the ranks: {error}") from error
                # Some ranks run the call and would wait for the others.
                failure = RuntimeError(f"{what} was sent to some ranks only: {error}: call restart()")
                self._ended.append(Call(what, refs))
                self._finish(failure)
                raise failure from error
            call = Call(what, refs)
            self._calls.put(call)
        return call.future

    def end(self, error: Exception) -> None:
        """End all processes. Calls that still run raise ``error``, and later ones a ``RuntimeError`` with its text."""
        with self._lock:
            self._finish(error)
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the threads are done with Ray, after :meth:`end`. A thread that calls Ray during its shutdown ends the whole process."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    def lose(self, rank: int, reason: str, cause: BaseException | None = None) -> Exception:
        """End all processes because one is lost. Returns the error to raise.

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
            return self._finish(error)

    # ---- the threads

    def _guard(self) -> None:
        """Wait for the end of any process, also between calls."""
        lives = {actor.live.remote(): rank for rank, actor in enumerate(self._processes.actors)}
        with suppress(Exception):  # Ray was shut down
            [ended], _ = ray.wait(list(lives), num_returns=1)
            # A running call reports the loss itself, with its name.
            self._over.wait(CALL_SECONDS)
            # Calls to Ray would start it again.
            if ray.is_initialized():
                self.lose(lives[ended], "died between calls")
                self._drain(list(lives), SILENT_SECONDS)

    def _work(self) -> None:
        """Wait for one call after another: the ranks reply in this order."""
        while (call := self._calls.get()) is not None:
            try:
                replies = self._collect(call)
            except Loss as loss:
                error = self.lose(loss.rank, f"{loss.reason} during {call.what}", loss.__cause__)
            except Exception as unexpected:
                with self._lock:
                    error = self._finish(
                        RuntimeError(f"Ray does not reply during {call.what}: {unexpected}: call restart()")
                    )
            else:
                call.future.set_result(replies)
                continue
            call.future.set_exception(error)
            # Ray prints errors that are not fetched.
            self._drain([ref for each in (call, *self._ended) for ref in each.refs], SILENT_SECONDS)
            return

    def _collect(self, call: Call) -> list[Reply]:
        """Return the replies to a call, by rank.

        Raises:
            Loss: a process died, or hangs.
        """
        replies: list[Reply | None] = [None] * len(call.refs)
        waiting = {ref: rank for rank, ref in enumerate(call.refs)}
        now = time.monotonic()
        signs = [Sign(now, now) for _ in call.refs]
        limit = self._limits.hang_seconds
        interval = max(1.0, len(signs) / 64)
        tick = now + min(interval, limit / 5)
        while waiting:
            # Any reply ends the wait: a process that died replies at once, also while others wait for it.
            asked = {sign.asked: rank for rank, sign in enumerate(signs) if sign.asked is not None}
            ready, _ = ray.wait([*waiting, *asked], num_returns=1, timeout=max(0.0, tick - time.monotonic()))
            for ref in ready:
                if ref in waiting:
                    rank = waiting.pop(ref)
                    replies[rank] = self._reply(rank, ref)
                else:
                    self._hear(asked[ref], signs[asked[ref]], ref)
            # Once a rank has failed, the others have less time, which starts now.
            now = time.monotonic()
            if self._limits.of(replies) < limit:
                limit = self._limits.of(replies)
                tick = min(tick, now + limit / 5)
                for sign in signs:
                    sign.heard = sign.moved = now
            if now >= tick:
                tick = now + min(interval, limit / 5)
                self._check(waiting.values(), signs, limit)
        self._drain([sign.asked for sign in signs if sign.asked is not None], 0.0)
        return [its for its in replies if its is not None]

    def _reply(self, rank: int, ref: ObjectRef) -> Reply:
        """Return the reply of a rank.

        Raises:
            Loss: its process died.
        """
        try:
            its = ray.get(ref)
            return its if its.kind else Reply(unseal(its.value))
        except RayTaskError as error:
            return Reply(None, "RuntimeError", f"{type(error.cause).__name__}: {error.cause}", str(error))
        except RayError as error:
            raise Loss(rank, "died") from error
        except Exception as error:
            text = f"the result of rank {rank} cannot be read in the driver: {type(error).__name__}: {error}"
            return Reply(None, "ValueError", text, traceback.format_exc())

    def _hear(self, rank: int, sign: Sign, ref: ObjectRef) -> None:
        """Note the position of a rank."""
        try:
            position: StackPosition = ray.get(ref)
        except RayError as error:
            raise Loss(rank, "died") from error
        sign.asked, sign.heard = None, time.monotonic()
        if position.mark != sign.mark:
            sign.mark, sign.stack, sign.moved = position.mark, position.stack, sign.heard

    def _check(self, ranks: Any, signs: Sequence[Sign], limit: float) -> None:
        """Ask the ranks that still work where they are.

        Raises:
            Loss: one is silent for too long, or none moves for too long. While one moves, the others may wait for it.
        """
        now = time.monotonic()
        ranks = list(ranks)
        silent = [rank for rank in ranks if signs[rank].asked is not None and now - signs[rank].heard > limit]
        if silent:
            raise Loss(silent[0], f"has not answered for {limit:g} s (the process is stopped, or does not run Python)")
        if ranks and all(now - signs[rank].moved > limit for rank in ranks):
            # A rank that waits in a collective waits for another one: name that, if there is one.
            first = min(ranks, key=lambda rank: ("torch/distributed" in signs[rank].stack, rank))
            where = "\n".join(f"rank {rank} is at\n{signs[rank].stack or '  (no call)'}" for rank in ranks)
            raise Loss(first, f"has not moved for {limit:g} s (nor has any other rank that still works:\n{where}\n)")
        for rank in ranks:
            if signs[rank].asked is None:
                signs[rank].asked = self._processes.actors[rank].position.remote()

    # ---- the end

    def _lost(self, rank: int, reason: str) -> WorkerLostError:
        """Make the error of a lost process, while others can still read what it has printed."""
        info = self._processes.process_infos[rank]
        output = self._output(rank)
        printed = f"\nlast lines that it printed:\n{output}" if output else ""
        return WorkerLostError(
            f"rank {rank} (pid {info.pid} on node {info.node_name}) {reason}; the other processes were ended: call restart() to go on "
            f"from the last checkpoint{printed}",
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

    def _finish(self, error: Exception) -> Exception:
        """End the processes and all calls. The caller has the lock."""
        if self.error is not None:
            return self.error
        self.error = error
        self._processes.end()
        self._over.set()
        # The thread fails the call that it waits for.
        with suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                call.future.set_exception(error)
                self._ended.append(call)
        self._calls.put(None)
        return error

    def _drain(self, refs: list[ObjectRef], seconds: float) -> None:
        """Fetch replies, and ignore them."""
        with suppress(Exception):
            for ref in ray.wait(refs, num_returns=len(refs), timeout=seconds)[0]:
                with suppress(RayError):
                    ray.get(ref)
