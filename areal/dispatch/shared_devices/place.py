"""The place of one model or rollout on shared devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from areal.dispatch.shared_devices.turns import Turn, Turns
from areal.dispatch.shared_devices.uses import Need, Use


class Place:
    """The place of a model or a rollout on shared devices.

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
        """Wait until a use fits next to others, move what it needs to the device, and begin it.

        Args:
            use: use of the model.
            call: it is that of one call. Nothing else of the model moves meanwhile.

        Raises:
            ValueError: it can never fit.
        """
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
        """Note that the model's processes were replaced, and hold nothing."""
        self._turns.forget(self._name)

    def remove(self) -> None:
        """Note that the model is gone."""
        # Once: the name may be that of another by now.
        if not self._removed:
            self._removed = True
            self._remove(self._name)
