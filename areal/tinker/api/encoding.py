"""Results of the engine as protobuf and JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal.tinker.api import wire_pb2
from areal.tinker.backends.prepared import PassResult, SampledAnswer, SamplingResult, TopLogprobs

MISSING_LOGPROB = -99999.0
"""Log-prob of a position without a distribution, in the matrices of the most likely tokens. Its token id is 0."""

STOP_REASONS = {"stop": wire_pb2.STOP_REASON_STOP, "length": wire_pb2.STOP_REASON_LENGTH}
RECORD = "ArrayRecord"
"""Name of the type of a loss function's outputs, in both forms."""


def to_protobuf(result: PassResult | SamplingResult) -> bytes:
    """Return a result as a protobuf message."""
    message = _pass_message(result) if isinstance(result, PassResult) else _sampling_message(result)
    return message.SerializeToString()


def to_json(result: Any) -> bytes:
    """Return a result as JSON, for old clients and for results without a protobuf form."""
    if isinstance(result, PassResult):
        result = _pass_dict(result)
    elif isinstance(result, SamplingResult):
        result = _sampling_dict(result)
    elif isinstance(result.get("metrics"), Mapping):
        # JSON lacks a form for numbers that are not finite, and some parsers refuse the usual ones.
        finite = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
        result = {**result, "metrics": finite}
    return json.dumps(result, separators=(",", ":")).encode()


def _float_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


# ---- forward and backward


def _pass_message(result: PassResult) -> wire_pb2.ForwardBackwardOutput:
    message = wire_pb2.ForwardBackwardOutput(loss_fn_output_type=RECORD, metrics=dict(result.metrics))
    # A record holds arrays of one trailing shape: K of [T, K] may differ by datum.
    for shape, group in itertools.groupby(result.logprobs, key=lambda array: array.shape[1:]):
        arrays = list(group)
        offsets = np.cumsum([0, *(array.size * 4 for array in arrays)], dtype="<i8")
        field = wire_pb2.BatchedTensor(
            data=b"".join(_float_bytes(array) for array in arrays),
            offsets=offsets.tobytes(),
            dtype=wire_pb2.DTYPE_FLOAT32,
            trailing_shape=shape,
        )
        message.loss_fn_outputs.add(type_tag=RECORD, fields={"logprobs": field}, num_datums=len(arrays))
    return message


def _pass_dict(result: PassResult) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}}
        for array in (np.asarray(logprobs, np.float32) for logprobs in result.logprobs)
    ]
    return {"loss_fn_output_type": RECORD, "loss_fn_outputs": outputs, "metrics": dict(result.metrics)}


# ---- samples


def _sampling_message(result: SamplingResult) -> wire_pb2.SampleResponse:
    message = wire_pb2.SampleResponse(sequences=[_answer_message(answer) for answer in result.answers])
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _float_bytes(result.prompt_logprobs)
    if result.prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top_message(result.prompt_top))
    return message


def _answer_message(answer: SampledAnswer) -> wire_pb2.SampledSequence:
    message = wire_pb2.SampledSequence(
        stop_reason=STOP_REASONS[answer.stop_reason],
        tokens=np.ascontiguousarray(answer.tokens, "<i4").tobytes(),
        logprobs=_float_bytes(answer.logprobs),
    )
    if answer.top is not None:
        message.topk_sampled_logprobs.CopyFrom(_top_message(answer.top))
    return message


def _top_message(top: TopLogprobs) -> wire_pb2.TopkLogprobs:
    length, k = top.ids.shape
    missing = np.isnan(top.logprobs)
    return wire_pb2.TopkLogprobs(
        token_ids=np.where(missing, 0, top.ids).astype("<i4").tobytes(),
        logprobs=_float_bytes(np.where(missing, np.float32(MISSING_LOGPROB), top.logprobs)),
        k=k,
        length=length,
    )


def _sampling_dict(result: SamplingResult) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": answer.stop_reason,
            "tokens": np.asarray(answer.tokens).tolist(),
            "logprobs": np.asarray(answer.logprobs).tolist(),
        }
        for answer in result.answers
    ]
    return {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": None if result.prompt_logprobs is None else _with_nulls(result.prompt_logprobs.tolist()),
        "topk_prompt_logprobs": None if result.prompt_top is None else _top_lists(result.prompt_top),
    }


def _with_nulls(numbers: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(number) else number for number in numbers]


def _top_lists(top: TopLogprobs) -> list[list[tuple[int, float]] | None]:
    """Return pairs of token and log-prob by position; ``None`` for a position without a distribution."""
    rows = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    lists = [[pair for pair in zip(*row, strict=True) if not math.isnan(pair[1])] for row in rows]
    return [pairs or None for pairs in lists]
