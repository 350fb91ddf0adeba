"""Detection of a loss function that is not a sum over the sequences of its micro-batch, such as a mean."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import Batch, TokenOutputs
from areal.api.loss import LossFn, LossTerms, LossWeightFn
from areal.engine.loss_step import as_terms

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-2
"""Allowed difference between a loss and the sum over its halves, relative to the halves: rounding in bfloat16 is below it."""

_ATTEMPTS = 8
"""Micro-batches after which a function is not probed again: they had one sequence each, or the function has failed on parts."""


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
            result = loss_fn(outputs, batch)
            if self._attempts[code] < _ATTEMPTS:
                self._attempts[code] += 1
                if self._probe(loss_fn, weight_fn, outputs, batch, result):
                    self._attempts[code] = _ATTEMPTS
            return result

        return watched

    @torch.no_grad()
    def _probe(
        self, loss_fn: LossFn, weight_fn: LossWeightFn, outputs: TokenOutputs, batch: Batch, result: Any
    ) -> bool:
        """Compare a result with those of the halves of its micro-batch. Returns whether that was possible."""
        # Whatever the user's functions raise on parts of a micro-batch must not end the step.
        try:
            halves = _halves(outputs, batch)
            # A loss may divide by its weight: it is never called without one.
            if not halves or not all(_has_weight(weight_fn(half)) for _, half in halves):
                return False
            parts = [_terms(loss_fn(*half)) for half in halves]
            whole = _terms(result)
            for name, value in whole.items():
                _compare(loss_fn, name, value, [part[name] for part in parts])
        except Exception as error:
            logger.debug("the loss function could not be probed: %s", error)
            return False
        return True


def _terms(result: Any) -> dict[str, float]:
    """Return the terms that a loss function returned, without its metrics."""
    terms: LossTerms = result[0] if isinstance(result, tuple) else result
    return {name: float(term) for name, term in as_terms(terms, "loss_fn").items()}


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


def _halves(outputs: TokenOutputs, batch: Batch) -> list[tuple[TokenOutputs, Batch]]:
    """Divide a micro-batch between two sequences. Empty if it has one sequence, or if per-token keys cannot be told from others."""
    n, middle = len(batch.cu_seqlens) - 1, (len(batch.cu_seqlens) - 1) // 2
    if n < 2:
        return []
    border, end = batch.cu_seqlens[[middle, n]].tolist()
    if end == n:
        return []
    return [
        (_sliced_outputs(outputs, slice(0, border)), _sliced_batch(batch, slice(0, middle), slice(0, border))),
        (_sliced_outputs(outputs, slice(border, end)), _sliced_batch(batch, slice(middle, n), slice(border, end))),
    ]


def _sliced_outputs(outputs: TokenOutputs, tokens: slice) -> TokenOutputs:
    fields = {name: value for name, value in vars(outputs).items() if name in TokenOutputs.__dataclass_fields__}
    return TokenOutputs(**pytree.tree_map_only(Tensor, lambda x: x.detach()[tokens], fields))


def _sliced_batch(batch: Batch, sequences: slice, tokens: slice) -> Batch:
    cu_seqlens, total = batch.cu_seqlens, int(batch.cu_seqlens[-1])

    def part(value: Tensor | list[Tensor]) -> Any:
        return value[tokens] if isinstance(value, Tensor) and len(value) == total else value[sequences]

    values = {key: part(value) for key, value in batch.items() if key not in ("cu_seqlens", "meta")}
    own = cu_seqlens[sequences.start : sequences.stop + 1] - cu_seqlens[sequences.start]
    return Batch(values, own, batch.meta)
