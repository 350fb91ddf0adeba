"""Work that the trainer and the workers of all servers do together: requests to the servers, and a call of the carrier."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import httpx2

from areal.inference.http.group.carrier import Carrier, in_thread
from areal.inference.http.server_connection import Unavailable

_NAMING_SECONDS = 2.0
"""Time for the servers to say what went wrong, after the carrier has failed."""


class Round:
    """Requests that end together with a call of the carrier. Started at once.

    Args:
        what: name of the work, for errors.
        calls: requests by URL.
        carrier: carrier, which is aborted after an error.
        work: call of the carrier.
        seconds: time limit.
    """

    def __init__(
        self, what: str, calls: Mapping[str, Future[Any]], carrier: Carrier, work: Callable[[], None], seconds: float
    ) -> None:
        self._what, self._calls, self._carrier = what, dict(calls), carrier
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self._work = in_thread(work, "weight-carrier")

    def end(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: a server failed, or did not answer in time, or the carrier failed. Names the servers.
        """
        everything = [self._work, *self._calls.values()]
        done, _ = wait(everything, max(0.0, self._deadline - time.monotonic()), FIRST_EXCEPTION)
        if len(done) == len(everything) and not any(each.exception() for each in done):
            return
        # Servers that failed by themselves, before the carrier left the others alone.
        first = self._failed()
        if not first and self._work in done:
            wait(self._calls.values(), _NAMING_SECONDS, FIRST_EXCEPTION)
            first = self._failed()
        silent = self._silent() if not first and self._work not in done else {}
        self._carrier.abort()
        wait(everything, _NAMING_SECONDS)
        # A server that is gone explains the errors of the others.
        gone = {url: text for url, text in self._failed().items() if is_gone(self._calls[url].exception())}
        own = self._work.exception() if self._work.done() else None
        texts = list((gone or {**first, **silent, **self._failed()}).values()) or ([str(own)] if own else [])
        raise RuntimeError(f"{self._what}: {'; '.join(texts) or f'it did not end within {self._seconds:g} s'}")

    def _failed(self) -> dict[str, str]:
        return {url: str(call.exception()) for url, call in self._calls.items() if call.done() and call.exception()}

    def _silent(self) -> dict[str, str]:
        return {
            url: f"{url}: no answer within {self._seconds:g} s" for url, call in self._calls.items() if not call.done()
        }


def is_gone(error: BaseException | None) -> bool:
    """Return True for the error of a request whose connection was refused or closed. A time limit may be the fault of another server."""
    if not isinstance(error, Unavailable) or error.status is not None:
        return False
    return not isinstance(error.__cause__, TimeoutError | httpx2.TimeoutException)
