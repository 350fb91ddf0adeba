"""Input of a loss function (batch, per-token outputs, metrics), and output of a step.

Index ``t`` of every per-token tensor refers to the prediction made at position ``t`` (of token ``t + 1``). The last position of a sequence
predicts nothing: it is without a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

IGNORE_INDEX = -100
"""Value of ``target_ids`` at positions without a target. Their log-prob is exactly 0.0 and their weight 0."""


class Batch(Mapping[str, Any]):
    """A packed micro-batch as a loss function receives it: a read-only mapping.

    The ``n`` sequences are concatenated without padding to ``T`` tokens. Per-token keys are ``[T, ...]``, per-sequence keys ``[n, ...]``, and
    payloads are lists of ``n`` tensors. ``batch["target_ids"]`` (int64 ``[T]`` or ``[T, K]``) is always present, with ``IGNORE_INDEX`` at
    positions without a target.

    Attributes:
        cu_seqlens: int32 ``[n + 1]``. Offsets of the sequences in ``T``; also ``batch["cu_seqlens"]``.
        meta: values of the caller's batch that are not tensors, unchanged; also ``batch["meta"]``.
    """

    __slots__ = ("_values", "cu_seqlens", "meta")

    def __init__(self, values: Mapping[str, Any], cu_seqlens: Tensor, meta: Mapping[str, Any] | None = None) -> None:
        # Copies of both mappings: later changes to the arguments do not reach the batch.
        self.cu_seqlens = cu_seqlens
        self.meta: Mapping[str, Any] = dict(meta or {})
        self._values: dict[str, Any] = {**values, "cu_seqlens": cu_seqlens, "meta": self.meta}

    def __getitem__(self, key: str) -> Any:
        # The message lists the keys: a missing one is usually a misspelling.
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
    """Name of the output with the ``k`` most likely tokens at each position.

    Raises:
        ValueError: ``k`` is less than 1.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopK.k = {self.k}: ask for at least 1")


OutputName = Literal["logprobs", "entropy", "values", "logits", "hidden", "routed_experts"] | TopK
"""Names of per-token outputs; fields of :class:`TokenOutputs`, with :class:`TopK` for ``topk``."""


class TopKOutput(NamedTuple):
    """The most likely tokens: ``logprobs`` float ``[T, k]`` in descending order, and their ``ids`` int64 ``[T, k]``."""

    logprobs: Tensor
    ids: Tensor


@dataclass(frozen=True)
class TokenOutputs:
    """Per-token outputs of one micro-batch: packed and differentiable. Outputs that the call did not name are ``None``.

    Index ``t`` refers to the prediction made at position ``t`` (of token ``t + 1``).

    Attributes:
        logprobs: float32 (float64 in a float64 model) ``[T]``, or ``[T, K]`` if ``target_ids`` is ``[T, K]``. Log-prob of the target in nats,
            after temperature; exactly 0.0 at positions without a target.
        entropy: ``[T]``. Entropy of the predicted distribution in nats, after temperature.
        values: ``[T]``. Output of the value head.
        logits: ``[T, V]``. After temperature. The only output that allocates ``T * V`` numbers.
        hidden: ``[T, H]``. Last hidden state, the input of the head.
        topk: the ``k`` most likely tokens.
        routed_experts: int64 ``[T, L, K]``. Experts of token ``t`` in each of the ``L`` layers with experts, most likely first, or in the
            order in which they were replayed. A batch key of the same name replays them.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None
    topk: TopKOutput | None = None
    routed_experts: Tensor | None = None


Reduction = Literal["mean", "sum", "min", "max"]
"""Way to combine the values of a metric: over micro-batches and ranks, and over the steps of a batch."""


@dataclass(frozen=True)
class Metric:
    """A number that a loss function reports with its loss, reduced exactly over micro-batches and data-parallel ranks.

    ``mean`` is ``sum(value * weight) / sum(weight)``; ``sum`` is ``sum(value)``; ``min`` and ``max`` are over the values.

    Attributes:
        value: scalar tensor or number of this micro-batch.
        weight: weight of the value in a ``mean``, such as its number of tokens.
        reduce: kind of reduction.
    """

    value: Tensor | float
    weight: Tensor | float = 1.0
    reduce: Reduction = "mean"


@dataclass(frozen=True)
class OptimStats:
    """Statistics of an optimizer step, equal on all ranks.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate that the step used.
        update_successful: False if the gradient was not finite. Then nothing was updated, and the schedule did not advance.
    """

    grad_norm: float
    lr: float
    update_successful: bool


@dataclass(frozen=True)
class StepOutput:
    """Result of a step, equal on all ranks except for ``outputs``.

    Attributes:
        loss: sum of the terms: ``sum(loss_fn) / sum(loss_weight_fn)`` over the global batch with the default normalisation.
        terms: each term of a dict loss, divided by its own weight; ``{"loss": loss}`` for a plain loss.
        metrics: reduced metrics by name, and ``weight`` (or ``weight/<term>``), the global loss weights.
        reductions: reduction of each metric, for those who combine several steps.
        grad_norm, lr, update_successful: see :class:`OptimStats`; ``None`` without an optimizer step.
        n_mbs: micro-batches on each rank, fillers included.
        n_tokens: unpadded tokens of the global batch.
        seconds: wall time of the call on the slowest rank.
        timings: seconds per phase on that rank; they add up to ``seconds``. On a GPU, device time, read at the end of the call. Phases that
            did not occur are missing.
            ``data``: checks, packing, communication on the host, and the remainder.
            ``forward``: model, heads and loss.
            ``backward``: backward, with recomputed forwards; in a pipeline also waiting for other stages.
            ``reduce``: gradient reductions that do not overlap with the backward.
            ``optimizer``: gradient norm and optimizer step.
        outputs: per-token outputs that the call's ``returns`` names, by name (``"topk"`` for :class:`TopK`): those of this rank's batch,
            detached, in the caller's order, form and device.
    """

    loss: float
    terms: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    update_successful: bool | None = None
    n_mbs: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
