"""Exchange of small values between the ranks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Control(Protocol):
    """Exchanges small Python values between all ranks of an engine, on the host. An error on one rank is raised on all ranks.

    Attributes:
        rank, size: rank of this process among the engine's ranks, and their number.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank. Collective.

        Args:
            value: any picklable object.
        """
        ...

    def attempt(self, fn: Callable[[], T], note: str = "") -> T:
        """Call ``fn`` on this rank, and raise on every rank when it raised on any. Collective.

        Args:
            fn: function without arguments. An error in it must not leave other ranks waiting in a collective.
            note: text that is added to an error, for the caller.

        Returns:
            The result of ``fn`` on this rank.

        Raises:
            ValueError: the errors of all ranks that failed are ``ValueError``. The text names the ranks.
            RuntimeError: an error is of another type.
        """
        ...

    def attempt_and_gather(self, fn: Callable[[], T], note: str = "") -> list[T]:
        """Call ``fn`` on this rank, and return the results of all ranks, by rank. Errors as in :meth:`attempt`. Collective.

        Args:
            fn: function without arguments. Its result must be picklable.
            note: as in :meth:`attempt`.
        """
        ...
