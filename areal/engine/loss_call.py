"""The arguments of a verb with a loss, checked and resolved: by an engine, and by the driver of a group before it sends anything.

Also the detection of a loss function that is not a sum over the sequences of its micro-batch, such as a mean.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import Batch, TokenOutputs
from areal.api.engine import Outputs, default_loss_weight
from areal.api.loss import LossFn, LossObjective, LossTerms, LossWeightFn, Normalization
from areal.api.sections.microbatch import MicroBatchSpec
from areal.engine.loss_step import as_terms, split_outputs

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-2
"""Allowed difference between a loss and the sum over its halves, relative to the halves: rounding in bfloat16 is below it."""

_ATTEMPTS = 8
"""Micro-batches after which a function is not probed again: they had one sequence each, or the function has failed on parts."""


@dataclass(frozen=True)
class LossCall:
    """One call of a verb with a loss.

    Attributes:
        loss_fn, weight_fn: loss function and weight function, of the caller or of its objective.
        outputs: per-token outputs that the model computes: those that the loss reads, and those to return.
        returns: outputs to return with the loss.
        normalization: denominator of the loss.
        loss_weight: float. Factor of the loss.
        mb_spec: rules of the cut into micro-batches; ``None`` for those of the configuration.
    """

    loss_fn: LossFn
    weight_fn: LossWeightFn
    outputs: Outputs
    returns: Outputs
    normalization: Normalization
    loss_weight: float
    mb_spec: MicroBatchSpec | None = None

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
        mb_spec: MicroBatchSpec | None = None,
    ) -> LossCall:
        """Check the arguments of :meth:`~areal.api.engine.TrainEngine.forward_backward`, with its defaults.

        Raises:
            ValueError: names the argument, the value and the way out.
        """
        _check_normalization(normalization, loss_weight)
        loss, weight_fn, read = resolve_loss(loss_fn, loss_weight_fn, outputs, normalization)
        return cls(loss, weight_fn, _with_returned(read, returns), returns, normalization, loss_weight, mb_spec)


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


class AdditivityProbe:
    """Compares the loss of one micro-batch with the sum over its halves, once for each loss function, and warns of a difference.

    An engine divides the sum of all micro-batches by the weight of the global batch. A mean would give a gradient that depends on how the
    batch was cut, and is too small by the number of tokens. Losses of objectives are not probed: their weight functions show that they are
    sums.
    """

    def __init__(self) -> None:
        self._attempts: Counter[Any] = Counter()  # by the code of the function

    def watching(self, loss_fn: LossFn, weight_fn: LossWeightFn) -> LossFn:
        """Return a loss function with the same values, which probes ``loss_fn`` if that is still to be done."""
        # A function that is defined anew in each step has the same code.
        plain: Any = loss_fn
        while isinstance(plain, functools.partial):
            plain = plain.func
        code = getattr(plain, "__code__", type(plain))
        if getattr(loss_fn, "needs_weight_fn", False) or self._attempts[code] >= _ATTEMPTS:
            return loss_fn

        @functools.wraps(plain, updated=())
        def watched(outputs: TokenOutputs, batch: Batch) -> Any:
            if self._attempts[code] >= _ATTEMPTS:
                return loss_fn(outputs, batch)
            self._attempts[code] += 1
            # Before the call, which may change outputs and batch in place.
            parts = _terms_of_halves(loss_fn, weight_fn, outputs, batch)
            result = loss_fn(outputs, batch)
            if parts and _compared(loss_fn, result, parts):
                self._attempts[code] = _ATTEMPTS
            return result

        return watched


@torch.no_grad()
def _terms_of_halves(
    loss_fn: LossFn, weight_fn: LossWeightFn, outputs: TokenOutputs, batch: Batch
) -> list[dict[str, float]]:
    """Return the terms of the halves of a micro-batch; empty if they cannot be computed."""
    device = batch.cu_seqlens.device
    # Whatever the user's functions raise on parts of a micro-batch must not end the step.
    try:
        # Only one rank probes: its next random numbers must be those of the ranks that compute the same loss.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            halves = _halves(batch)
            # A loss may divide by its weight: it is never called without one.
            if not all(_has_weight(weight_fn(half)) for _, half in halves):
                return []
            return [_terms(loss_fn(_copied_outputs(outputs, tokens), half)) for tokens, half in halves]
    except Exception as error:
        logger.debug("the loss function could not be probed: %s", error)
        return []


def _compared(loss_fn: LossFn, result: Any, parts: list[dict[str, float]]) -> bool:
    """Compare a result with the terms of the halves of its micro-batch. Returns whether that was possible."""
    try:
        for name, value in _terms(result).items():
            _compare(loss_fn, name, value, [part[name] for part in parts])
    except Exception as error:
        logger.debug("the loss function could not be probed: %s", error)
        return False
    return True


def _terms(result: Any) -> dict[str, float]:
    """Return the terms that a loss function returned, without its metrics."""
    terms: LossTerms = result[0] if isinstance(result, tuple) else result
    return {name: float(term.detach()) for name, term in as_terms(terms, "loss_fn").items()}


def _has_weight(weights: Any) -> bool:
    return all(float(weight) > 0 for weight in as_terms(weights, "loss_weight_fn").values())


def _compare(loss_fn: LossFn, name: str, whole: float, parts: list[float]) -> None:
    """Warn if the value of a term is not the sum of its parts."""
    if abs(sum(parts) - whole) <= _TOLERANCE * sum(map(abs, parts)):
        return
    kind = " It is probably a mean." if min(parts) <= whole <= max(parts) else ""
    logger.warning(
        "%s returned %.6g (term %r) for a micro-batch, and %s for its two halves, whose sum is %.6g: the gradient will depend on how the batch "
        "is cut.%s Return the sum over the micro-batch; the engine divides by the weight of the whole batch (loss_weight_fn)",
        getattr(loss_fn, "__qualname__", repr(loss_fn)),
        whole,
        name,
        " and ".join(f"{part:.6g}" for part in parts),
        sum(parts),
        kind,
    )


def _halves(batch: Batch) -> list[tuple[slice, Batch]]:
    """Divide a micro-batch between two sequences. Returns the tokens of each half, and a copy of it.

    Empty if the micro-batch has one sequence, or if per-token keys cannot be told from others.
    """
    n, middle = len(batch.cu_seqlens) - 1, (len(batch.cu_seqlens) - 1) // 2
    if n < 2:
        return []
    border, end = batch.cu_seqlens[[middle, n]].tolist()
    if end == n:
        return []
    return [
        (tokens, _copied_batch(batch, sequences, tokens))
        for sequences, tokens in ((slice(0, middle), slice(0, border)), (slice(middle, n), slice(border, end)))
    ]


def _copied_outputs(outputs: TokenOutputs, tokens: slice) -> TokenOutputs:
    fields = {name: value for name, value in vars(outputs).items() if name in TokenOutputs.__dataclass_fields__}
    return TokenOutputs(**pytree.tree_map_only(Tensor, lambda x: x.detach()[tokens].clone(), fields))


def _copied_batch(batch: Batch, sequences: slice, tokens: slice) -> Batch:
    cu_seqlens, total = batch.cu_seqlens, int(batch.cu_seqlens[-1])

    def part(value: Tensor | list[Tensor]) -> Any:
        return value[tokens] if isinstance(value, Tensor) and len(value) == total else value[sequences]

    values = {key: part(value) for key, value in batch.items() if key not in ("cu_seqlens", "meta")}
    values = pytree.tree_map_only(Tensor, Tensor.clone, values)
    own = cu_seqlens[sequences.start : sequences.stop + 1] - cu_seqlens[sequences.start]
    return Batch(values, own, batch.meta)
