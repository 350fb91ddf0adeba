"""Updates of weight matrices by Muon, whatever part of them a rank has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.sections.optimizer import MuonConfig
from areal.engine.torch.muon.matrices import WHOLE, Matrices
from areal.engine.torch.muon.newton_schulz import orthogonalised, update_scale
from areal.engine.torch.muon.whole_matrices import Matrix, Part, WholeMatrices
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import empty_like, local_part

PartsOf = Callable[[Tensor], Iterable[tuple[Part, Tensor]]]
"""Of a tensor with the layout of a shard: parts of matrices, and their values as views. Together they are the tensor."""

_MOMENTUM = "momentum_buffer"


class MatrixUpdates:
    """Orthogonalised momentum (Jordan et al., 2024), beside an optimizer that updates the other parameters.

    Of a matrix with gradient ``G``: the momentum is ``M = beta M + (1 - beta) G``, and the update orthogonalises ``M``, or
    ``beta M + (1 - beta) G`` with Nesterov's momentum. Weight decay is that of AdamW. Momenta are in the state of the optimizers. Each matrix
    is gathered on one of the ranks that have parts of it, which computes its update. Constructing one is collective.

    Args:
        shards: parameters of optimizers, plain or distributed tensors, and the parts of matrices that each consists of on this rank.
        config: settings.
        control: control plane over all ranks.
        group: process group of the same ranks; ``None`` if there is one.
        like: tensor in the dtype of the parameters, on the device of collectives.
        kinds: matrices of a parameter, by its name. Default: one.
    """

    def __init__(
        self,
        shards: Mapping[Tensor, PartsOf],
        config: MuonConfig,
        control: ControlPlane,
        group: dist.ProcessGroup | None,
        like: Tensor,
        kinds: Mapping[str, Matrices] | None = None,
    ) -> None:
        self._shards, self._config, self._kinds = shards, config, kinds or {}
        parts = [part for x, parts_of in shards.items() for part, _ in parts_of(local_part(x.detach()))]
        self._whole = WholeMatrices(parts, control, group, like)

    def start(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Create the momenta, which are zero, in the state of the optimizers."""
        for optimizer, _, x in self._updated_by(optimizers):
            self._momentum(optimizer, x)

    @torch.no_grad()
    def step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Update the matrices, and release their gradients: for the optimizers, there is nothing to update. Collective."""
        groups, directions = {}, {}
        for optimizer, group, x in self._updated_by(optimizers):
            groups[x], directions[x] = group, self._direction(x, self._momentum(optimizer, x))
        parts = [values for x, parts_of in self._shards.items() for _, values in parts_of(directions[x])]
        self._whole.replace(parts, self._updates)
        for x, update in directions.items():
            group = groups[x]
            local_part(x).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            x.grad = None

    def _updated_by(
        self, optimizers: Iterable[torch.optim.Optimizer]
    ) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
        """Yield the parameters with matrices, and the optimizer and the group that each belongs to."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                yield from ((optimizer, group, x) for x in group["params"] if x in self._shards)

    def _momentum(self, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        """Return this rank's shard of a momentum, which is zero before the first step."""
        state = optimizer.state[x]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = empty_like(x)
            local_part(state[_MOMENTUM]).zero_()
        return local_part(state[_MOMENTUM])

    def _direction(self, x: Tensor, momentum: Tensor) -> Tensor:
        """Advance the momentum, and return what is orthogonalised, of this rank's shard, in new memory."""
        beta = self._config.momentum
        # A parameter that no sample has reached has no gradient: all ranks gather it.
        gradient = torch.zeros_like(momentum) if x.grad is None else local_part(x.grad)
        momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(momentum, beta) if self._config.nesterov else momentum.clone()

    def _updates(self, whole: Mapping[Matrix, Tensor]) -> dict[Matrix, Tensor]:
        """Return the updates of whole parameters, or of one of a stack. Matrices of one shape are orthogonalised together."""
        split = {each: self._kinds.get(each[0], WHOLE).split(x) for each, x in whole.items()}
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrices in split.values():
            for x in matrices:
                by_shape[x.shape].append(x)
        made = {
            shape: iter(orthogonalised(torch.stack(some), self._config) * update_scale(shape, self._config))
            for shape, some in by_shape.items()
        }
        return {
            each: self._kinds.get(each[0], WHOLE).join([next(made[x.shape]) for x in matrices], whole[each])
            for each, matrices in split.items()
        }
