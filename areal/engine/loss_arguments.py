"""Loss arguments of a verb: a loss function or an objective, and an error for outputs that the loss reads but the call did not name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from areal.api.batch import TokenOutputs
from areal.api.engine import Outputs, default_loss_weight
from areal.api.loss import LossFn, LossObjective, LossWeightFn, Normalization

_FIELDS = tuple(field.name for field in fields(TokenOutputs))


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


class ReadOutputs(TokenOutputs):
    """Token outputs that record which missing outputs are read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in _FIELDS:
            self.missing().append(name)
        return value

    def missing(self) -> list[str]:
        """Return the names of the missing outputs that were read, in order."""
        # In the instance's dict, because the dataclass is frozen.
        return vars(self).setdefault("_missing", [])


@contextmanager
def naming_missing_outputs(outputs: ReadOutputs) -> Iterator[None]:
    """Convert an error of arithmetic with a missing output inside to one that names the output.

    Raises:
        ValueError: the loss computed with an output that the call did not name.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error) or not outputs.missing():
            raise
        # Named as the caller writes them: a TopK for "topk".
        read = outputs.missing()
        names = [name for name in _FIELDS if vars(outputs)[name] is not None or name in read]
        written = ", ".join("TopK(k)" if name == "topk" else repr(name) for name in names)
        raise ValueError(
            f"loss_fn read the output {read[-1]!r}, which this call does not compute: pass outputs=({written})"
        ) from error
