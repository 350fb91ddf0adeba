"""Settings of one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepSettings:
    """Settings of one optimizer step, which replace those of ``OptimizerConfig``. ``None`` keeps a configured setting.

    Attributes:
        lr: learning rate of the step, finite and at least 0. The schedule does not multiply it, and advances as usual.
        betas: both betas of AdamW, at least 0 and below 1.
        eps: epsilon of AdamW, finite and above 0.
        weight_decay: decay of the weights, finite and at least 0.
        gradient_clipping: largest global gradient norm, above 0. ``math.inf`` does not clip.

    Raises:
        ValueError: a value is out of range.
    """

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    gradient_clipping: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"StepSettings.{name} = {value}: it must be finite and at least 0")
        if self.betas is not None and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"StepSettings.betas = {self.betas}: pass two numbers, each at least 0 and below 1")
        if self.eps is not None and not 0 < self.eps < math.inf:
            raise ValueError(f"StepSettings.eps = {self.eps}: it must be finite and above 0")
        if self.gradient_clipping is not None and not self.gradient_clipping > 0:
            raise ValueError(
                f"StepSettings.gradient_clipping = {self.gradient_clipping}: it must be above 0; pass math.inf for a step without clipping"
            )
