"""Results of calls that may still run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from areal.dispatch.rank_objects import KINDS, Reply
from areal.utils.remote_traceback import RemoteTraceback

T = TypeVar("T")


class PendingCall(Generic[T]):
    """Implements :class:`~areal.api.Pending` for a call on all ranks.

    Args:
        replies: replies of all ranks.
        finish: makes the result from the values of all ranks, by rank. Called once, by the first :meth:`result`.
    """

    def __init__(self, replies: Future[list[Reply]], finish: Callable[[list[Any]], T]) -> None:
        self._replies, self._finish = replies, finish
        self._lock = threading.Lock()
        self._result: list[T] = []

    def done(self) -> bool:
        return self._replies.done()

    def result(self, timeout: float | None = None) -> T:
        replies = self._replies.result(timeout)
        error = error_of(replies)
        if error is not None:
            raise error
        with self._lock:
            if not self._result:
                self._result.append(self._finish([reply.value for reply in replies]))
        return self._result[0]


def error_of(replies: Sequence[Reply]) -> Exception | None:
    """Return the error of a call, with the remote traceback as its cause; ``None`` if no rank has one.

    An engine raises the same error on all ranks; others get the number of their rank.
    """
    failed = [(rank, reply) for rank, reply in enumerate(replies) if reply.kind]
    if not failed:
        return None
    first = failed[0][1]
    if first.error is not None and len(replies) == 1:
        return first.error
    same = len(failed) == len(replies) and len({(reply.kind, reply.text) for _, reply in failed}) == 1
    text = first.text if same else "; ".join(f"rank {rank}: {reply.text}" for rank, reply in failed)
    kinds = {reply.kind for _, reply in failed}
    error = (KINDS[first.kind] if len(kinds) == 1 else RuntimeError)(text)
    # The longest: on the rank where the error began it also has the cause.
    error.__cause__ = RemoteTraceback(max((reply.trace for _, reply in failed), key=len))
    return error
