"""Low-rank update of an output head, applied to its logits without a copy of its weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadUpdate(NamedTuple):
    """The update ``scale * up @ down`` of a head's weight ``[V, H]``.

    Attributes:
        down: ``[r, H]``. Equal on all ranks of a sharded vocabulary.
        up: ``[V, r]``, or this rank's rows ``[V_r, r]``.
        scale: factor of the product.
    """

    down: Tensor
    up: Tensor
    scale: float

    def project(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``scale * hidden @ down.T`` ``[T, r]``, multiplied in ``dtype``."""
        return F.linear(hidden.to(dtype), self.down.to(dtype)) * self.scale


def check_update(update: HeadUpdate, weight: Tensor) -> None:
    """Check the shapes of an update.

    Raises:
        ValueError: a shape is not that of the weight's update.
    """
    down, up = update.down.shape, update.up.shape
    if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != tuple(weight.shape) or up[1] != down[0]:
        raise ValueError(
            f"update has down {list(down)} and up {list(up)}, and weight is {list(weight.shape)}: pass [r, H] and [V, r], with as many rows "
            "as the weight has on this rank"
        )
