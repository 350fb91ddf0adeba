"""The optimizer step for engines whose parameters are plain or distributed tensors: schedule, norm, clipping, skipping."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal.api.batch import OptimStats
from areal.api.sections.optimizer import OptimizerConfig
from areal.api.step_settings import StepSettings
from areal.utils.distributed import rank_in_world
from areal.utils.dtensor import collective_device, local_part

logger = logging.getLogger(__name__)


@dataclass
class GradientState:
    """Progress of the gradients between optimizer steps.

    Attributes:
        accumulated: gradients wait for an optimizer step.
        reduced: their reduction over ranks is complete.
    """

    accumulated: bool = False
    reduced: bool = False

    def set(self, *, accumulated: bool, reduced: bool = False) -> None:
        """Set both attributes."""
        self.accumulated, self.reduced = accumulated, reduced


def lr_factor(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Return the factor of the learning rate at optimizer step ``step``, which counts from 0.

    Linear warm-up to 1 over ``warmup_steps``, then the schedule over the remaining steps down to ``min_lr_ratio``, which is kept afterwards.
    """
    # Warm-up, and the schedule without decay.
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_scheduler == "constant" or total_steps is None:
        return 1.0
    after, length = step - config.warmup_steps, max(1, total_steps - config.warmup_steps)
    # Progress of the decay: over all steps after the warm-up, or over the last ones.
    if config.lr_scheduler == "wsd":
        falling = max(1, round(config.decay_ratio * total_steps))
        progress = (step - (total_steps - falling)) / falling
    else:
        progress = after / length
    progress = min(max(progress, 0.0), 1.0)
    decay = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_scheduler == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay


