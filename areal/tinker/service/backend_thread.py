"""The thread on which the training backend runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.errors import BackendAwayError, BackendLostError, ServerError, UserError

_T = TypeVar("_T")

EndTurn = Callable[[], None]
"""Ends a turn of the backend. A second call does nothing."""

logger = logging.getLogger(__name__)


class BackendTurns:
    """Turns of the backend, one at a time."""

    def __init__(self) -> None:
        self._idle = asyncio.Event()
        self._idle.set()

    async def take(self) -> EndTurn:
        """Wait until the backend is idle, and take it. Returns the function that ends this turn."""
        while not self._idle.is_set():
            await self._idle.wait()
        self._idle.clear()
        ended = False

        def end() -> None:
            # Another turn may have begun since the first call.
            nonlocal ended
            if not ended:
                ended = True
                self._idle.set()

        return end


class BackendThread:
    """Calls of a backend, one after the other.

    Attributes:
        error: why the backend does not run, if it could not be restarted.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "tinker-training")
        self.error: str | None = None

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a method of the backend. After an unexpected error, a backend that is not healthy counts as lost."""
        try:
            return await self._run(function, *args)
        except (UserError, ServerError):
            raise
        except Exception as error:
            if self._backend.healthy():
                raise
            raise BackendLostError(f"{type(error).__name__}: {error}") from error

    async def need(self) -> None:
        """Try again to start a backend that could not be restarted.

        Raises:
            BackendAwayError: it cannot be started now, either.
        """
        if self.error is not None:
            await self.restart(self.error)
        if self.error is not None:
            raise BackendAwayError(f"{self.error}: try again later, or restart the server")

    async def restart(self, reason: str) -> None:
        """Start the backend again after its loss. A failure is kept in ``error``."""
        try:
            await self._run(self._backend.restart)
            self.error = None
        except Exception as failure:
            logger.exception("the backend could not be restarted")
            self.error = f"the backend is lost ({reason}) and could not be restarted ({failure})"

    async def stop(self) -> None:
        """Wait for the call that runs, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)

    async def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
