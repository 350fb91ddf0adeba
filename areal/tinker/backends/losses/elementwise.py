"""The loss of each target, of which a loss function returns the sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from areal.api import Batch, TokenOutputs
from areal.tinker.backends.losses.loss_table import make_loss
from areal.tinker.backends.prepared import Datum, Scalar

NOT_LINEAR = frozenset({"dro"})
"""Losses with a term that neither weights nor advantages multiply."""


def elementwise_loss(name: str, config: Mapping[str, Scalar], datum: Datum, logprobs: np.ndarray) -> np.ndarray | None:
    """Return the loss of each target of a sample, of the shape of ``logprobs``.

    The loss of a target is linear in its weight or, on each side of 0, in its advantage: it is the product with the derivative.

    Args:
        name: loss of the protocol.
        config: its configuration.
        datum: sample.
        logprobs: float32 ``[T]`` or ``[T, K]``. Log-probs of the targets of the sample.

    Returns:
        float32 array, or ``None`` for a loss in :data:`NOT_LINEAR`.
    """
    if name in NOT_LINEAR:
        return None
    values: dict[str, Tensor] = {key: torch.tensor(array) for key, array in datum.values.items()}
    if "advantages" not in values:
        values.setdefault("weights", torch.ones(logprobs.shape))
    factor = values["advantages" if "advantages" in values else "weights"].requires_grad_()
    offsets = torch.tensor([0, len(logprobs)], dtype=torch.int32)
    batch = Batch({**values, "target_ids": torch.tensor(datum.target_ids)}, offsets)
    total, _ = make_loss(name, config)(TokenOutputs(logprobs=torch.tensor(logprobs)), batch)
    (derivative,) = torch.autograd.grad(total, factor)
    return (factor * derivative).detach().numpy()
