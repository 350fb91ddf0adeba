"""Types of what a caller passes to an engine: loss, loss weight, process function.

A loss function returns the **sum** over a micro-batch. The engine divides by the global weight, the loss weights summed over all
micro-batches and data-parallel ranks; gradients are sums over ranks. Nothing else about scaling appears in user code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from areal.api.batch import Batch, Metric, TokenOutputs
from areal.api.microbatch import MicroBatch

LossTerms = Tensor | dict[str, Tensor]
"""A scalar sum, or one for each term."""

LossFn = Callable[[TokenOutputs, Batch], LossTerms | tuple[LossTerms, dict[str, Metric]]]
"""Sum over the micro-batch (scalar, or a dict of scalars: terms of different denominators), and perhaps metrics."""

LossWeightFn = Callable[[Batch], LossTerms]
"""What a micro-batch weighs: a scalar, or a dict with the same keys as the loss."""

ProcessOutputFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor | None, Any]]
"""(loss already divided by what it should be, or None; result). The template scales the loss for the engine's own machinery."""

Normalization = Literal["weight", "sum"] | float
"""Divide the summed loss by the global weight, by nothing, or by a positive number."""
