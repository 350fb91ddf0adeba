"""Interface of a loss, the inputs and metrics that several losses have in common, and their sum over requests that share a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX, Batch, Metric, TokenOutputs
from areal.utils.data import ADAPTER


class ProtocolLoss(Protocol):
    """A loss of the protocol with its configuration: a frozen dataclass whose fields are the configuration.

    It is called once per micro-batch and returns the sum over all targets, with metrics whose names end in the suffix of their reduction.
    Values of the batch have the shape of the targets, ``[T]`` or ``[T, K]``.

    Attributes:
        inputs: keys of a datum that the loss needs, by the protocol's names.
        optional: further keys of a datum that the loss reads.
    """

    inputs: ClassVar[frozenset[str]]
    optional: ClassVar[frozenset[str]]

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]: ...


CLIP_KEYS = frozenset({"clip_low_threshold", "clip_high_threshold"})
"""Thresholds of each token, which replace those of the configuration."""

RATIO_KEYS = frozenset({"target_tokens", "logprobs", "advantages"})
"""Keys of a datum for losses with a ratio to the sampling policy."""


def target_logprobs(outputs: TokenOutputs) -> Tensor:
    """Return the log-probs of the targets, with a gradient."""
    if outputs.logprobs is None:
        raise ValueError("outputs = without 'logprobs': name it in the call")
    return outputs.logprobs


def sampling_ratio_metrics(logprobs: Tensor, batch: Batch, clipped: Tensor | None = None) -> dict[str, Metric]:
    """Return metrics of the ratio to the sampling policy: means over the targets whose advantage is not 0.

    Args:
        logprobs: log-probs of the targets.
        batch: micro-batch with ``logprobs`` and ``advantages``.
        clipped: bool, of the same shape. Targets whose ratio was clipped.

    Returns:
        ``ratio:mean``; ``kl:mean``, the estimate ``log q - log p`` of KL(q || p); and ``clipped:mean``, a fraction.
    """
    with torch.no_grad():
        counted = ((batch["advantages"] != 0) & (batch["target_ids"] != IGNORE_INDEX)).to(logprobs.dtype)
        weight = counted.sum()
        log_ratio = logprobs.detach() - batch["logprobs"]
        means = {"ratio:mean": log_ratio.exp(), "kl:mean": -log_ratio}
        if clipped is not None:
            means["clipped:mean"] = clipped.to(logprobs.dtype)
        # A sum over no target is 0, and has the weight 0.
        return {name: Metric((x * counted).sum() / weight.clamp(min=1), weight) for name, x in means.items()}


def config_numbers(loss: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the numbers of a loss configuration.

    Raises:
        ValueError: a value is not a number.
    """
    for name, value in config.items():
        if isinstance(value, str):
            raise ValueError(f"loss_fn_config of {loss!r}: {name} = {value!r}: it must be a number")
    return {name: float(value) for name, value in config.items()}


@dataclass(frozen=True)
class LossByModel:
    """Sum of the losses of several requests, with the metrics of each.

    Attributes:
        losses: loss of each request by the index of its adapter.
    """

    losses: Mapping[int, ProtocolLoss]

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        total: Tensor | None = None
        metrics: dict[str, Metric] = {}
        for index, own_outputs, own in self._runs(outputs, batch):
            loss, of_request = self.losses[index](own_outputs, own)
            of_request["loss:sum"] = Metric(loss.detach(), reduce="sum")
            metrics |= {f"{index}/{name}": metric for name, metric in of_request.items()}
            total = loss if total is None else total + loss
        if total is None:
            raise ValueError("a micro-batch has no sequence")
        return total, metrics

    def _runs(self, outputs: TokenOutputs, batch: Batch) -> Iterator[tuple[int, TokenOutputs, Batch]]:
        """Yield the outputs and the data of each adapter of a micro-batch, whose sequences are next to each other."""
        adapters = batch[ADAPTER].tolist()
        if len(set(adapters)) == 1:
            yield adapters[0], outputs, batch
            return
        logprobs, bounds = target_logprobs(outputs), batch.cu_seqlens.tolist()
        start = 0
        for end in range(1, len(adapters) + 1):
            if end < len(adapters) and adapters[end] == adapters[start]:
                continue
            loss, tokens = self.losses[adapters[start]], slice(bounds[start], bounds[end])
            keys = {"target_ids", *loss.inputs, *loss.optional} & set(batch)
            own = Batch(
                {key: batch[key][tokens] for key in keys}, batch.cu_seqlens[start : end + 1] - bounds[start], batch.meta
            )
            yield adapters[start], TokenOutputs(logprobs=logprobs[tokens]), own
            start = end

    @staticmethod
    def metrics_of(index: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the request of one adapter."""
        prefix = f"{index}/"
        return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
