"""Muon for the matrices of a model and AdamW for its other parameters, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from areal.api.config import OptimizerConfig
from areal.engine.optimizer import adamw_settings
from areal.engine.torch.muon.matrices import Matrices
from areal.engine.torch.muon.newton_schulz import orthogonalised, update_scale
from areal.engine.torch.muon.whole_matrices import WholeMatrices
from areal.utils.dtensor import empty_like, local_part


class Muon(torch.optim.AdamW):
    """Orthogonalised momentum for matrices (Jordan et al., 2024), and AdamW (Loshchilov and Hutter, 2019) for the other parameters.

    Of a matrix with gradient ``G``: the momentum is ``M = beta M + (1 - beta) G``, and the update orthogonalises ``M``, or
    ``beta M + (1 - beta) G`` with Nesterov's momentum. Weight decay is that of AdamW. Each matrix is gathered on one rank of those that share
    it, which computes its update. A step is collective.

    Args:
        named: names and parameters, plain or distributed tensors. Ranks that share a parameter have the same ones, in the same order.
        matrices: those that are matrices, by name.
        config: settings.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], matrices: Mapping[str, Matrices], config: OptimizerConfig
    ) -> None:
        self._config = config.muon
        kinds = [(parameter, matrices.get(name)) for name, parameter in named]
        self._kinds = [kind for _, kind in kinds if kind is not None]
        groups: list[dict[str, Any]] = [
            {
                "params": [parameter for parameter, kind in kinds if kind is not None],
                "momentum": config.muon.momentum,
            },
            {"params": [parameter for parameter, kind in kinds if kind is None]},
        ]
        super().__init__(
            groups,
            **adamw_settings(config),
            fused=True,
        )

    @cached_property
    def _whole(self) -> WholeMatrices:
        return WholeMatrices(self.param_groups[0]["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # That of AdamW expects its own state for every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter. Collective."""
        matrices, others = groups = self.param_groups
        # AdamW updates the groups that it has.
        self.param_groups = [others]
        try:
            super().step()
        finally:
            self.param_groups = groups
        self._step_matrices(matrices)

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        parameters: list[nn.Parameter] = group["params"]
        updates = self._whole.apply([self._direction(parameter) for parameter in parameters], self._update)
        for parameter, update in zip(parameters, updates, strict=True):
            weight = local_part(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Advance the momentum, and return what is orthogonalised, of this rank's shard."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = empty_like(parameter)
            local_part(state["momentum_buffer"]).zero_()
        momentum, beta = local_part(state["momentum_buffer"]), self._config.momentum
        # A parameter that no sample has reached has no gradient: all ranks gather it.
        gradient = torch.zeros_like(momentum) if parameter.grad is None else local_part(parameter.grad)
        momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(momentum, beta) if self._config.nesterov else momentum

    def _update(self, number: int, whole: Tensor) -> Tensor:
        """Return the update of a whole parameter."""
        kind = self._kinds[number]
        made = [orthogonalised(x, self._config) * update_scale(x, self._config) for x in kind.split(whole)]
        return kind.join(made, whole)
