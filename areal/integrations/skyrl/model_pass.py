"""Forward and backward passes of SkyRL as requests of this library, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from skyrl.tinker import types

from areal.api import Batch, TokenOutputs
from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.losses.loss_table import make_loss
from areal.tinker.backends.prepared import Datum, PassResult, PreparedBatch
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor
from areal.tinker.service.settings import ServiceLimits
from areal.tinker.service.verbs.forward_backward import LossKeys, check_loss_config, check_samples

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
DEFAULTS: Mapping[str, Mapping[str, float]] = {"ppo": CLIP, "cispo": CLIP}
"""Configuration of a loss that SkyRL uses for keys that a request leaves out."""


def failed(error: Exception) -> types.ErrorResponse:
    """Return SkyRL's response to a request that failed."""
    return types.ErrorResponse(error=str(error), status="failed")


def raw_chunks(tokens: types.ModelInput) -> list[RawChunk]:
    """Return the chunks of a model input. Chunks of images are empty, and are refused by name later."""
    return [RawChunk(chunk.type, np.asarray(getattr(chunk, "tokens", []), np.int64)) for chunk in tokens.chunks]


def prepared_batch(
    batch: types.PreparedModelPassBatch, span: range, losses: Mapping[str, LossKeys], limits: ModelLimits
) -> PreparedBatch:
    """Return one validated request of a batch.

    Args:
        batch: samples of all requests.
        span: indices of the samples of this request.
        losses, limits: of the training backend.

    Raises:
        UserError: the loss or a sample is refused; names the field, the value and the way out.
    """
    if not span:
        raise UserError("data is empty: give at least one sample")
    start = span[0]
    name, given = batch.all_loss_fns[start], batch.all_loss_fn_configs[start] or {}
    loss, config = check_loss_config(name, {**DEFAULTS.get(name, {}), **given}, losses)
    known = loss["inputs"] | loss["optional"]
    samples = [_raw_datum(batch, i, known, f"data[{i - start}]") for i in span]
    data = check_samples(samples, loss, limits, ServiceLimits.max_dense_elements)
    return PreparedBatch(batch.all_model_ids[start], data, name, config)


def _raw_datum(batch: types.PreparedModelPassBatch, i: int, known: frozenset[str], where: str) -> RawDatum:
    columns = {
        "weights": batch.all_token_weights,
        "logprobs": batch.all_sampling_logprobs,
        "advantages": batch.all_advantages,
        "values": batch.all_values,
        "returns": batch.all_returns,
    }
    # SkyRL has an empty list for what the client did not send.
    values = {name: np.asarray(column[i], np.float64) for name, column in columns.items() if column[i]}
    if "weights" not in known:
        _fold_weights(values, where)
    inputs = {name: RawTensor("float32", array) for name, array in values.items()}
    inputs["target_tokens"] = RawTensor("int64", np.asarray(batch.all_targets[i], np.int64))
    return RawDatum(raw_chunks(batch.all_model_inputs[i]), inputs)


def _fold_weights(values: dict[str, np.ndarray], where: str) -> None:
    """Multiply the advantages by the weights, by which SkyRL multiplies every loss: the losses are linear in the advantages.

    Raises:
        UserError: a weight is negative, or the shapes differ. A clipped loss is not linear in a negative factor.
    """
    weights, advantages = values.pop("weights", None), values.get("advantages")
    if weights is None or advantages is None:
        return
    if weights.shape != advantages.shape:
        raise UserError(
            f"{where}.loss_fn_inputs has {len(weights)} weights and {len(advantages)} advantages: give as many"
        )
    if not (weights >= 0).all():
        raise UserError(
            f"{where}.loss_fn_inputs['weights'] has the element {weights[~(weights >= 0)][0]}: it must be at least 0, or leave weights out"
        )
    values["advantages"] = advantages * weights


def pass_output(batch: PreparedBatch, result: PassResult) -> types.ForwardBackwardOutput:
    """Return a result in SkyRL's form: for each sample the loss and the log-prob of each target."""
    outputs = [
        {"elementwise_loss": _tensor(_elementwise_loss(batch, datum, row)), "logprobs": _tensor(row)}
        for datum, row in zip(batch.data, result.logprobs, strict=True)
    ]
    return types.ForwardBackwardOutput(
        loss_fn_output_type="scalar", loss_fn_outputs=outputs, metrics=dict(result.metrics)
    )


def _elementwise_loss(batch: PreparedBatch, datum: Datum, logprobs: np.ndarray) -> np.ndarray:
    """Return the loss of each target, of which a loss function returns the sum.

    The loss of a target is linear in its weight or, on each side of 0, in its advantage: it is the product with the derivative.
    """
    loss = make_loss(batch.loss, batch.config)
    values: dict[str, torch.Tensor] = {name: torch.tensor(array) for name, array in datum.values.items()}
    factor = values["weights" if "weights" in values else "advantages"].requires_grad_()
    micro_batch = Batch(
        {**values, "target_ids": torch.tensor(datum.target_ids)}, torch.tensor([0, len(logprobs)], dtype=torch.int32)
    )
    total, _ = loss(TokenOutputs(logprobs=torch.tensor(logprobs)), micro_batch)
    (derivative,) = torch.autograd.grad(total, factor)
    return (factor * derivative).detach().numpy()


def _tensor(values: np.ndarray) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": "float32", "shape": list(values.shape)}
