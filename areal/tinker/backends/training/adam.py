"""Parameters of the protocol's AdamW as settings of one optimizer step."""

from __future__ import annotations

import math

from areal.api import StepSettings
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdamParams


def step_settings(params: AdamParams) -> StepSettings:
    """Return the settings of a step.

    Raises:
        UserError: a value is out of range. Names the field of the protocol.
    """
    betas = (params.beta1, params.beta2)
    in_range = {
        "learning_rate": 0 <= params.learning_rate < math.inf,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        "eps": 0 < params.eps < math.inf,
        "weight_decay": 0 <= params.weight_decay < math.inf,
        "grad_clip_norm": params.grad_clip_norm >= 0,
    }
    ranges = {"beta1": "at least 0 and below 1", "beta2": "at least 0 and below 1", "eps": "finite and above 0"}
    for name, good in in_range.items():
        if not good:
            wanted = ranges.get(
                name, "at least 0; 0 does not clip" if name == "grad_clip_norm" else "finite and at least 0"
            )
            raise UserError(f"adam_params.{name} = {getattr(params, name)}: it must be {wanted}")
    return StepSettings(
        lr=params.learning_rate,
        betas=betas,
        eps=params.eps,
        weight_decay=params.weight_decay,
        gradient_clipping=params.grad_clip_norm or math.inf,
    )
