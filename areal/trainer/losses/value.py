"""The value loss of a critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.trainer.losses.aggregate import Aggregation, TokenMean
from areal.trainer.losses.inputs import refuse, required_like, required_output
from areal.trainer.losses.masked import at_trained, token_mean
from areal.trainer.losses.objective import Objective


class ValueLoss(NamedTuple):
    """A per-token loss ``[T]``, and bool ``[T]``: True where the clip determined the loss."""

    per_token: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor, returns: Tensor, mask: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> ValueLoss:
    """Return ``max((v - R)**2, (clip(v, v_old - clip, v_old + clip) - R)**2) / 2``; without ``clip``, ``(v - R)**2 / 2``.

    From the code of PPO (Schulman et al., 2017): the value moves at most ``clip`` away from its old value. 0 where the mask is 0.

    Args:
        values, returns, mask, old_values: ``[T]``; only ``values`` have a gradient.
        clip: at least 0, in the unit of the values. Needs ``old_values``.

    Raises:
        ValueError: ``clip`` without ``old_values``.
    """
    # Filled with 0 before the difference: values outside the mask may be NaN.
    v, target = at_trained(values, mask), at_trained(returns.detach(), mask)
    plain = (v - target).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    if old_values is None:
        raise ValueError(f"clip = {clip} needs old_values, the values before the update: pass them, or clip=None")
    # The larger error counts: moving further than the clip brings no gain.
    old = at_trained(old_values.detach(), mask)
    clipped = (old + (v - old).clamp(-clip, clip) - target).square()
    return ValueLoss(0.5 * torch.maximum(plain, clipped), clipped.detach() > plain.detach())


def value_objective(aggregation: Aggregation | None = None, *, clip: float | None = 0.2) -> Objective:
    """Return the regression of the output ``values`` on ``returns``, clipped around ``old_values`` unless ``clip`` is ``None``.

    Metrics are means over trained tokens: ``value/value``, ``value/return``, ``value/squared_error``, ``value/squared_return`` (the explained
    variance is ``1 - squared_error / (squared_return - return**2)``) and ``value/clipped``.

    Args:
        aggregation: default :class:`TokenMean`.
        clip: at least 0, in the unit of the values.

    Raises:
        ValueError: ``clip`` is out of range. When called: the batch lacks ``loss_mask``, ``returns`` or ``old_values``.
    """
    if clip is not None and not clip >= 0:
        refuse("clip", clip, "give a number of at least 0, or None for no clip")
    aggregate = aggregation or TokenMean()

    def loss_fn(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        values = required_output(outputs, "values")
        mask, returns = required_like(batch, "loss_mask", values), required_like(batch, "returns", values)
        old = None if clip is None else required_like(batch, "old_values", values)
        loss = value_loss(values, returns, mask, old_values=old, clip=clip)
        # With these means the explained variance of the global batch can be computed afterwards.
        target = at_trained(returns, mask)
        metrics = {
            "value/value": token_mean(values, mask),
            "value/return": token_mean(target, mask),
            "value/squared_return": token_mean(target.square(), mask),
            "value/squared_error": token_mean((at_trained(values, mask) - target).square(), mask),
            "value/clipped": token_mean(loss.clipped, mask),
        }
        return aggregate.total(loss.per_token, batch), metrics

    return Objective(loss_fn, aggregate.weight, ("values",))
