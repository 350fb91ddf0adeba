"""Process functions of the verbs, weights of losses, and sums of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import Metric, OutputName, Reduction, StepOutput, TokenOutputs, TopK
from areal.api.loss import LossFn, LossTerms, LossWeightFn, Normalization
from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.engine.faults import ReadOutputs, naming_missing_outputs
from areal.engine.moe.balance_loss import RoutingSums
from areal.utils.profiling.moved_bytes import MovedBytes

LOSS = "loss"
"""Name of the term of a loss with one term."""


@dataclass(frozen=True)
class LossWeights:
    """The loss weights of this rank's micro-batches and of the global batch.

    Attributes:
        plain: True if the weight function returned a tensor, False for a dict.
        per_mb: ``mb.index`` -> term -> weight. A term of weight 0 adds nothing to the loss of that micro-batch.
        total: term -> global weight.
        sequences, tokens: int. Numbers of them in the global batch.
    """

    plain: bool
    per_mb: dict[int, dict[str, float]]
    total: dict[str, float]
    sequences: int = 0
    tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the global weights as metrics: ``weight``, or ``weight/<term>`` for each term."""
        return {"weight" if self.plain else f"weight/{name}": total for name, total in self.total.items()}


def local_weights(mbs: MicroBatchList, loss_weight_fn: LossWeightFn) -> tuple[bool, dict[int, dict[str, float]]]:
    """Compute this rank's loss weights, with one host read for all micro-batches.

    Returns:
        ``plain`` and ``per_mb`` of :class:`LossWeights`.

    Raises:
        ValueError: a weight is not a scalar, is negative or not finite, or the terms differ between micro-batches.
    """
    returned = [loss_weight_fn(mb.data) for mb in mbs.real]
    if not returned:
        return True, {}
    plain = not isinstance(returned[0], dict)
    terms = [as_terms(weights, "loss_weight_fn") for weights in returned]
    names = list(terms[0])
    if any(list(term) != names for term in terms):
        raise ValueError(
            f"loss_weight_fn returned terms {[sorted(t) for t in terms]}: return the same for every micro-batch"
        )
    # One host read for all weights.
    flat = torch.stack([term[name].detach().double() for term in terms for name in names]).tolist()
    per_mb = {
        mb.index: dict(zip(names, flat[i * len(names) : (i + 1) * len(names)], strict=True))
        for i, mb in enumerate(mbs.real)
    }
    for index, weights in per_mb.items():
        for name, weight in weights.items():
            if not math.isfinite(weight) or weight < 0:
                raise ValueError(
                    f"loss_weight_fn returned {weight} for {name!r} of micro-batch {index}: weights are finite and at least 0"
                )
    return plain, per_mb


def as_terms(value: Any, function: str) -> dict[str, Tensor]:
    """Convert the value that ``function`` returned to a dict of terms.

    Raises:
        ValueError: the value is neither a scalar tensor nor a dict of scalar tensors.
    """
    terms = value if isinstance(value, dict) else {LOSS: value}
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim() != 0:
            kind = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
            raise ValueError(
                f"{function} returned {kind} for {name!r}: return a scalar tensor, or a dict of them (sum over the micro-batch)"
            )
    return terms


