"""Settings of an optimizer: of one step, and the learning rate as a view of its parameter group."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Protocol

from areal.api.config import TrainEngineConfig


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


class HasLearningRate(Protocol):
    """What a parameter group reads and sets: an engine, or a group of ranks."""

    config: TrainEngineConfig

    @property
    def lr(self) -> float: ...

    def set_lr(self, lr: float) -> None: ...


class ParamGroup(MutableMapping[str, float]):
    """View of an engine's optimizer in the form of a parameter group of torch, for a schedule that sets ``group["lr"]``.

    ``"lr"``, its only key, is the learning rate of the next step.

    Args:
        engine: engine with an optimizer.
    """

    def __init__(self, engine: HasLearningRate) -> None:
        self._engine = engine

    def __getitem__(self, key: str) -> float:
        if key != "lr":
            raise KeyError(key)
        return self._engine.lr

    def __setitem__(self, key: str, value: float) -> None:
        """Set the learning rate.

        Raises:
            ValueError: another key, a rate that is not finite or below 0, or an engine with a schedule, which would multiply the rate.
        """
        if key != "lr":
            raise ValueError(
                f"param_groups[0][{key!r}] = {value!r}: 'lr' alone can be set; pass others in StepSettings"
            )
        optimizer = self._engine.config.optimizer
        if optimizer is not None and (optimizer.lr_scheduler != "constant" or optimizer.warmup_steps):
            raise ValueError(
                f"param_groups[0]['lr'] = {value} with optimizer.lr_scheduler = {optimizer.lr_scheduler!r} and warmup_steps = "
                f"{optimizer.warmup_steps}, which would multiply it: leave both out, or pass StepSettings(lr=...)"
            )
        self._engine.set_lr(value)

    def __delitem__(self, key: str) -> None:
        raise ValueError(f"param_groups[0][{key!r}] cannot be deleted: it is a view of the engine's optimizer")

    def __iter__(self) -> Iterator[str]:
        return iter(("lr",))

    def __len__(self) -> int:
        return 1
