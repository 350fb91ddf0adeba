"""The losses by the protocol's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from areal.tinker.backends.losses.cispo import ClippedWeight
from areal.tinker.backends.losses.cross_entropy import CrossEntropy
from areal.tinker.backends.losses.dro import QuadraticPenalty
from areal.tinker.backends.losses.gspo import SequenceRatio
from areal.tinker.backends.losses.importance_sampling import ImportanceWeighted
from areal.tinker.backends.losses.loss_interface import ProtocolLoss, config_numbers
from areal.tinker.backends.losses.ppo import ClippedSurrogate

LOSSES: dict[str, Callable[..., ProtocolLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceWeighted,
    "ppo": ClippedSurrogate,
    "cispo": ClippedWeight,
    "dro": QuadraticPenalty,
    "gspo": SequenceRatio,
}
"""Class of each loss. Its fields are the keys of the configuration."""


def loss_keys() -> dict[str, dict[str, frozenset[str]]]:
    """Return the keys of each loss: ``inputs``, ``optional`` and ``config``."""
    return {
        name: {"inputs": kind.inputs, "optional": kind.optional, "config": _config_keys(kind)}  # type: ignore[attr-defined]
        for name, kind in LOSSES.items()
    }


def make_loss(name: str, config: Mapping[str, float | str]) -> ProtocolLoss:
    """Return a loss with its configuration.

    Raises:
        ValueError: the loss or a key is unknown, or a value is out of range.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn = {name!r}: choose one of {', '.join(LOSSES)}")
    kind, known = LOSSES[name], _config_keys(LOSSES[name])
    for key in config:
        if key not in known:
            raise ValueError(
                f"loss_fn_config of {name!r} has the key {key!r}: known keys are {', '.join(sorted(known)) or 'none'}"
            )
    return kind(**config_numbers(name, config))


def _config_keys(kind: Callable[..., ProtocolLoss]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
