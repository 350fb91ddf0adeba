"""Verbs that train, as plain calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal.tinker.backends.backend import ModelLimits, TrainingBackend
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.tinker.backends.losses.elementwise import NOT_LINEAR, elementwise_loss
from areal.tinker.backends.prepared import AdapterSpec, Datum, PassResult, PreparedBatch, Scalar
from areal.tinker.service.requests import RawDatum
from areal.tinker.service.settings import ServiceLimits
from areal.tinker.service.verbs.forward_backward import LossKeys, check_loss_config, check_samples
from areal.tinker.service.verbs.models import check_adapter
from areal.tinker.service.verbs.optimizer import check_adam

_OPTIMIZER = "adamw"


@dataclass(frozen=True)
class PassRequest:
    """A forward or forward_backward of one model, before validation.

    Attributes:
        model_id: model.
        data: samples, with the keys of the protocol. In addition, ``weights`` of at least 0 multiply the loss of each target in losses that
            are linear in the advantages.
        loss_fn, loss_fn_config: loss and configuration of the protocol.
    """

    model_id: str
    data: Sequence[RawDatum]
    loss_fn: str = "cross_entropy"
    loss_fn_config: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class PassOutput:
    """Result of a :class:`PassRequest`.

    Attributes:
        logprobs: for each sample, float32 log-probs of its targets in nats, of their shape.
        losses: for each sample, the loss of each target; ``None`` where the loss is not linear in weights or advantages.
        metrics: numbers by name with the suffix of their reduction; ``loss:sum`` is always there.
    """

    logprobs: Sequence[np.ndarray]
    losses: Sequence[np.ndarray | None]
    metrics: Mapping[str, float]


PassOutputs = dict[str, PassOutput | UserError | ServerError]


class DirectTrainer:
    """Validates requests and runs them on a training backend. A request that is refused fails alone.

    After the loss of the backend's processes, the call raises :class:`~areal.tinker.backends.errors.BackendLostError`, and the backend is
    started again, without models.

    Args:
        backend: training backend, which :meth:`close` closes.

    Attributes:
        backend: training backend.
        models: adapter of each model, by the id of the model.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend
        self.models: dict[str, AdapterSpec] = {}

    def close(self) -> None:
        """Release everything."""
        self.backend.close()

    # ---- models

    def create_model(self, model_id: str, lora_config: Mapping[str, Any]) -> AdapterSpec:
        """Add a model, and return its adapter.

        Args:
            model_id: id of the model.
            lora_config: ``rank``, ``alpha``, ``seed``, ``train_attn``, ``train_mlp`` and ``train_unembed``, as in the protocol.

        Raises:
            UserError: the adapter is refused.
        """
        adapter = check_adapter(lora_config, self.backend.limits())
        with self._restarting():
            self.backend.create_model(model_id, adapter)
        self.models[model_id] = adapter
        return adapter

    def delete_model(self, model_id: str) -> None:
        """Release a model."""
        with self._restarting():
            self.backend.delete(model_id)
        del self.models[model_id]

    def save(self, model_id: str, folder: Path) -> None:
        """Write the adapter with its optimizer state to a new folder."""
        with self._restarting():
            self.backend.save(model_id, folder)

    def save_for_sampler(self, model_id: str, folder: Path) -> None:
        """Write the adapter for a sampler to a new folder, in peft's format."""
        with self._restarting():
            self.backend.save_for_sampler(model_id, folder)

    def load(self, model_id: str, folder: Path) -> None:
        """Create or replace a model from a folder that :meth:`save` wrote, with its optimizer state.

        Raises:
            UserError: the folder is damaged or of another base model.
        """
        with self._restarting():
            self.models[model_id] = self.backend.load(model_id, folder, with_optimizer=True)

    # ---- passes and steps

    def forward(self, requests: Mapping[str, PassRequest]) -> PassOutputs:
        """Return the result of each request, or its error, by the id of the request. Gradients are not changed."""
        return self._pass(requests, self.backend.forward)

    def forward_backward(self, requests: Mapping[str, PassRequest]) -> PassOutputs:
        """Add the gradient of each request to those of its model. A request that fails adds nothing. Results as for :meth:`forward`."""
        return self._pass(requests, self.backend.forward_backward)

    def optim_step(self, model_id: str, adam_params: Mapping[str, float]) -> Mapping[str, float]:
        """Apply the pending gradients of a model, and return metrics.

        Args:
            model_id: model.
            adam_params: fields of :class:`~areal.tinker.backends.prepared.AdamParams`.

        Raises:
            UserError: a value is out of range, or the gradient is not finite.
        """
        params = check_adam(adam_params, _OPTIMIZER, _OPTIMIZER, self.backend.optimizers())
        with self._restarting():
            return self.backend.optim_step(model_id, params)

    def _pass(
        self, requests: Mapping[str, PassRequest], run: Callable[[Sequence[PreparedBatch]], Sequence[Any]]
    ) -> PassOutputs:
        losses, limits = self.backend.losses(), self.backend.limits()
        outputs: PassOutputs = {}
        # Refused requests do not reach the backend.
        valid: dict[str, PreparedBatch] = {}
        for name, request in requests.items():
            try:
                valid[name] = _prepared(request, losses, limits)
            except UserError as error:
                outputs[name] = error
        with self._restarting():
            results = run(list(valid.values()))
        for (name, batch), result in zip(valid.items(), results, strict=True):
            outputs[name] = _output(batch, result) if isinstance(result, PassResult) else result
        return outputs

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """Start the backend again after the loss of its processes, without models."""
        try:
            yield
        except BackendLostError:
            self.models.clear()
            self.backend.restart()
            raise


def _prepared(request: PassRequest, losses: Mapping[str, LossKeys], limits: ModelLimits) -> PreparedBatch:
    """Return a validated request.

    Raises:
        UserError: the loss or a sample is refused; names the field, the value and the way out.
    """
    loss, config = check_loss_config(request.loss_fn, request.loss_fn_config, losses)
    folds = "weights" not in loss["inputs"] | loss["optional"] and request.loss_fn not in NOT_LINEAR
    keys = {**loss, "optional": loss["optional"] | {"weights"}} if folds else loss
    data = check_samples(request.data, keys, limits, ServiceLimits.max_dense_elements)
    if folds:
        data = [_fold_weights(f"data[{i}]", datum) for i, datum in enumerate(data)]
    return PreparedBatch(request.model_id, data, request.loss_fn, config)


def _fold_weights(where: str, datum: Datum) -> Datum:
    """Multiply the advantages of a sample by its weights. A clipped loss is not linear in a negative factor.

    Raises:
        UserError: a weight is negative.
    """
    values = dict(datum.values)
    weights = values.pop("weights", None)
    if weights is None:
        return datum
    if (weights < 0).any():
        raise UserError(
            f"{where}.loss_fn_inputs['weights'] has the element {weights[weights < 0][0]}: it must be at least 0, or leave weights out"
        )
    # Log-probs without a weight may be placeholders, with which a ratio is infinite, and no advantage of 0 makes it finite.
    if "logprobs" in values:
        values["logprobs"] = np.where(weights > 0, values["logprobs"], np.float32(0))
    return replace(datum, values={**values, "advantages": values["advantages"] * weights})


def _output(batch: PreparedBatch, result: PassResult) -> PassOutput:
    rows = zip(batch.data, result.logprobs, strict=True)
    losses = [elementwise_loss(batch.loss, batch.config, datum, logprobs) for datum, logprobs in rows]
    return PassOutput(result.logprobs, losses, result.metrics)
