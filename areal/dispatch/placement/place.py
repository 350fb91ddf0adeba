"""The place of one model or rollout on shared devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from areal.dispatch.placement.turns import Turn, Turns
from areal.dispatch.placement.uses import Need, Use


class Place:
    """Implements :class:`~areal.dispatch.residence.Residence`.

    Args:
        turns: turns on the devices.
        name: name of the model or the rollout.
        remove: removes it from the devices.
    """

    def __init__(self, turns: Turns, name: str, remove: Callable[[str], None]) -> None:
        self._turns, self._name, self._remove = turns, name, remove
        self._removed = False

    def turn(self, use: Use, *, background: bool = False, call: bool = False) -> Turn:
        """Return a use to begin. For a model that was removed, it has ended."""
        return Turn(self._turns, Need(self._name, use), background=background, call=call, ended=self._removed)

    def begin(self, use: Use, *, call: bool = False) -> Turn:
        """Implement :meth:`~areal.dispatch.residence.Residence.begin`."""
        turn = self.turn(use, call=call)
        self._turns.begin(turn)
        return turn

    @contextlib.contextmanager
    def use(self, use: Use) -> Iterator[None]:
        """Context of a use."""
        turn = self.begin(use)
        try:
            yield
        finally:
            turn.end()

    def renew(self) -> None:
        """Implement :meth:`~areal.dispatch.residence.Residence.renew`."""
        self._turns.forget(self._name)

    def remove(self) -> None:
        """Implement :meth:`~areal.dispatch.residence.Residence.remove`."""
        # Once: the name may be that of another by now.
        if not self._removed:
            self._removed = True
            self._remove(self._name)
