"""Parts of matrices that the ranks of a plan have, which Muon exchanges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from areal.engine.torch.muon.optimizer import matrix_parts
from areal.engine.torch.muon.whole_matrices import Part
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box, shard_box


class PartsOfRanks(ControlPlane):
    """Control plane for :class:`~areal.engine.torch.muon.whole_matrices.WholeMatrices` in a plan, where only one rank exists.

    The parts of the other ranks follow from the sharding of the matrices. Ranks of other pipeline stages have other matrices.

    Args:
        matrices: names and parameters of this rank, plain or distributed tensors.
        stages: number of pipeline ranks.
    """

    def __init__(self, matrices: Iterable[tuple[str, Tensor]], stages: int) -> None:
        super().__init__()
        self._matrices, self._stages = list(matrices), stages

    def gather(self, value: Any) -> list[Any]:
        """Return the parts of every rank, by rank.

        Args:
            value: this rank's parts.

        Raises:
            RuntimeError: they differ from those of its sharding.
        """
        # Pipeline ranks vary slowest.
        ranks = self.size // self._stages
        first = self.rank // ranks * ranks
        found: list[list[Part]] = [[] for _ in range(self.size)]
        boxes: dict[Any, list[Box]] = {}
        for name, parameter in self._matrices:
            # Layers are alike: most matrices are sharded as another one.
            sharding = parameter.shape, getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
            if sharding not in boxes:
                boxes[sharding] = [shard_box(parameter, rank) for rank in range(first, first + ranks)]
            for rank, box in enumerate(boxes[sharding], first):
                found[rank] += _parts(name, box)
        if found[self.rank] != value:
            raise RuntimeError(f"rank {self.rank}: the parts of its matrices are not those of their sharding")
        return found


def _parts(name: str, box: Box) -> list[Part]:
    shard = torch.empty([each.stop - each.start for each in box], device="meta")
    return [part for part, _ in matrix_parts(name, box, shard)]
