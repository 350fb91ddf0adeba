"""The turn of a request that the dispatcher runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from areal.tinker.service.backend_thread import BackendThread
from areal.tinker.service.order import LiveModel
from areal.tinker.service.verbs.verb import RequestTurn

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, kw_only=True)
class DispatchedTurn(RequestTurn):
    """A turn of the dispatcher.

    Attributes:
        thread: thread of the backend.
        end_turn: lets other models have their turns.
        store_state: stores the model with a state.
        close_model: ends the model; receives the reason and the category of the requests that fail.
    """

    model: LiveModel
    thread: BackendThread
    end_turn: Callable[[], None]
    store_state: Callable[[str], Awaitable[None]]
    close_model: Callable[[str, str], Awaitable[None]]

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        result = await self.thread.call(function, *args)
        self.end_turn()
        return result

    async def require_backend(self) -> None:
        await self.thread.need()

    async def store_model(self) -> None:
        # The model may have closed while the backend created it.
        await self.store_state("live" if self.model.closed is None else "released")

    async def release_model(self, reason: str) -> None:
        # This request is answered when it ends.
        self.model.running = ()
        await self.close_model(reason, "user")
