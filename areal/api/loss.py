"""Types of the functions that a caller passes to an engine: loss, loss weight, process function.

A loss function returns the **sum** over a micro-batch. The engine divides by the global weight (the loss weights summed over all micro-batches
and data-parallel ranks). Gradients are summed over ranks. User code does no other scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from areal.api.batch import Batch, Metric, OutputName, TokenOutputs
from areal.api.microbatch import MicroBatch

LossTerms = Tensor | dict[str, Tensor]
"""A scalar tensor, or a dict of scalar tensors, one per term of the loss."""

LossFn = Callable[[TokenOutputs, Batch], LossTerms | tuple[LossTerms, dict[str, Metric]]]
"""Returns the sum of the loss over a micro-batch, and optionally metrics.

A dict of scalars is a loss with several terms, each divided by the global weight of the same name. The function is called once per micro-batch
whose weight is not 0, with tensors on the engine's device.
"""

LossWeightFn = Callable[[Batch], LossTerms]
"""Returns the weight of a micro-batch, the summand of the denominator: a scalar of at least 0, or a dict with the keys of the loss."""

ProcessOutputFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor | None, Any]]
"""Returns ``(loss, result)`` for a micro-batch.

``loss`` is a scalar whose gradient is accumulated unchanged (the caller divides by the global weight), or ``None`` for no gradient.
``result`` is any value, returned to the caller.
"""

Normalization = Literal["weight", "sum"] | float
"""Denominator of the summed loss: the global weight (``"weight"``), 1 (``"sum"``), or a positive number."""


@runtime_checkable
class LossObjective(Protocol):
    """A loss function with its weight function and outputs. A verb takes it in place of the loss function.

    :class:`areal.trainer.losses.Objective` is one. A loss function with a true attribute ``needs_weight_fn`` belongs to such an object; a
    verb refuses it without a weight function.
    """

    @property
    def loss_fn(self) -> LossFn:
        """Returns the sum of the loss over a micro-batch."""

    @property
    def weight_fn(self) -> LossWeightFn:
        """Returns the weight of a micro-batch, the denominator of ``loss_fn``."""

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """Per-token outputs that ``loss_fn`` reads."""
