"""Muon for the matrices of a model and AdamW for its other parameters, sharded or not."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.optimizer import adamw_settings
from areal.engine.torch.muon.matrices import Matrices
from areal.engine.torch.muon.updates import MatrixUpdates, PartsOf
from areal.engine.torch.muon.whole_matrices import Part, part_of
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box, collective_device, local_shard


class Muon(torch.optim.AdamW):
    """Orthogonalised momentum for matrices, and AdamW (Loshchilov and Hutter, 2019) for the other parameters.

    See :class:`~areal.engine.torch.muon.updates.MatrixUpdates`. A step is collective.

    Args:
        named: names and parameters, plain or distributed tensors.
        matrices: those that are matrices, by name.
        config: settings.
        control: control plane over all ranks.
        group: process group of the same ranks; ``None`` if there is one.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        matrices: Mapping[str, Matrices],
        config: OptimizerConfig,
        control: ControlPlane,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__([parameter for _, parameter in named], **adamw_settings(config), fused=True)
        shards: dict[Tensor, PartsOf] = {
            parameter: functools.partial(matrix_parts, name, local_shard(parameter)[1])
            for name, parameter in named
            if name in matrices
        }
        first = named[0][1]
        like = torch.empty(0, dtype=first.dtype, device=collective_device(first))
        self._matrices = MatrixUpdates(shards, config.muon, control, group, like, matrices)
        self._matrices.start([self])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # That of AdamW expects its own state for every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter. Collective."""
        self.update_matrices()
        super().step()

    def update_matrices(self) -> None:
        """Update the matrices only, and release their gradients. Collective."""
        self._matrices.step([self])


def matrix_parts(name: str, box: Box, x: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Yield the parts of matrices in a shard ``x`` that is ``box`` of a parameter ``[rows, columns]``, or ``[matrices, rows, columns]``."""
    if not x.numel():
        return
    if len(box) == 2:
        yield part_of(name, 0, box), x
        return
    for place, values in enumerate(x, box[0].start):
        yield part_of(name, place, box[1:]), values
