"""What goes into a loss and what comes out of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

IGNORE_INDEX = -100
"""The value of ``target_ids`` where a position has no target: its log-prob is exactly 0.0 and its weight 0."""


class Batch(Mapping[str, Any]):
    """A packed micro-batch, as a loss function sees it. Read-only.

    Per-token keys are ``[T, ...]``, per-sequence keys ``[n, ...]``, payloads lists of ``n`` tensors; all sequences stand end to end, unpadded.
    ``batch["target_ids"]`` (int64 ``[T]`` or ``[T, K]``) is always there, with ``IGNORE_INDEX`` where a position has no target.

    Attributes:
        cu_seqlens: int32 ``[n + 1]``, where each sequence starts in ``T``; also under the key ``cu_seqlens``.
        meta: what was not a tensor in the caller's batch, as it was; also under the key ``meta``.
    """

    __slots__ = ("_values", "cu_seqlens", "meta")

    def __init__(self, values: Mapping[str, Any], cu_seqlens: Tensor, meta: Mapping[str, Any] | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        self.meta: Mapping[str, Any] = dict(meta or {})
        self._values: dict[str, Any] = {**values, "cu_seqlens": cu_seqlens, "meta": self.meta}

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise KeyError(f"the batch has no key {key!r}; it has {sorted(self._values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{k}={list(v.shape)}' for k, v in self._values.items() if isinstance(v, Tensor))})"


@dataclass(frozen=True)
class TopK:
    """Ask for the ``k`` most likely tokens at each position."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopK.k = {self.k}: ask for at least 1")


OutputName = Literal["logprobs", "entropy", "values", "logits", "hidden", "routed_experts"] | TopK
"""What a caller may ask for per token."""


class TopKOutput(NamedTuple):
    """The most likely tokens: ``logprobs`` float ``[T, k]``, falling, and their ``ids`` int64 ``[T, k]``."""

    logprobs: Tensor
    ids: Tensor


@dataclass(frozen=True)
class TokenOutputs:
    """Per-token outputs of one micro-batch: differentiable, packed, and only what was asked for; the rest is ``None``.

    Attributes:
        logprobs: float32 (float64 in a float64 model) ``[T]``, or ``[T, K]`` where ``target_ids`` is. What stands at ``t`` speaks
            of the prediction made at ``t``. Exactly 0.0 where there is no target.
        entropy: ``[T]``, of the distribution at ``t`` after temperature, in nats.
        values: ``[T]``, from the value head.
        logits: ``[T, V]``, after temperature. Allocates what it says.
        hidden: ``[T, H]``, the last hidden state before the head.
        topk: the ``k`` most likely tokens at ``t``.
        routed_experts: int64 ``[T, L, K]``, the experts to which token ``t`` went in each of the ``L`` layers that have experts: most
            likely first, or as they were replayed. A batch's key of the same name replays them.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None
    topk: TopKOutput | None = None
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A number that a loss function reports beside its loss, reduced exactly over micro-batches and data-parallel ranks.

    ``mean`` is ``sum(value * weight) / sum(weight)``; ``sum`` is ``sum(value)``; ``min`` and ``max`` are over the values.

    Attributes:
        value: a scalar tensor or number, of this micro-batch.
        weight: for ``mean``, what the value weighs (such as its number of tokens).
        reduce: how values become one.
    """

    value: Tensor | float
    weight: Tensor | float = 1.0
    reduce: Literal["mean", "sum", "min", "max"] = "mean"


@dataclass(frozen=True)
class OptimStats:
    """What an optimizer step did; equal on every rank.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate that the step used.
        update_successful: False when the gradient was not finite: nothing was updated and the schedule did not advance.
    """

    grad_norm: float
    lr: float
    update_successful: bool


@dataclass(frozen=True)
class StepOutput:
    """What a step did; equal on every rank.

    Attributes:
        loss: the sum of the terms: ``sum(loss_fn) / sum(loss_weight_fn)`` over the global batch with the default normalisation.
        terms: each term of a dict loss, divided by its own weight; ``{"loss": loss}`` for a plain loss.
        metrics: reduced metrics by name, and ``weight`` (or ``weight/<term>``), the global loss weights.
        grad_norm, lr, update_successful: of the optimizer step; ``None`` where none was taken.
        n_mbs: micro-batches on each rank. n_tokens: tokens of the global batch, unpadded.
        seconds: wall time of the call on the slowest rank.
        timings: on that rank, seconds of the call by phase, summing to ``seconds``. On a GPU they are of the device, read as the call ends.
            ``data``: checks, packing, what ranks tell each other on the host, and all that is not named here.
            ``forward``: the model, its heads, and the loss.
            ``backward``: and recomputed forwards; in a pipeline also the wait for other stages.
            ``reduce``: sums of gradients over ranks, as far as they do not overlap with the backward.
            ``optimizer``: with the norm of the gradient. Phases that did not take place are missing.
    """

    loss: float
    terms: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    update_successful: bool | None = None
    n_mbs: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
