"""Uses of models and rollouts, and the state that each needs on the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kinds of state. Of parts that were last used at the same time, the first kind leaves the device first."""

    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    ROLLOUT = "rollout"


class Use(Enum):
    """Uses of a model, or of a rollout (``GENERATE``).

    ``ALL`` is that of any function, which may use all state. ``ZERO_GRAD`` discards gradients. ``CHANGE`` needs no state on the device, and
    may change what exists there.
    """

    FORWARD = "forward"
    EVAL = "eval"
    FORWARD_BACKWARD = "forward_backward"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    SYNC = "sync"
    GENERATE = "generate"
    ALL = "all"
    ZERO_GRAD = "zero_grad"
    CHANGE = "change"


NEEDED: dict[Use, frozenset[Kind]] = {
    Use.FORWARD: frozenset({Kind.WEIGHTS}),
    Use.EVAL: frozenset({Kind.WEIGHTS}),
    Use.SYNC: frozenset({Kind.WEIGHTS}),
    Use.FORWARD_BACKWARD: frozenset({Kind.WEIGHTS, Kind.GRADIENTS}),
    Use.STEP: frozenset({Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER}),
    Use.CHECKPOINT: frozenset({Kind.WEIGHTS, Kind.OPTIMIZER}),
    Use.GENERATE: frozenset({Kind.ROLLOUT}),
    Use.ALL: frozenset({Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER}),
    Use.ZERO_GRAD: frozenset({Kind.GRADIENTS}),
    Use.CHANGE: frozenset(),
}
"""Kinds of state that a use needs on the device."""

CREATED: dict[Use, frozenset[Kind]] = {
    Use.FORWARD_BACKWARD: frozenset({Kind.GRADIENTS}),
    Use.STEP: frozenset({Kind.GRADIENTS, Kind.OPTIMIZER}),
}
"""Kinds of state that a use allocates if they do not exist."""

OPEN = frozenset({Use.ALL, Use.ZERO_GRAD, Use.CHANGE})
"""Uses that may allocate, free or move state. Bytes are measured when they end."""


@dataclass(frozen=True)
class Part:
    """One kind of state of one model, or the memory of a rollout.

    Attributes:
        owner: name of the model or the rollout.
        kind: kind of state.
    """

    owner: str
    kind: Kind


@dataclass(frozen=True)
class Need:
    """A use of a model or a rollout."""

    owner: str
    use: Use


@dataclass(frozen=True)
class Move:
    """A move between the devices and host memory.

    Attributes:
        part: state that moves. Rollouts sleep and wake, models offload and onload.
        to_device: direction.
        nbytes: its bytes on all devices.
    """

    part: Part
    to_device: bool
    nbytes: int
