"""The optimizer of the JAX engine: optax behind the interface of torch's optimizers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax import Array

from areal.api.sections.optimizer import MuonConfig, OptimizerConfig
from areal.engine.jax.model.spec import ModelSpec, Params
from areal.engine.jax.model_arrays import ModelState, consuming
from areal.engine.jax.muon import has_matrices, muon_updates

Moments = Mapping[str, Params]
"""Arrays of the optimizer by kind, each by name of the parameter."""

_ADAMW = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)


@dataclass(frozen=True)
class Rule:
    """How parameters are updated. Hashable: the step is compiled once for each.

    Attributes:
        type: ``"adamw"``, ``"sgd"`` or ``"muon"``.
        muon: settings of Muon.
    """

    type: str
    muon: MuonConfig

    def orthogonalises(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether an array consists of matrices that Muon updates."""
        return self.type == "muon" and has_matrices(name, shape)


class OptaxOptimizer:
    """AdamW (Loshchilov and Hutter, 2019) or SGD of optax, with the formulas of torch; or Muon for matrices, and AdamW for the others.

    Args:
        model: the parameters, and their gradients.
        config: type and settings.

    Attributes:
        param_groups: the settings of the next step, as in torch; one group.
        moments: arrays of the optimizer by kind, each by name of the parameter. Empty before the first step.
        counts: steps of each parameter so far.
        kinds: moments of each parameter, by name.
    """

    def __init__(self, model: ModelState, config: OptimizerConfig) -> None:
        self._model, self._rule = model, Rule(config.type, config.muon)
        settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.type != "sgd":
            settings |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
        else:
            settings["momentum"] = config.momentum
        self.param_groups = [settings]
        self.moments: dict[str, dict[str, Array]] = {}
        self.counts = dict.fromkeys(model.arrays, 0)
        self.kinds = {name: self._kinds_of(name) for name in model.arrays}

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
            numbers = np.array(list(settings.values()), model.spec.numbers.updates)
            counts = np.array([self.counts[name] for name in sorted(params)], np.int32)
            before = moments or self._zeros()
            # Donated: the results take the memory of parameters and moments, so that no other reference may exist.
            model.params, model.grads, self.moments = {}, None, {}
            model.params, self.moments = jax.block_until_ready(
                _update(model.spec, self._rule, tuple(settings), params, grads, before, counts, numbers)
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
        return {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}[self._rule.type]

    def counted(self, name: str) -> bool:
        """Return whether the formula of a parameter needs the number of steps."""
        return self.kinds[name] == _ADAMW

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of the parameters that have each kind of moment."""
        kinds = sorted({kind for own in self.kinds.values() for kind in own})
        return {kind: [name for name, own in self.kinds.items() if kind in own] for kind in kinds}

    def _kinds_of(self, name: str) -> tuple[str, ...]:
        if self._rule.orthogonalises(name, self._model.arrays[name].shape):
            return _MOMENTUM
        if self._rule.type != "sgd":
            return _ADAMW
        return _MOMENTUM if self.param_groups[0]["momentum"] else ()

    def _zeros(self) -> dict[str, dict[str, Array]]:
        return {kind: self._model.zeros(names) for kind, names in self.names.items()}


def scalars(group: dict[str, Any]) -> dict[str, float]:
    """Return the settings of a step by name, each a number: the values that the update takes."""
    betas = group.get("betas")
    numbers = {name: value for name, value in group.items() if name != "betas"}
    return numbers if betas is None else {**numbers, "beta1": betas[0], "beta2": betas[1]}


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 5))
def _update(
    spec: ModelSpec,
    rule: Rule,
    settings: tuple[str, ...],
    params: Params,
    grads: Params,
    moments: Moments,
    counts: Array,
    values: Array,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return parameters and moments after a step.

    Args:
        spec: the model.
        rule: how parameters are updated.
        settings: names of ``values``.
        params, grads: by name.
        moments: by kind and name. Empty before the first step of SGD without momentum.
        counts: [P] int32. Steps of each parameter so far, in the order of sorted names.
        values: [S], at least float32. Settings of the optimizer.
    """
    numbers = dict(zip(settings, values, strict=True))
    steps = dict(zip(sorted(params), counts, strict=True))
    # As in torch, arrays in 16 bits are updated in float32, and rounded once.
    params, grads, moments = jax.tree.map(lambda x: x.astype(values.dtype), (params, grads, moments))
    if rule.type == "sgd":
        updates, new = _sgd(numbers, params, grads, moments)
    else:
        matrices = {name: x for name, x in grads.items() if rule.orthogonalises(name, x.shape)}
        others = {name: x for name, x in grads.items() if name not in matrices}
        updates, new = _adamw(numbers, others, moments, steps)
        if matrices:
            orthogonal, new["momentum_buffer"] = _muon(spec, rule.muon, matrices, moments["momentum_buffer"])
            updates |= orthogonal
        updates = {name: update + numbers["weight_decay"] * params[name] for name, update in updates.items()}
    stepped = {name: _stored(spec, name, x - numbers["lr"] * updates[name]) for name, x in params.items()}
    return stepped, {kind: {name: _stored(spec, name, x) for name, x in own.items()} for kind, own in new.items()}


def _stored(spec: ModelSpec, name: str, value: Array) -> Array:
    return spec.place(name, value.astype(spec.numbers.master))


def _adamw(
    numbers: Params, grads: Params, moments: Moments, steps: Params
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return updates without weight decay, and the new moments."""
    rule = optax.scale_by_adam(numbers["beta1"], numbers["beta2"], numbers["eps"])
    updates: dict[str, Array] = {}
    new: dict[str, dict[str, Array]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, grad in grads.items():
        state = optax.ScaleByAdamState(steps[name], moments["exp_avg"][name], moments["exp_avg_sq"][name])
        updates[name], state = rule.update(grad, state)
        new["exp_avg"][name], new["exp_avg_sq"][name] = state.mu, state.nu
    return updates, new


def _sgd(
    numbers: Params, params: Params, grads: Params, moments: Moments
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return updates, and the new momenta."""
    updates = {name: grad + numbers["weight_decay"] * params[name] for name, grad in grads.items()}
    if not moments:
        return updates, {}
    rule = optax.trace(numbers["momentum"])
    updates, state = rule.update(updates, optax.TraceState(moments["momentum_buffer"]), params)
    return updates, {"momentum_buffer": state.trace}


def _muon(
    spec: ModelSpec, config: MuonConfig, grads: Params, momenta: Params
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return updates of matrices without weight decay, and the new momenta."""
    beta = config.momentum
    new = {name: beta * momenta[name] + (1 - beta) * grad for name, grad in grads.items()}
    directions = {name: (1 - beta) * grads[name] + beta * x for name, x in new.items()} if config.nesterov else new
    placed = {name: spec.place(name, x) for name, x in directions.items()}
    return muon_updates(spec, placed, config), new
