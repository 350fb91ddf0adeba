"""The protocol between a group and the devices that it shares with others."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from areal.dispatch.placement.uses import Use


class BegunUse(Protocol):
    """A use that has begun: what it needs is on the device."""

    def end(self) -> None:
        """End the use. May be called twice."""
        ...

    def end_with(self, call: Future[Any]) -> None:
        """End the use when a call has ended on the ranks."""
        ...


class Residence(Protocol):
    """The place of a model on shared devices."""

    def begin(self, use: Use, *, call: bool = False) -> BegunUse:
        """Wait until a use fits next to others, move what it needs to the device, and begin it.

        Args:
            use: use of the model.
            call: it is that of one call. Nothing else of the model moves meanwhile.

        Raises:
            ValueError: it can never fit.
        """
        ...

    def renew(self) -> None:
        """Note that the model's processes were replaced, and hold nothing."""
        ...

    def remove(self) -> None:
        """Note that the model is gone."""
        ...
