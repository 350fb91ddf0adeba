"""Types and defaults of the arguments that several verbs of an engine have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal.api.batch import Batch, OutputName

BatchInput = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A dict of right-padded tensors ``[B, S]`` with ``attention_mask``, or a list of per-sample dicts of ``[S_i]``."""

Outputs = tuple[OutputName, ...]
"""Names of the per-token outputs that the model computes in a call."""


def default_loss_weight(batch: Batch) -> Tensor:
    """Return the sum of ``loss_mask``, or the number of positions with a target if the batch lacks a mask.

    With ``target_ids`` ``[T, K]``, a position has a target if any of its ``K`` entries is one.
    """
    if "loss_mask" in batch:
        # In float64: it divides the loss, and rounding would depend on how the batch was cut.
        return batch["loss_mask"].sum(dtype=torch.float64)
    targets = batch["target_ids"] >= 0
    return (targets if targets.dim() == 1 else targets.any(-1)).sum()
