"""The verb ``optim_step``, and the choice of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdamParams
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.params import check_keys, check_number
from areal.tinker.service.verbs.verb import Capabilities, ModelRequest, RequestTurn

_ADAM_RANGES = {
    "learning_rate": (0.0, math.inf, "[0, ∞)"),
    "beta1": (0.0, 1.0, "[0, 1)"),
    "beta2": (0.0, 1.0, "[0, 1)"),
    "eps": (math.ulp(0.0), math.inf, "(0, ∞)"),
    "weight_decay": (0.0, math.inf, "[0, ∞)"),
    "grad_clip_norm": (0.0, math.inf, "[0, ∞), where 0 does not clip"),
}


def check_optimizer(config: Mapping[str, Any] | None, supported: frozenset[str]) -> str:
    """Return the name of the optimizer that ``optimizer_config`` selects."""
    config = dict(config or {})
    name = config.pop("type", "adamw")
    if name not in supported:
        raise UserError(f"optimizer_config.type is {name!r}: supported are {sorted(supported)}")
    check_keys("optimizer_config", config, set())
    return name


def check_adam(
    params: Mapping[str, Any], optimizer: str, model_optimizer: str, supported: frozenset[str]
) -> AdamParams:
    """Return the settings of an optimizer step."""
    if optimizer not in supported:
        raise UserError(f"the optimizer is {optimizer!r}: supported are {sorted(supported)}")
    if optimizer != model_optimizer:
        raise UserError(f"the optimizer is {optimizer!r}: the model was created with {model_optimizer!r}")
    check_keys("adam_params", params, set(_ADAM_RANGES))
    values = {name: check_number(f"adam_params.{name}", value) for name, value in params.items()}
    for name, value in values.items():
        low, high, shown = _ADAM_RANGES[name]
        if not low <= value < high:
            raise UserError(f"adam_params.{name} is {value}: it must be in {shown}")
    return AdamParams(**values)


@dataclass(frozen=True)
class OptimStep(ModelRequest, kind="optim_step"):
    """optim_step. ``params`` are the fields of ``adam_params`` that the client sent; ``optimizer`` is the type of other parameters."""

    params: Mapping[str, float] = field(default_factory=dict)
    optimizer: str = "adamw"
    uses_gradients = True

    def check(self, model: TrainedModel, server: Capabilities) -> AdamParams:
        return check_adam(self.params, self.optimizer, model.optimizer, server.optimizers)

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        metrics = await turn.call(turn.backend.optim_step, turn.model.id, turn.prepared)
        return {"type": "optim_step", "metrics": {name: float(value) for name, value in metrics.items()}}
