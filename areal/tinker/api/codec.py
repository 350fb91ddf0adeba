"""Requests of the service from protobuf and JSON bodies, and its results as both."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from areal.tinker.api import schemas, wire_pb2
from areal.tinker.api.error_replies import BodyError, field_errors
from areal.tinker.backends.prepared import PassResult, SampledAnswer, SamplingResult, TopLogprobs
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor, Sample
from areal.tinker.service.verbs.forward_backward import Forward, ForwardBackward
from areal.tinker.service.verbs.verb import RefusedRequest

DTYPES: dict[int, tuple[str, np.dtype[Any]]] = {
    wire_pb2.DTYPE_FLOAT32: ("float32", np.dtype("<f4")),
    wire_pb2.DTYPE_INT64: ("int64", np.dtype("<i8")),
    wire_pb2.DTYPE_INT32: ("int32", np.dtype("<i4")),
    wire_pb2.DTYPE_BFLOAT16: ("bfloat16", np.dtype("<u2")),
}
"""Name and layout in bytes of each data type of the protocol."""


def digest(body: bytes) -> bytes:
    """Return the hash by which a repeated request is recognised."""
    return hashlib.blake2b(body, digest_size=16).digest()


def body_digest(body: schemas.Body) -> bytes:
    """Return the hash of a JSON body."""
    return digest(body.model_dump_json().encode())


# ---- protobuf


def forward_backward_from_protobuf(body: bytes, kind: type[ForwardBackward] = ForwardBackward) -> ForwardBackward:
    """Decode a protobuf body. Arrays are views of the message's bytes where the layout allows.

    Args:
        body: the message.
        kind: request of the route. A message with ``forward_only`` is a :class:`Forward` on any.

    Raises:
        BodyError: the body is not a message of the protocol.
    """
    message = wire_pb2.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        data = [_datum(datum) for datum in message.data]
    except (DecodeError, ValueError) as error:
        raise BodyError(400, f"The body is not a ForwardBackwardRequest: {error}") from None
    if message.seq_id < 0:
        raise BodyError(400, f"seq_id={message.seq_id} must be at least 1")
    # Version 2 of the configuration has text values too; old clients send the first one only.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    verb = Forward if message.forward_only else kind
    return verb(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        # A client that repeats a request may serialize its maps in another order.
        digest=digest(message.SerializeToString(deterministic=True)),
        data=data,
        loss_fn=message.loss_fn,
        loss_fn_config=config,
    )


def _datum(message: wire_pb2.Datum) -> RawDatum:
    spans = [
        {
            "field": field,
            "kind": span.WhichOneof("span"),
            **_run(getattr(span, span.WhichOneof("span") or "prompt_tokens")),
        }
        for field, runs in (("model_input", message.model_input_spans), ("loss_fn_inputs", message.loss_fn_input_spans))
        for span in runs
    ]
    inputs = {name: _tensor(name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    return RawDatum([_chunk(chunk) for chunk in message.model_input], inputs, spans)


def _run(run: wire_pb2.TokenRun) -> dict[str, Any]:
    return {"sequence_id": run.sequence_id, "offset": run.offset, "length": run.length}


def _chunk(message: wire_pb2.Chunk) -> RawChunk:
    kind = message.WhichOneof("chunk") or "empty"
    if kind != "encoded_text":
        return RawChunk(kind)
    return RawChunk(kind, np.frombuffer(message.encoded_text.tokens, "<i4").astype(np.int64))


def _tensor(name: str, message: wire_pb2.Tensor) -> RawTensor:
    if message.dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {message.dtype} is not one of {[known for known, _ in DTYPES.values()]}")
    dtype, layout = DTYPES[message.dtype]
    sparse = message.WhichOneof("encoding") == "sparse_csr"
    values = np.frombuffer(message.sparse_csr.values if sparse else message.dense, layout)
    if dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    shape = tuple(message.shape) or None
    if not sparse:
        return RawTensor(dtype, values, shape)
    crow, col = (
        np.frombuffer(part, "<i8") for part in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices)
    )
    return RawTensor(dtype, values, shape, crow, col)


# ---- JSON


def pass_from_json(body: bytes, kind: type[ForwardBackward]) -> ForwardBackward | RefusedRequest:
    """Decode the JSON body of ``forward`` or ``forward_backward``.

    Raises:
        BodyError: the body is not JSON, or has wrong fields and no place in the order of a model.
    """
    name = f"{kind.kind}_input"
    try:
        parsed = schemas.PassBody.model_validate_json(body)
        given: schemas.PassInput | None = getattr(parsed, name)
        wrong = None if given is not None else f"{name}: field required"
    except ValidationError as error:
        given, wrong = None, field_errors(error.errors())
    if given is None:
        return _refused(body, wrong or "")
    shared: dict[str, Any] = {"model_id": parsed.model_id, "seq_id": parsed.seq_id or None, "digest": digest(body)}
    if (refusal := parsed.refusal()) is not None:
        return RefusedRequest(**shared, message=refusal)
    try:
        data = [_datum_from_json(datum) for datum in given.data]
    except (ValueError, TypeError, OverflowError) as error:
        return RefusedRequest(**shared, message=f"{name}.data: {error}")
    return kind(**shared, data=data, loss_fn=given.loss_fn, loss_fn_config=given.loss_fn_config or {})


def _refused(body: bytes, message: str) -> RefusedRequest:
    """Return a request that fails in its turn.

    Raises:
        BodyError: the body does not say when its turn is.
    """
    with contextlib.suppress(ValueError, RecursionError):
        if (refused := refused_request(json.loads(body), message)) is not None:
            return refused
    raise BodyError(422, message)


def refused_request(body: Any, message: str) -> RefusedRequest | None:
    """Return a request that fails in its turn, for a JSON body with wrong fields; ``None`` without a place in the order of a model."""
    if not isinstance(body, dict) or "session_id" in body:
        return None
    try:
        place = schemas.SequencedBody.model_validate({name: body.get(name) for name in ("model_id", "seq_id")})
    except ValidationError:
        return None
    if not place.seq_id:
        return None
    content = digest(json.dumps(body, sort_keys=True, default=str).encode())
    return RefusedRequest(place.model_id, place.seq_id, content, message=message)


def _datum_from_json(datum: schemas.DatumBody) -> RawDatum:
    spans = [
        {"field": field, **span}
        for field, runs in (("model_input", datum.model_input_spans), ("loss_fn_inputs", datum.loss_fn_input_spans))
        for span in runs or ()
    ]
    inputs = {name: tensor_from_json(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return RawDatum(chunks_from_json(datum.model_input), inputs, spans)


def chunks_from_json(prompt: schemas.PromptBody) -> list[RawChunk]:
    """Return the chunks of a prompt."""
    return [
        RawChunk(chunk.type, np.asarray(chunk.tokens or (), np.int64) if chunk.type == "encoded_text" else None)
        for chunk in prompt.chunks
    ]


def tensor_from_json(name: str, tensor: schemas.TensorBody) -> RawTensor:
    """Return a tensor whose elements are given as a list. Null is NaN.

    Raises:
        ValueError: an element is not a number of the tensor's type.
    """
    kinds = "i" if tensor.dtype == "int64" else "if"
    # Clients send null for NaN, for which JSON lacks a form.
    elements = [math.nan if element is None else element for element in tensor.data]
    values = np.asarray(elements) if elements else np.empty(0, tensor.dtype)
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise ValueError(f"{name}.data must be a flat list of numbers of the type {tensor.dtype}")
    indices = [
        None if given is None else np.asarray(given, np.int64)
        for given in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    ]
    if (indices[0] is None) != (indices[1] is None):
        raise ValueError(f"{name}: a sparse tensor needs both sparse_crow_indices and sparse_col_indices")
    shape = None if tensor.shape is None else tuple(tensor.shape)
    return RawTensor(tensor.dtype, values.astype(tensor.dtype), shape, *indices)


def sample_from_json(body: schemas.SampleBody) -> Sample:
    """Return a sampling request.

    Raises:
        ValueError: an element of ``target_prompt_logprobs`` is not a number of its type.
    """
    target = body.target_prompt_logprobs
    return Sample(
        digest=body_digest(body),
        prompt=chunks_from_json(body.prompt),
        sampling_session_id=body.sampling_session_id,
        base_model=body.base_model,
        model_path=body.model_path,
        seq_id=body.seq_id,
        num_samples=body.num_samples,
        sampling_params=body.sampling_params,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        target_prompt_logprobs=None if target is None else tensor_from_json("target_prompt_logprobs", target),
        record_stability_info=bool(body.record_stability_info),
    )


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
