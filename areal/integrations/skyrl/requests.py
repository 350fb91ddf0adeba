"""Requests of SkyRL as requests of this library, and results of this library in SkyRL's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from skyrl.tinker import types

from areal.tinker.backends.prepared import SamplingResult
from areal.tinker.direct.sampler import SampleRequest
from areal.tinker.direct.trainer import PassOutput, PassRequest
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor, Sample

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
DEFAULTS: Mapping[str, Mapping[str, float]] = {"ppo": CLIP, "cispo": CLIP}
"""Configuration of a loss that SkyRL uses for keys that a request leaves out."""


def pass_requests(batch: types.PreparedModelPassBatch) -> dict[str, PassRequest]:
    """Return the forward and backward passes of a batch, by the id of the request."""
    requests = {}
    for request_id, model_id, start, end in batch.request_batch_slices:
        data = [_datum(batch, i) for i in range(start, end)]
        # Without samples, a request has no loss either, and is refused.
        name = batch.all_loss_fns[start] if data else PassRequest.loss_fn
        given = batch.all_loss_fn_configs[start] if data else None
        requests[request_id] = PassRequest(model_id, data, name, {**DEFAULTS.get(name, {}), **(given or {})})
    return requests


def _datum(batch: types.PreparedModelPassBatch, i: int) -> RawDatum:
    columns = {
        "weights": batch.all_token_weights,
        "logprobs": batch.all_sampling_logprobs,
        "advantages": batch.all_advantages,
        "values": batch.all_values,
        "returns": batch.all_returns,
    }
    # SkyRL has an empty list for what the client did not send.
    given = {name: np.asarray(column[i], np.float64) for name, column in columns.items() if column[i]}
    inputs = {name: RawTensor("float32", values) for name, values in given.items()}
    inputs["target_tokens"] = RawTensor("int64", np.asarray(batch.all_targets[i], np.int64))
    return RawDatum(_chunks(batch.all_model_inputs[i]), inputs)


def _chunks(tokens: types.ModelInput) -> list[RawChunk]:
    """Return the chunks of a model input. Chunks of images are empty, and are refused by name later."""
    return [RawChunk(chunk.type, np.asarray(getattr(chunk, "tokens", []), np.int64)) for chunk in tokens.chunks]


def sample_requests(batch: types.PreparedSampleBatch) -> dict[str, SampleRequest]:
    """Return the requests for samples of a batch, by the id of the request."""
    requests = {}
    for request_id, model_id, start, end, scored in batch.request_batch_slices:
        # Prompts of one request are equal: the first is scored.
        samples = [_sample(batch, i, scored and i == start) for i in range(start, end)]
        snapshot = batch.all_checkpoint_paths[start] if samples else ""
        requests[request_id] = SampleRequest(model_id, snapshot, samples)
    return requests


def _sample(batch: types.PreparedSampleBatch, i: int, scored: bool) -> Sample:
    """Return the request for one answer, which has its own seed."""
    params = batch.all_sampling_params[i].model_dump()
    strings, ids = params.pop("stop_strings"), params.pop("stop_tokens")
    params["stop"] = ids if strings is None else strings
    return Sample(b"", _chunks(batch.all_model_inputs[i]), sampling_params=params, prompt_logprobs=scored)


# ---- results


def failed(error: Exception) -> types.ErrorResponse:
    """Return SkyRL's response to a request that failed."""
    return types.ErrorResponse(error=str(error), status="failed")


def pass_output(output: PassOutput | Exception) -> types.ForwardBackwardOutput | types.ErrorResponse:
    """Return the loss and the log-prob of each target, for each sample."""
    if isinstance(output, Exception):
        return failed(output)
    rows = zip(output.losses, output.logprobs, strict=True)
    named = [{"elementwise_loss": losses, "logprobs": logprobs} for losses, logprobs in rows]
    outputs = [{name: _tensor(x) for name, x in sample.items() if x is not None} for sample in named]
    return types.ForwardBackwardOutput(
        loss_fn_output_type="scalar", loss_fn_outputs=outputs, metrics=dict(output.metrics)
    )


def _tensor(values: np.ndarray) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": "float32", "shape": list(values.shape)}


def sample_output(output: list[SamplingResult] | Exception) -> types.SampleOutput | types.ErrorResponse:
    """Return the answers to a request."""
    if isinstance(output, Exception):
        return failed(output)
    answers = [answer for result in output for answer in result.answers]
    lists = [(answer.stop_reason, answer.tokens.tolist(), answer.logprobs.tolist()) for answer in answers]
    sequences = [types.GeneratedSequence(stop_reason=s, tokens=t, logprobs=l) for s, t, l in lists]
    # As in SkyRL, the first token is left out.
    prompt = output[0].prompt_logprobs
    return types.SampleOutput(sequences=sequences, prompt_logprobs=None if prompt is None else prompt[1:].tolist())