@dataclass(frozen=True)
class LossResult:
    """The loss of one micro-batch: undivided terms, metrics, and the outputs that are returned, detached, on the device."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


def split_outputs(outputs: tuple[OutputName, ...], argument: str = "outputs") -> tuple[set[str], TopK | None]:
    """Split requested outputs into names and a top-k, or ``None`` without one.

    Args:
        outputs: requested outputs.
        argument: name of the argument that requests them, for errors.

    Raises:
        ValueError: an unknown name, no output, or two different top-k.
    """
    known = {"logprobs", "entropy", "values", "logits", "hidden", "routed_experts"}
    names: set[str] = {output for output in outputs if isinstance(output, str)}
    tops = {output for output in outputs if isinstance(output, TopK)}
    if not outputs or names - known or len(names) + len(tops) != len(set(outputs)) or len(tops) > 1:
        raise ValueError(f"{argument} = {outputs!r}: name some of {sorted(known)}, and at most one TopK(k)")
    return names, next(iter(tops), None)


def _fields_of(outputs: tuple[OutputName, ...]) -> list[str]:
    """Return the fields of ``TokenOutputs`` with these outputs."""
    return [output if isinstance(output, str) else "topk" for output in outputs]


def check_outputs(outputs: tuple[OutputName, ...], *, value_head: bool, vocab_size: int) -> None:
    """Check that the model has the requested outputs.

    Raises:
        ValueError: an unknown output, values without a value head, or a top-k of more tokens than the vocabulary has.
    """
    names, top = split_outputs(outputs)
    if top is not None and top.k > vocab_size:
        raise ValueError(f"outputs has {top}, but the vocabulary has {vocab_size} tokens: choose a smaller k")
    if "values" in names and not value_head:
        raise ValueError(
            "outputs has 'values', but the engine has no value head: set TrainEngineConfig.value_head=True"
        )


def loss_divisors(totals: Mapping[str, float], normalization: Normalization) -> dict[str, float]:
    """Return the number by which the sum of each term is divided.

    Args:
        totals: term -> global weight.
    """
    if normalization == "weight":
        return dict(totals)
    return dict.fromkeys(totals, 1.0 if normalization == "sum" else float(normalization))


class LossStep:
    """Process function of ``forward_backward`` and ``eval_batch``: calls the loss function and divides each term.

    Args:
        weights: loss weights of the terms of ``loss_fn``.
        divisors: term -> divisor of its sum. May have further terms.
        loss_weight: float. Factor of the loss.
        returns: outputs to return with the loss: as the model computed them, but logits and hidden states with the changes that ``loss_fn``
            makes in place.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        weights: LossWeights,
        divisors: dict[str, float],
        loss_weight: float,
        returns: tuple[OutputName, ...] = (),
    ) -> None:
        self._loss_fn = loss_fn
        self._weights = weights
        self._returned = _fields_of(returns)
        self._scales = {name: loss_weight / divisors[name] for name in weights.total}

    def __call__(self, outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor | None, LossResult]:
        weights = self._weights.per_mb[mb.index]
        returned = {name: _returned(name, getattr(outputs, name)) for name in self._returned}
        # Losses may divide by their weight: do not call them without one.
        if not any(weights.values()):
            return None, LossResult(outputs=returned)
        read = ReadOutputs(**vars(outputs))
        with naming_missing_outputs(read):
            result = self._loss_fn(read, mb.data)
        metrics: dict[str, Metric] = {}
        if isinstance(result, tuple):
            result, metrics = result
        terms = self._check(result)
        # A term without weight in this micro-batch may be NaN.
        terms = {name: term for name, term in terms.items() if weights[name]}
        loss = torch.stack([term * self._scales[name] for name, term in terms.items()]).sum()
        return loss, LossResult({name: term.detach() for name, term in terms.items()}, metrics, returned)

    def _check(self, returned: LossTerms) -> dict[str, Tensor]:
        terms = as_terms(returned, "loss_fn")
        if set(terms) != set(self._scales):
            raise ValueError(
                f"loss_fn returned terms {sorted(terms)} and loss_weight_fn {sorted(self._scales)}: each term needs a weight of its own name"
            )
        return terms


def _returned(name: str, output: Any) -> Any:
    """Detach an output. It is copied, because the loss function may change it in place, unless it is large."""
    detached = pytree.tree_map(Tensor.detach, output)
    return detached if name in ("logits", "hidden") else pytree.tree_map(Tensor.clone, detached)


class OutputStep:
    """Process function of ``forward_batch``: returns the requested output as a tensor, or several as a dict."""

    def __init__(self, outputs: tuple[OutputName, ...]) -> None:
        self._names = _fields_of(outputs)

    def __call__(self, outputs: TokenOutputs, mb: MicroBatch) -> tuple[None, Any]:
        requested = {name: getattr(outputs, name) for name in self._names}
        return None, requested if len(requested) > 1 else requested[self._names[0]]


@dataclass
class StepSums:
    """Sums over micro-batches, as host numbers: of one rank, or merged over ranks.

    Attributes:
        terms: term -> undivided sum.
        metrics: name -> (reduce, value, weight). The value of a mean is already weighted.
        n_tokens, dropped: int. Tokens and left-out sequences of the batch.
        seconds: float. Wall time of the call.
        timings: phase -> seconds.
        moved: bytes moved from and to host memory since the last step.
    """

    terms: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[Reduction, float, float]] = field(default_factory=dict)
    n_tokens: int = 0
    dropped: int = 0
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    moved: MovedBytes = field(default_factory=MovedBytes)

    def merge(self, other: StepSums) -> None:
        """Add another rank's sums to these.

        Raises:
            ValueError: a metric is reduced in two ways.
        """
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        for name, metric in other.metrics.items():
            self.add_metric(name, *metric)
        self.n_tokens += other.n_tokens
        self.dropped += other.dropped

    def add_routing(self, sums: Sequence[RoutingSums]) -> None:
        """Add the sums of the routers on every stage of every shard of the batch."""
        if not any(its.terms or its.loads for its in sums):
            return
        total = RoutingSums()
        for routing in sums:
            total.merge(routing)
        self.terms |= total.terms
        for name, metric in total.metrics().items():
            self.add_metric(name, metric.reduce, float(metric.value), 1.0)

    def add_metric(self, name: str, reduce: Reduction, value: float, weight: float) -> None:
        """Add one value to the metric ``name``. The value of a mean is already weighted."""
        if name not in self.metrics:
            self.metrics[name] = (reduce, value, weight)
            return
        known, total, weights = self.metrics[name]
        if known != reduce:
            raise ValueError(
                f"metric {name!r} is reduced by {known!r} in one place and by {reduce!r} in another: choose one"
            )
        combined = {"min": min(total, value), "max": max(total, value)}.get(reduce, total + value)
        self.metrics[name] = (reduce, combined, weights + weight)

    def reduced_metrics(self) -> dict[str, float]:
        """Return each metric as one number. A mean without weight is 0."""
        out = {}
        for name, (reduce, value, weight) in sorted(self.metrics.items()):
            out[name] = (value / weight if weight else 0.0) if reduce == "mean" else value
        return out


