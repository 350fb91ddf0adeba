"""Curves of two runs, and the largest differences between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

COLUMNS = ("reward", "lr", "loss", "grad norm", "entropy", "weights")
_KEYS = {"reward": "reward", "lr": "learning_rate", "loss": "loss", "grad norm": "grad_norm", "entropy": "entropy"}


@dataclass
class Curve:
    """What a trainer of TRL logged at each step, and the weights at the end."""

    logs: list[dict[str, Any]]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, trainer: Any, weights: Any) -> Curve:
        """Return the curve of a trainer that has run."""
        steps = [log for log in trainer.state.log_history if "loss" in log]
        return cls(steps, {name: tensor.detach().clone() for name, tensor in weights})

    def rewards(self) -> list[float]:
        """Return the mean reward of each step that generated."""
        return [log["reward"] for log in self.logs if log.get("reward") is not None]


def differences(one: Curve, other: Curve) -> dict[str, float]:
    """Return the largest difference of each column. Steps and weights must be the same ones."""
    assert len(one.logs) == len(other.logs)
    assert one.weights.keys() == other.weights.keys()
    found = {}
    for column, key in _KEYS.items():
        pairs = [(a.get(key), b.get(key)) for a, b in zip(one.logs, other.logs, strict=True)]
        assert all((a is None) == (b is None) for a, b in pairs)
        found[column] = max(abs(a - b) for a, b in pairs if a is not None and b is not None)
    found["weights"] = max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)
    return found
