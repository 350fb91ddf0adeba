"""The arguments of a verb with a loss, checked and resolved: by an engine, and by the driver of a group before it sends anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal.api.engine import Outputs, default_loss_weight
from areal.api.loss import LossFn, LossObjective, LossWeightFn, Normalization
from areal.engine.loss_step import split_outputs


@dataclass(frozen=True)
class LossCall:
    """One call of a verb with a loss.

    Attributes:
        loss_fn, weight_fn: loss function and weight function, of the caller or of its objective.
        outputs: per-token outputs that the model computes: those that the loss reads, and those to return.
        returns: outputs to return with the loss.
        normalization: denominator of the loss.
        loss_weight: float. Factor of the loss.
    """

    loss_fn: LossFn
    weight_fn: LossWeightFn
    outputs: Outputs
    returns: Outputs
    normalization: Normalization
    loss_weight: float

    @classmethod
    def of(
        cls,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        outputs: Outputs | None = None,
        *,
        returns: Outputs = (),
        normalization: Normalization = "weight",
        loss_weight: float = 1.0,
    ) -> LossCall:
        """Check the arguments of :meth:`~areal.api.engine.TrainEngine.forward_backward`, with its defaults.

        Raises:
            ValueError: names the argument, the value and the way out.
        """
        _check_normalization(normalization, loss_weight)
        loss, weight_fn, read = resolve_loss(loss_fn, loss_weight_fn, outputs, normalization)
        return cls(loss, weight_fn, _with_returned(read, returns), returns, normalization, loss_weight)


def _check_normalization(normalization: Normalization, loss_weight: float) -> None:
    """Check the arguments that divide and scale a loss.

    Raises:
        ValueError: names the argument.
    """
    number = isinstance(normalization, int | float) and 0 < normalization < math.inf
    if normalization not in ("weight", "sum") and not number:
        raise ValueError(
            f"normalization = {normalization!r}: choose 'weight', 'sum', or a positive number to divide by"
        )
    if not math.isfinite(loss_weight):
        raise ValueError(f"loss_weight = {loss_weight}: it must be finite")


def resolve_loss(
    loss: LossFn | LossObjective,
    weight_fn: LossWeightFn | None,
    outputs: Outputs | None,
    normalization: Normalization = "weight",
) -> tuple[LossFn, LossWeightFn, Outputs]:
    """Return loss function, weight function and outputs of a call.

    Args:
        loss: loss function, or an objective.
        weight_fn: the caller's weight function; ``None`` if the call names none.
        outputs: the outputs that the caller named; ``None`` if the call names none.
        normalization: denominator of the loss. Only ``"weight"`` divides by the weights.

    Raises:
        ValueError: an objective with a second weight function or without one of its outputs; or the loss function of an objective without
            its weight function.
    """
    if isinstance(loss, LossObjective):
        if weight_fn is not None:
            raise ValueError(
                f"loss_weight_fn = {weight_fn!r} with an objective, which has a weight function: leave loss_weight_fn out, or pass "
                "objective.loss_fn with it"
            )
        missing = set(loss.outputs) - set(loss.outputs if outputs is None else outputs)
        if missing:
            raise ValueError(f"outputs = {outputs!r}: the objective reads {loss.outputs!r}: leave outputs out")
        return loss.loss_fn, loss.weight_fn, outputs or loss.outputs
    # The default weight is another denominator than the objective's: the loss would be wrong without an error.
    if weight_fn is None and normalization == "weight" and getattr(loss, "needs_weight_fn", False):
        raise ValueError(
            "loss_weight_fn is missing, and loss_fn belongs to an objective with a weight function of its own: pass the objective in "
            "place of loss_fn, or name the weight function"
        )
    return loss, weight_fn or default_loss_weight, ("logprobs",) if outputs is None else outputs


def _with_returned(outputs: Outputs, returns: Outputs) -> Outputs:
    """Return the outputs that a call computes: those that its loss reads, and those that it returns.

    Raises:
        ValueError: ``returns`` has an unknown output.
    """
    if returns:
        split_outputs(returns, "returns")
    return (*outputs, *(output for output in returns if output not in outputs))
