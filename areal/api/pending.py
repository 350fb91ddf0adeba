"""Futures of verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Result of a verb that may still run."""

    def done(self) -> bool:
        """Return True if :meth:`result` does not wait."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the verb to end, and return its result.

        Args:
            timeout: seconds to wait; ``None`` waits without limit.

        Raises:
            ValueError, RuntimeError: an error of the verb.
            TimeoutError: the verb still runs.
        """
        ...


@dataclass(frozen=True)
class Finished(Generic[T]):
    """Implements :class:`Pending` for a verb that has ended."""

    value: T

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        return self.value
