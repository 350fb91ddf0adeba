"""Replies of the ranks to the calls that run, read many at a time: the cost of a call grows linearly with the ranks."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from areal.dispatch.executor import Reply
from areal.dispatch.ray.results import unseal
from areal.dispatch.ray.stored import StoredResult

WATCHED = 16
"""Replies of a call of which Ray reports the arrival, at 30 us each. Of a call on more ranks, the others are asked for."""

ASK_SECONDS = 0.1
"""Seconds between two questions for replies whose arrival is not reported."""

PAUSE_SECONDS = 5e-6
"""Least seconds between two questions, for each reply to come: a question takes a fifth of that."""

READ_SECONDS = 1.0
"""Limit to read replies that have arrived, which only lost objects exceed."""

Event = Callable[[], None]


class Loss(Exception):
    """Ends all calls: a process is lost, or all are."""

    def __init__(self, rank: int, reason: str, *, died: bool = False) -> None:
        super().__init__(reason)
        self.rank, self.reason, self.died = rank, reason, died


@dataclass(eq=False)
class Call:
    """A call on all ranks, with the replies so far.

    Attributes:
        what: name of the call.
        replies: by rank; ``None`` for those that still work.
        waiting: references of the replies to come, by rank.
        watched: ranks whose reply Ray reports.
        failed: one reply with an error of each kind.
        future: future of all replies.
    """

    what: str
    replies: list[Reply | None]
    waiting: dict[int, ObjectRef]
    watched: set[int] = field(default_factory=set)
    failed: dict[str, Reply] = field(default_factory=dict)
    future: Future[list[Reply]] = field(default_factory=Future)


class Replies:
    """Calls with replies to come, in the order in which the ranks run them.

    A callback of Ray costs six times as much as one of the values of a ``ray.get`` of all. So few replies of each call have one
    (:data:`WATCHED`), and each of these lets the others be read together. Between these, all are asked for every :data:`ASK_SECONDS`: a rank
    may have failed while the others work. Used by one thread. No question waits.

    Args:
        put: takes an event for the thread, from any thread.
        changed: called after the begin and the end of a call, and after the first error of a kind.

    Attributes:
        running: the calls.
        due: time of the next question; infinite if there is nothing to ask for.
    """

    def __init__(self, put: Callable[[Event], None], changed: Event) -> None:
        self._put, self._changed = put, changed
        self.running: list[Call] = []
        self.due, self._asked = math.inf, -math.inf

    def send(self, call: Call, begin: Event) -> None:
        """Wait for the replies of a call that was sent. May be called by any thread.

        Args:
            call: a call.
            begin: event before those of the call. It calls :meth:`add`.
        """
        watched = dict(islice(call.waiting.items(), WATCHED))
        call.watched.update(watched)
        # From here on the call belongs to the thread.
        self._put(begin)
        for rank, ref in watched.items():
            self._report(call, rank, ref)

    def add(self, call: Call) -> None:
        """Begin to wait for a call."""
        self.running.append(call)
        self._ask_after(PAUSE_SECONDS * len(call.waiting))
        self._changed()

    def take_arrived(self) -> None:
        """Note all replies that have arrived, unless each is reported.

        Raises:
            Loss: the process of a rank died. All others were noted.
        """
        self.due = math.inf
        # Ray starts a cluster for a question after its end.
        if not self._unwatched or not ray.is_initialized():
            return
        loss: Loss | None = None
        before: Call | None = None
        for call in tuple(self.running):
            # A rank replies to a call after those before.
            ranks = {ref: rank for rank, ref in call.waiting.items() if before is None or rank not in before.waiting}
            if ranks:
                its = self._take_ready(call, ranks)
                loss = loss or its
            before = call
        self._asked = time.monotonic()
        if loss is not None:
            raise loss
        if self.running:
            self._watch(self.running[0])
        self._ask_after(ASK_SECONDS)

    def _take_ready(self, call: Call, ranks: Mapping[ObjectRef, int]) -> Loss | None:
        """Note the replies among some that have arrived. Returns the loss of a rank, if one is lost.

        Args:
            call: a call.
            ranks: rank of each reference.
        """
        ready, _ = ray.wait([*ranks], num_returns=len(ranks), timeout=0)
        loss: Loss | None = None
        for ref, value in zip(ready, _values(ready), strict=True):
            # A lost object is asked for again, until the end of its process is reported.
            if not isinstance(value, GetTimeoutError):
                try:
                    self._note(call, ranks[ref], value)
                except Loss as error:
                    loss = loss or error
        return loss

    def _take_reported(self, call: Call, rank: int, future: Future[Any]) -> None:
        """Note a reply that Ray reports, and ask for the others.

        Raises:
            Loss: the process of the rank died.
        """
        if rank in call.waiting:
            self._note(call, rank, future.exception() or future.result())
        self._ask_after(PAUSE_SECONDS * len(call.waiting))

    def _note(self, call: Call, rank: int, value: Any) -> None:
        """Note the reply of a rank, and complete the call with the last one.

        Args:
            call: a call.
            rank: rank that replied.
            value: reply, or error of Ray.

        Raises:
            Loss: the process of the rank died.
        """
        reply = _reply(rank, value, call.waiting[rank])
        call.replies[rank] = reply
        del call.waiting[rank]
        call.watched.discard(rank)
        changed = bool(reply.kind) and call.failed.setdefault(reply.kind, reply) is reply
        if not call.waiting and call in self.running:
            self.running.remove(call)
            call.future.set_result([its or Reply() for its in call.replies])
            changed = True
        if changed:
            self._changed()

    # ---- what Ray reports

    def _watch(self, call: Call) -> None:
        """Let Ray report more replies of a call, up to :data:`WATCHED`."""
        others = (rank for rank in call.waiting if rank not in call.watched)
        for rank in tuple(islice(others, WATCHED - len(call.watched))):
            call.watched.add(rank)
            self._report(call, rank, call.waiting[rank])

    def _report(self, call: Call, rank: int, ref: ObjectRef) -> None:
        """Take a reply in the thread when it arrives."""
        ref.future().add_done_callback(lambda its: self._put(partial(self._take_reported, call, rank, its)))

    @property
    def _unwatched(self) -> bool:
        """True if there are replies to come that Ray does not report."""
        return any(len(call.waiting) > len(call.watched) for call in self.running)

    def _ask_after(self, seconds: float) -> None:
        """Ask for replies so many seconds after the last question, if Ray does not report each."""
        if self._unwatched:
            self.due = min(self.due, self._asked + seconds)


def _values(refs: list[ObjectRef]) -> list[Any]:
    """Return the values of references that are ready, or the errors of those that have none."""
    try:
        return ray.get(refs, timeout=READ_SECONDS)
    except Exception:
        return [_value(ref) for ref in refs]


def _value(ref: ObjectRef) -> Any:
    try:
        return ray.get(ref, timeout=READ_SECONDS)
    except Exception as error:
        return error


def _reply(rank: int, value: Any, ref: ObjectRef) -> Reply:
    """Return the reply of a rank from what Ray has: a sealed reply, or an error.

    Args:
        rank: rank that replied.
        value: reply, or error of Ray.
        ref: reference of the reply.

    Raises:
        Loss: the process of the rank died.
    """
    try:
        if isinstance(value, BaseException):
            raise value
        return value if value.kind else Reply(unseal(value.value), handle=StoredResult(ref))
    except RayTaskError as error:
        return Reply(None, "RuntimeError", f"{type(error.cause).__name__}: {error.cause}", str(error))
    except RayError as error:
        raise Loss(rank, "died", died=True) from error
    except Exception as error:
        text = f"the result of rank {rank} cannot be read in the driver: {type(error).__name__}: {error}"
        return Reply(None, "ValueError", text, traceback.format_exc())