def adamw_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of AdamW, by their names in torch."""
    betas = (config.beta1, config.beta2)
    return {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}


def torch_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the torch optimizer of ``config``: fused AdamW (Loshchilov and Hutter, 2019), or SGD."""
    if config.type == "adamw":
        return torch.optim.AdamW(
            parameters,
            **adamw_settings(config),
            fused=True,
        )
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def sum_of_squares(grads: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Return the sum of all squares, a float64 scalar on ``device``."""
    nonempty = [grad for grad in grads if grad.numel()] or [torch.zeros(1, device=device)]
    # In float64: on a CPU, two million squares summed in float32 are off by 1e-5.
    norms = torch._foreach_norm(nonempty, 2, torch.float64)
    return torch.stack([norm.to(device, torch.float64) for norm in norms]).square().sum()


class InnerOptimizer(Protocol):
    """An optimizer that only updates: gradients are clipped, and the learning rate is set."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...


Inner = TypeVar("Inner", bound=InnerOptimizer)


class ClippingOptimizer(Generic[Inner]):
    """Clips gradients to a global norm, skips steps with a norm that is not finite, and sets the learning rate of each step.

    Args:
        inner: torch optimizer, or another one with the same interface. Gradients must be reduced when :meth:`step` is called.
        total_steps: int. Optimizer steps of the run; ``None`` if unknown.
        global_norm: function that returns the L2 norm of all gradients over all ranks: a scalar tensor, equal on every rank.
        scale_grads: function that multiplies every gradient in place.

    Raises:
        ValueError: the schedule depends on ``total_steps``, which is ``None``.
    """

    def __init__(
        self,
        inner: Inner,
        config: OptimizerConfig,
        total_steps: int | None,
        global_norm: Callable[[], Tensor],
        scale_grads: Callable[[float], None],
    ) -> None:
        if total_steps is None and config.lr_scheduler != "constant":
            raise ValueError(
                f"FinetuneSpec.total_train_steps = None with optimizer.lr_scheduler = {config.lr_scheduler!r}, which depends on it: set it, or "
                "leave lr_scheduler out and call set_lr() before each step"
            )
        self.inner = inner
        self._config = config
        self._total_steps = total_steps
        self._global_norm = global_norm
        self._scale_grads = scale_grads
        self._base_lr = config.lr
        self._warned_of_end = False
        self.steps = 0

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return self._base_lr * lr_factor(self.steps, self._config, self._total_steps)

    def set_lr(self, lr: float) -> None:
        """Set the base learning rate. The schedule multiplies it."""
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr = {lr}: it must be finite and at least 0")
        self._base_lr = lr

    def step(self, settings: StepSettings | None = None) -> OptimStats:
        """Clip and update. A norm that is not finite updates nothing and does not advance the schedule.

        Args:
            settings: replace the configured settings in this step only.

        Raises:
            ValueError: the optimizer does not have a setting. Nothing was changed.
        """
        settings = settings or StepSettings()
        # Settings of the inner optimizer, by their names in its parameter groups.
        inner = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
        inner = {name: value for name, value in inner.items() if value is not None}
        if self._config.type == "sgd":
            for name in inner.keys() & {"betas", "eps"}:
                raise ValueError(
                    f"StepSettings.{name} = {inner[name]} with optimizer.type = 'sgd', which has no {name}: leave it out"
                )
        lr = self.lr if settings.lr is None else settings.lr
        norm = self._global_norm().item()
        if not math.isfinite(norm):
            return OptimStats(grad_norm=norm, lr=lr, update_successful=False)
        if settings.lr is None and not lr_factor(self.steps, self._config, self._total_steps):
            self._warn_of_end()
        limit = self._config.gradient_clipping if settings.gradient_clipping is None else settings.gradient_clipping
        # The same small constant as in torch.nn.utils.clip_grad_norm_, so that both give the same numbers.
        if limit is not None and limit / (norm + 1e-6) < 1:
            self._scale_grads(limit / (norm + 1e-6))
        with self._in_groups({"lr": lr, **inner}):
            self.inner.step()
        self.steps += 1
        return OptimStats(grad_norm=norm, lr=lr, update_successful=True)

    def _warn_of_end(self) -> None:
        """Warn of the first step after the end of the schedule, which changes nothing."""
        if not self._warned_of_end and rank_in_world() == 0:
            logger.warning(
                "optimizer step %d has a learning rate of 0, as all steps after FinetuneSpec.total_train_steps = %d with "
                "optimizer.lr_scheduler = %r: raise total_train_steps, or set optimizer.min_lr_ratio",
                self.steps + 1,
                self._total_steps,
                self._config.lr_scheduler,
            )
        self._warned_of_end = True

    @contextlib.contextmanager
    def _in_groups(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Set values in all parameter groups inside, and restore the previous ones: they are saved in checkpoints."""
        groups = list(self.inner.param_groups)
        before = [{name: group[name] for name in settings} for group in groups]
        try:
            for group in groups:
                group.update(settings)
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def _settings(self) -> dict[str, Any]:
        """Return everything that the configuration says about the optimizer and its schedule."""
        return self._config.model_dump() | {"total_train_steps": self._total_steps}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule. The moments are in ``inner``."""
        return {"steps": self.steps, "base_lr": self._base_lr, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Settings that the configuration has changed since then take effect, and are logged.

        The base learning rate is that of the state, which :meth:`set_lr` may have changed, unless the configuration has another ``lr`` now.
        """
        # States of earlier releases are without settings.
        saved, now = state.get("settings", {}), self._settings()
        changed = {name: (value, now[name]) for name, value in saved.items() if now.get(name, value) != value}
        if changed and rank_in_world() == 0:
            logger.warning(
                "the checkpoint was saved with other settings than this run has, whose own take effect: %s",
                ", ".join(f"{name} = {mine!r} (saved: {other!r})" for name, (other, mine) in changed.items()),
            )
        self.steps = int(state["steps"])
        self._base_lr = self._config.lr if "lr" in changed else float(state["base_lr"])


def global_norm(parameters: Sequence[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the L2 norm of all gradients over all ranks, a scalar that is equal on every rank.

    Each element counts once.

    Squares are summed in float64, so that the norm does not depend on the sharding.

    Args:
        parameters: parameters of this rank, without those that another pipeline stage counts.
        stages: process group of the pipeline, or ``None``.
    """
    # Parameters that are sharded over the same groups share one all-reduce.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_groups[_shard_groups(parameter.grad)].append(local_part(parameter.grad))
    device = collective_device(parameters[0])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, grads in by_groups.items():
        # With CPU offload, gradients are on the host, but collectives need the device.
        squares = sum_of_squares(grads, grads[0].device).to(device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    # Stages have different parameters: add their squares.
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def scale(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in place."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, factor)


def _shard_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a gradient's elements are divided.

    Replicas are left out, so that they do not count twice.
    """
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
