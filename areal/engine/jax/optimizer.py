"""The optimizer of the JAX engine: optax behind the interface of torch's optimizers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax import Array

from areal.api.config import OptimizerConfig
from areal.engine.jax.model.spec import ModelSpec, Params
from areal.engine.jax.model_arrays import ModelState, consuming


class OptaxOptimizer:
    """AdamW (Loshchilov and Hutter, 2019) or SGD of optax, with the formulas of torch.

    Args:
        model: the parameters, and their gradients.
        config: type and settings.

    Attributes:
        param_groups: the settings of the next step, as in torch; one group.
        moments: arrays of the optimizer by kind, each by name of the parameter. Empty before the first step.
        counts: steps of each parameter so far.
    """

    def __init__(self, model: ModelState, config: OptimizerConfig) -> None:
        self._model, self._type = model, config.type
        settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.type == "adamw":
            settings |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
        else:
            settings["momentum"] = config.momentum
        self.param_groups = [settings]
        self.moments: dict[str, dict[str, Array]] = {}
        self.counts = dict.fromkeys(model.arrays, 0)

    def step(self) -> None:
        """Update the parameters. Their gradients, and the arrays before the step, are released.

        Raises:
            StateLostError: the step failed, and has destroyed the parameters.
            RuntimeError: the step failed, and nothing was changed.
        """
        model, group = self._model, self.param_groups[0]
        grads, params, moments = model.require_grads(), model.params, self.moments

        def restore() -> None:
            model.params, model.grads, self.moments = params, grads, moments

        with model.spec.numbers.enabled(), consuming((params, moments), "weights and optimizer state", restore):
            # Two arrays, because each is a transfer to the device.
            settings = scalars(group)
            numbers = np.array(list(settings.values()), model.spec.numbers.master)
            counts = np.array([self.counts[name] for name in sorted(params)], np.int32)
            before = moments or self._zeros()
            # Donated: the results take the memory of parameters and moments, so that no other reference may exist.
            model.params, model.grads, self.moments = {}, None, {}
            model.params, self.moments = jax.block_until_ready(
                _update(model.spec, self._type, tuple(settings), params, grads, before, counts, numbers)
            )
        self.counts = {name: count + 1 for name, count in self.counts.items()}

    def set_moments(self, arrays: dict[str, Array]) -> None:
        """Replace all moments: arrays by kind and name, such as ``"exp_avg model.norm.weight"``; ``{}`` while they are in host memory."""
        self.moments = {}
        for key, value in arrays.items():
            kind, _, name = key.partition(" ")
            self.moments.setdefault(kind, {})[name] = value

    @property
    def torch_name(self) -> str:
        """Name of the class of torch with the same state."""
        return "AdamW" if self._type == "adamw" else "SGD"

    @property
    def counted(self) -> bool:
        """True if the formulas need the number of steps."""
        return self._type == "adamw"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments."""
        if self._type == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.param_groups[0]["momentum"] else ()

    def _zeros(self) -> dict[str, dict[str, Array]]:
        return {kind: self._model.zeros() for kind in self.kinds}


def scalars(group: dict[str, Any]) -> dict[str, float]:
    """Return the settings of a step by name, each a number: the values that the update takes."""
    betas = group.get("betas")
    numbers = {name: value for name, value in group.items() if name != "betas"}
    return numbers if betas is None else {**numbers, "beta1": betas[0], "beta2": betas[1]}


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 5))
def _update(
    spec: ModelSpec,
    kind: str,
    settings: tuple[str, ...],
    params: Params,
    grads: Params,
    moments: dict[str, dict[str, Array]],
    counts: Array,
    values: Array,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return parameters and moments after a step.

    Args:
        spec: the model.
        kind: ``"adamw"`` or ``"sgd"``.
        settings: names of ``values``.
        params, grads: by name.
        moments: by kind and name. Empty before the first step of SGD without momentum.
        counts: [P] int32. Steps of each parameter so far, in the order of sorted names.
        values: [S] in the dtype of the parameters. Settings of the optimizer.
    """
    numbers = dict(zip(settings, values, strict=True))
    if kind == "adamw":
        steps = dict(zip(sorted(params), counts, strict=True))
        rule = optax.scale_by_adam(numbers["beta1"], numbers["beta2"], numbers["eps"])
        updates: dict[str, Array] = {}
        new: dict[str, dict[str, Array]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, grad in grads.items():
            state = optax.ScaleByAdamState(steps[name], moments["exp_avg"][name], moments["exp_avg_sq"][name])
            updates[name], state = rule.update(grad, state)
            new["exp_avg"][name], new["exp_avg_sq"][name] = state.mu, state.nu
        updates = {name: update + numbers["weight_decay"] * params[name] for name, update in updates.items()}
    else:
        updates = {name: grad + numbers["weight_decay"] * params[name] for name, grad in grads.items()}
        new = {}
        if moments:
            rule = optax.trace(numbers["momentum"])
            updates, state = rule.update(updates, optax.TraceState(moments["momentum_buffer"]), params)
            new = {"momentum_buffer": state.trace}
    stepped = {name: spec.place(name, x - numbers["lr"] * updates[name]) for name, x in params.items()}
    return stepped, {kind: {name: spec.place(name, x) for name, x in values.items()} for kind, values in new.items()}
