"""Verbs that compute a loss: ``forward`` and ``forward_backward``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.prepared import PassResult, PreparedBatch, Scalar
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.requests import RawDatum
from areal.tinker.service.verbs.validation import check_loss_config, check_samples
from areal.tinker.service.verbs.verb import Capabilities, ModelRequest

_SMALL_SAMPLES, _SMALL_ELEMENTS = 16, 2**16
"""Size up to which a request is validated on the loop."""


@dataclass(frozen=True)
class ForwardBackward(ModelRequest, kind="forward_backward", batched=True):
    """forward_backward: adds the gradient of a loss to the pending gradients of the model."""

    data: Sequence[RawDatum] = ()
    loss_fn: str = "cross_entropy"
    loss_fn_config: Mapping[str, Scalar] = field(default_factory=dict)

    def notes(self) -> Any:
        if any(datum.spans for datum in self.data):
            return {"spans": [list(datum.spans) for datum in self.data]}
        return None

    def tokens(self) -> int:
        chunks = (chunk.tokens for datum in self.data for chunk in datum.model_input)
        return sum(len(tokens) for tokens in chunks if tokens is not None)

    def is_small(self) -> bool:
        # Sparse tensors may be large once they are dense.
        if len(self.data) > _SMALL_SAMPLES:
            return False
        chunks = sum(len(datum.model_input) for datum in self.data)
        tensors = [tensor for datum in self.data for tensor in datum.loss_fn_inputs.values()]
        elements = self.tokens() + sum(tensor.values.size for tensor in tensors)
        dense = all(tensor.crow_indices is None and tensor.col_indices is None for tensor in tensors)
        return dense and chunks <= _SMALL_SAMPLES and elements <= _SMALL_ELEMENTS

    def check(self, model: TrainedModel, server: Capabilities) -> PreparedBatch:
        loss, config = check_loss_config(self.loss_fn, self.loss_fn_config, server.losses)
        data = check_samples(self.data, loss, server.limits, server.settings.max_dense_elements)
        return PreparedBatch(model_id=self.model_id, data=data, loss=self.loss_fn, config=config)

    def without_content(self) -> Self:
        return replace(self, data=())

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[PreparedBatch]) -> list[Any]:
        return list(backend.forward_backward(prepared))

    @staticmethod
    def columns(prepared: PreparedBatch, result: PassResult) -> dict[str, Any]:
        return {"loss": float(result.metrics.get("loss:sum", float("nan"))), "tokens": prepared.tokens}


@dataclass(frozen=True)
class Forward(ForwardBackward, kind="forward", batched=True):
    """forward: computes a loss and its log-probs."""

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[PreparedBatch]) -> list[Any]:
        return list(backend.forward(prepared))

    @staticmethod
    def columns(prepared: PreparedBatch, result: PassResult) -> dict[str, Any]:
        return {"tokens": prepared.tokens}
