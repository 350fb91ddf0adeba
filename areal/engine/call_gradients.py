"""The gradients that one call adds to the pending ones: begun, added, or undone after an error."""

from __future__ import annotations

from areal.engine.components import CallGradients, EngineComponents, Gradients


class AllGradients:
    """The gradients of what is trained. An error discards all that are pending.

    Implements :class:`areal.engine.components.CallGradients`.
    """

    on_error = "all pending gradients were discarded; the engine can be used for the next call"

    def __init__(self, gradients: Gradients) -> None:
        self._gradients, self._state = gradients, gradients.state

    def begin(self) -> None:
        self._gradients.before_backward()
        # A reduction that was complete is not any more, even if the call is interrupted.
        self._state.set(accumulated=self._state.accumulated)

    def added(self) -> None:
        self._state.set(accumulated=True)

    def undo(self) -> None:
        self._gradients.zero()
        self._state.set(accumulated=False)

    def end(self) -> None:
        pass


def call_gradients(components: EngineComponents, adapters: tuple[str, ...] | None) -> CallGradients:
    """Return the gradients that a call adds: those of the adapters that its samples name, or of what is trained.

    Raises:
        RuntimeError: nothing is trained, inside ``reference()``.
    """
    if adapters is None or components.adapters is None:
        return AllGradients(components.gradients)
    return components.adapters.gradients_of(adapters)