def step_output(
    sums: StepSums,
    weights: LossWeights,
    divisors: dict[str, float],
    loss_weight: float,
    outputs: dict[str, Any],
    *,
    n_mbs: int,
    may_drop: bool,
) -> StepOutput:
    """Build the result of a verb with a loss from the sums over all ranks.

    Args:
        divisors, loss_weight: see :class:`LossStep`.
        outputs: per-token outputs of this rank's batch.
        n_mbs: int. Micro-batches on each rank.
        may_drop: report the number of sequences that were left out.
    """
    terms = {name: sums.terms.get(name, 0.0) * loss_weight / divisor for name, divisor in divisors.items()}
    # Weights, bytes and sequences are amounts: those of several steps add up.
    amounts = weights.metrics()
    amounts |= {name: float(nbytes) for name, nbytes in sums.moved.totals.items() if nbytes}
    if may_drop:
        amounts["dropped_sequences"] = float(sums.dropped)
    peaks = {name: float(nbytes) for name, nbytes in sums.moved.peaks.items()}
    reductions = {name: reduce for name, (reduce, _, _) in sums.metrics.items()}
    return StepOutput(
        loss=sum(terms.values()),
        terms=terms,
        metrics=sums.reduced_metrics() | amounts | peaks,
        reductions=reductions | dict.fromkeys(amounts, "sum") | dict.fromkeys(peaks, "max"),
        n_mbs=n_mbs,
        n_tokens=sums.n_tokens,
        seconds=sums.seconds,
        timings=sums.timings,
        outputs=outputs,
    )


def sum_results(mbs: MicroBatchList, results: list[LossResult]) -> StepSums:
    """Sum this rank's results, with one host read for all micro-batches.

    Raises:
        ValueError: a loss is not finite, a metric is not a scalar, or its reduction is unknown. Names the micro-batch or the metric.
    """
    # Collect all scalars, on the device.
    sums = StepSums(n_tokens=mbs.n_tokens, dropped=len(mbs.dropped))
    scalars: list[Tensor] = []
    for result in results:
        scalars += result.terms.values()
        for name, metric in result.metrics.items():
            if not isinstance(metric, Metric) or metric.reduce not in ("mean", "sum", "min", "max"):
                raise ValueError(
                    f"metric {name!r} is {metric!r}: return Metric(value, weight, reduce='mean'|'sum'|'min'|'max')"
                )
            scalars += [_scalar(name, metric.value), _scalar(name, metric.weight)]
    if not scalars:
        return sums
    # Read them once, and add them up in the same order.
    numbers = iter(_read(scalars))
    for mb, result in zip(mbs.real, results, strict=True):
        for name in result.terms:
            value = next(numbers)
            if not math.isfinite(value):
                raise ValueError(
                    f"loss_fn returned {value} for {name!r} of micro-batch {mb.index} (samples {list(mb.sample_ids)}): the loss must be finite"
                )
            sums.terms[name] = sums.terms.get(name, 0.0) + value
        for name, metric in result.metrics.items():
            value, weight = next(numbers), next(numbers)
            # A mean over nothing may be NaN.
            weighted = value * weight if weight else 0.0
            sums.add_metric(name, metric.reduce, weighted if metric.reduce == "mean" else value, weight)
    return sums


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """Read scalars, with one host read for all that are on a device. Those of the host are not sent there."""
    numbers = [0.0] * len(scalars)
    for on_host in (True, False):
        chosen = [i for i, scalar in enumerate(scalars) if (scalar.device.type == "cpu") == on_host]
        if chosen:
            values = torch.stack([scalars[i].detach().double() for i in chosen]).tolist()
            for i, value in zip(chosen, values, strict=True):
                numbers[i] = value
    return numbers


def _scalar(name: str, value: Tensor | float) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    if tensor.dim() != 0:
        raise ValueError(f"metric {name!r} has shape {tuple(tensor.shape)}: its value and weight are scalars")
    return tensor
