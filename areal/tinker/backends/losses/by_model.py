"""The losses of requests of several models that share a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import ProtocolLoss, target_logprobs
from areal.utils.data import ADAPTER


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
