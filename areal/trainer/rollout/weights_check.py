"""Detection of a rollout engine that does not generate with the weights that it was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_STEPS = 3
"""Number of steps in a row in which the error must grow."""

_LEAST_ERROR = 1e-4
"""Smallest error of the first batch, in nats. Kernels of equal weights differ by more, except on a CPU."""

_OTHER_MODEL = 1.0
"""Error of the first batch, in nats, that no rounding explains."""


class WeightsCheck:
    """Raises if the rollout's log-probs are not those of the trainer although its weights are said to be the newest.

    At staleness 0, trainer and rollout have the same weights, so that their log-probs differ by rounding. With another model, they differ much
    from the first batch on. If updates do not arrive, the difference grows with every step.

    Args:
        max_growth: factor by which the error may exceed that of the first batch while it grows; ``None`` for no limit.
    """

    def __init__(self, max_growth: float | None) -> None:
        self._max_growth = max_growth
        self._first: float | None = None  # error of the first batch
        self._last: float | None = None  # error of the last batch
        self._growing = 0  # number of steps in a row in which the error has grown

    def __call__(self, scalars: Mapping[str, float], excluded: Callable[[], bool] = lambda: False) -> None:
        """Check the statistics of a batch. They are equal on all ranks, so that all raise or none.

        Args:
            scalars: statistics of the batch.
            excluded: returns, equal on all ranks, whether tokens were excluded from sampling. The rollout's log-probs are those of the others
                then, so that the first batch tells nothing. Collective; all ranks call it or none.

        Raises:
            RuntimeError: the error of the first batch is that of another model, or it has grown too much since then.
        """
        error = scalars.get("rollout/logprob_error")
        if self._max_growth is None or error is None or scalars["rollout/staleness"] > 0:
            self._growing = 0
            return
        if self._first is None and error > _OTHER_MODEL and not excluded():
            raise RuntimeError(
                f"rollout/logprob_error = {error:.3g} nats in the first batch, at staleness 0: rollout and trainer do not have the same model. "
                "Check that sync= sends the weights, and that servers were started with the model of the engine"
            )
        self._first = error if self._first is None else self._first
        grows = self._last is not None and error > self._last
        self._last, self._growing = error, self._growing + 1 if grows else 0
        if self._growing >= _STEPS and error > self._max_growth * max(self._first, _LEAST_ERROR):
            raise RuntimeError(
                f"rollout/logprob_error = {error:.3g} has grown in {self._growing} steps in a row, from {self._first:.3g} in the first batch, "
                "at staleness 0: the rollout does not generate with the weights of the trainer. Check that sync= sends them, or raise "
                f"Updates.max_error_growth = {self._max_growth:g}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the error of the first batch."""
        return {"first_error": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run. States of earlier releases have no error."""
        self._first, self._last, self._growing = state.get("first_error"), None, 0
