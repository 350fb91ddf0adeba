"""Interface of the owner of the servers, as the sender of weights uses it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.schemas import ReplyBody

R = TypeVar("R", bound=ReplyBody)


class Servers(Protocol):
    """Servers that receive updates together. Called from the thread of the trainer, which waits for each call."""

    def members(self) -> Mapping[str, int]:
        """Return the servers that take part in the next update: URL -> number of restarts that the owner has noticed.

        Servers that cannot be reached are left out.

        Raises:
            RuntimeError: no server is left.
        """
        ...

    def call(self, url: str, call: HTTPCall[R], seconds: float) -> Future[R]:
        """Send a request to a member, without retries. Returns at once.

        The future raises :class:`~areal.inference.http.connection.Unavailable`, another ``RuntimeError`` or a ``ValueError`` that
        names the server.
        """
        ...

    def label(self, version: int) -> str:
        """Return the name that the servers give the weights of a version."""
        ...

    def hold(self) -> None:
        """Stop generation on all members. Running requests may be kept for :meth:`release`.

        Raises:
            RuntimeError: a member does not stop; names it. The sender releases all.
        """
        ...

    def release(self, version: int | None, faults: Mapping[str, str]) -> None:
        """Continue generation on all members. Called once after each :meth:`hold`, also if that failed.

        Args:
            version: version of the weights that members without a fault have; ``None`` if they have those from before :meth:`hold`.
            faults: reason by URL of the members without complete weights. They must not generate, and their running requests must be
                discarded, until a later update has succeeded.

        Raises:
            RuntimeError: a member without a fault does not continue; names it.
        """
        ...
