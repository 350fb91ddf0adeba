"""Requests decoded from both forms, and results in both forms."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from areal.tests.tinker.api.bodies import cross_entropy_json, cross_entropy_request, tensor
from areal.tinker.api import wire_pb2
from areal.tinker.api.codec import (
    MISSING_LOGPROB,
    forward_backward_from_protobuf,
    pass_from_json,
    sample_from_json,
    to_json,
    to_protobuf,
)
from areal.tinker.api.error_replies import BodyError
from areal.tinker.api.schemas import OptimStepBody, SampleBody
from areal.tinker.backends.prepared import PassResult, SampledAnswer, SamplingResult, TopLogprobs
from areal.tinker.service.verbs.forward_backward import Forward, ForwardBackward
from areal.tinker.service.verbs.verb import RefusedRequest


def test_protobuf_request() -> None:
    message = cross_entropy_request(forward_only=True, loss_fn_config={"old": 1.0, "both": 1.0})
    message.loss_fn_config_v2["both"].number = 2.0
    message.loss_fn_config_v2["named"].text = "x"
    message.data[0].loss_fn_input_spans.add(sampled_tokens=wire_pb2.TokenRun(sequence_id="a", offset=2, length=3))
    request = forward_backward_from_protobuf(message.SerializeToString())
    assert type(request) is Forward
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 3, "cross_entropy")
    assert request.loss_fn_config == {"old": 1.0, "both": 2.0, "named": "x"}
    dense, ragged = request.data
    assert dense.model_input[0].tokens is not None
    assert dense.model_input[0].tokens.tolist() == [1, 2, 3]
    assert dense.model_input[0].tokens.dtype == np.int64
    assert dense.loss_fn_inputs["weights"].values.tolist() == [1.0, -0.5, 0.0]
    assert dense.loss_fn_inputs["weights"].shape == (3,)
    assert dense.spans == [
        {"field": "loss_fn_inputs", "kind": "sampled_tokens", "sequence_id": "a", "offset": 2, "length": 3}
    ]
    targets = ragged.loss_fn_inputs["target_tokens"]
    assert (targets.dtype, targets.shape, targets.values.tolist()) == ("int64", (2, 2), [7, 8])
    assert targets.crow_indices is not None
    assert targets.col_indices is not None
    assert (targets.crow_indices.tolist(), targets.col_indices.tolist()) == ([0, 1, 2], [0, 1])


def test_route_and_message_may_both_ask_for_a_forward_only() -> None:
    for message, route, expected in (
        (cross_entropy_request(), ForwardBackward, ForwardBackward),
        (cross_entropy_request(), Forward, Forward),
        (cross_entropy_request(forward_only=True), ForwardBackward, Forward),
        (cross_entropy_request(forward_only=True), Forward, Forward),
    ):
        assert type(forward_backward_from_protobuf(message.SerializeToString(), route)) is expected


def test_digest_ignores_the_order_of_maps_and_sees_every_value() -> None:
    message = cross_entropy_request()
    inputs = message.data[0].loss_fn_inputs
    first = forward_backward_from_protobuf(message.SerializeToString()).digest
    # The same entries, added in the other order.
    weights, targets = wire_pb2.Tensor(), wire_pb2.Tensor()
    weights.CopyFrom(inputs["weights"])
    targets.CopyFrom(inputs["target_tokens"])
    inputs.clear()
    inputs["weights"].CopyFrom(weights)
    inputs["target_tokens"].CopyFrom(targets)
    assert forward_backward_from_protobuf(message.SerializeToString()).digest == first
    inputs["weights"].CopyFrom(tensor([1.0, -0.5, 1e-30]))
    assert forward_backward_from_protobuf(message.SerializeToString()).digest != first


def test_bfloat16_int32_and_other_chunks() -> None:
    message = cross_entropy_request()
    halves = np.asarray([1.5, -2.0], np.float32).view(np.uint32) >> 16
    message.data[0].loss_fn_inputs["weights"].CopyFrom(
        wire_pb2.Tensor(dense=halves.astype("<u2").tobytes(), dtype=wire_pb2.DTYPE_BFLOAT16)
    )
    message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(
        wire_pb2.Tensor(dense=np.asarray([4, 5], "<i4").tobytes(), dtype=wire_pb2.DTYPE_INT32)
    )
    message.data[0].model_input.add(image=wire_pb2.Image(data=b"x", format="png"))
    message.data[0].model_input.add()
    datum = forward_backward_from_protobuf(message.SerializeToString()).data[0]
    weights, targets = datum.loss_fn_inputs["weights"], datum.loss_fn_inputs["target_tokens"]
    assert (weights.dtype, weights.values.tolist(), weights.shape) == ("bfloat16", [1.5, -2.0], None)
    assert (targets.dtype, targets.values.tolist()) == ("int32", [4, 5])
    assert [chunk.kind for chunk in datum.model_input] == ["encoded_text", "image", "empty"]


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff",
        cross_entropy_request().SerializeToString()[:-5],
        cross_entropy_request(seq_id=-1).SerializeToString(),
        cross_entropy_request(
            data=[wire_pb2.Datum(loss_fn_inputs={"weights": wire_pb2.Tensor(dense=b"123", dtype=1)})]
        ).SerializeToString(),
        cross_entropy_request(
            data=[wire_pb2.Datum(loss_fn_inputs={"weights": wire_pb2.Tensor(dense=b"1234")})]
        ).SerializeToString(),
    ],
)
def test_malformed_protobuf_is_a_bad_request(bad: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        forward_backward_from_protobuf(bad)
    assert caught.value.status == 400


def test_json_request_equals_the_protobuf_request() -> None:
    decoded = pass_from_json(json.dumps(cross_entropy_json()).encode(), ForwardBackward)
    assert isinstance(decoded, ForwardBackward)
    other = forward_backward_from_protobuf(cross_entropy_request().SerializeToString())
    assert (decoded.model_id, decoded.seq_id, decoded.loss_fn) == (other.model_id, other.seq_id, other.loss_fn)
    for name, expected in other.data[0].loss_fn_inputs.items():
        actual = decoded.data[0].loss_fn_inputs[name]
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual.values, expected.values)
        assert actual.values.dtype == expected.values.dtype


def with_weights(**fields: object) -> bytes:
    body = cross_entropy_json()
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"].update(fields)
    return json.dumps(body).encode()


def test_json_null_is_nan_and_sparse_indices_arrive() -> None:
    decoded = pass_from_json(with_weights(data=[1, None, 2.5]), ForwardBackward)
    assert isinstance(decoded, ForwardBackward)
    np.testing.assert_array_equal(decoded.data[0].loss_fn_inputs["weights"].values, np.float32([1, np.nan, 2.5]))
    sparse = with_weights(data=[1.0], shape=[1, 3], sparse_crow_indices=[0, 1], sparse_col_indices=[2])
    decoded = pass_from_json(sparse, ForwardBackward)
    assert isinstance(decoded, ForwardBackward)
    weights = decoded.data[0].loss_fn_inputs["weights"]
    assert weights.crow_indices is not None
    assert weights.crow_indices.tolist() == [0, 1]


@pytest.mark.parametrize("elements", [["a"], [[1.0]], [[1.0], [2.0, 3.0]], [True], [10**30], [{}]])
def test_elements_that_are_no_numbers_fail_in_their_turn(elements: list[object]) -> None:
    """An answer of status 422 would leave a gap in the order of the model."""
    decoded = pass_from_json(with_weights(data=elements), ForwardBackward)
    assert isinstance(decoded, RefusedRequest)
    assert (decoded.model_id, decoded.seq_id) == ("s:train:0", 3)
    assert "weights.data" in decoded.message or "data" in decoded.message


def test_fractions_are_no_token_ids() -> None:
    decoded = pass_from_json(with_weights(data=[1.5], dtype="int64"), ForwardBackward)
    assert isinstance(decoded, RefusedRequest)


def test_optim_step_and_sample_from_json() -> None:
    step = OptimStepBody(model_id="m", adam_params={"learning_rate": None, "beta1": 0.5}).fields()
    assert np.isnan(step["params"]["learning_rate"])
    assert (step["params"]["beta1"], step["optimizer"]) == (0.5, "adamw")
    other = OptimStepBody(model_id="m", optimizer_params={"type": "dimuon", "learning_rate": 1.0})
    assert other.fields() == {"params": {"learning_rate": 1.0}, "optimizer": "dimuon"}
    body = {
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"type": "image"}]},
        "sampling_params": {"stop": []},
        "num_samples": 3,
    }
    sample = sample_from_json(SampleBody.model_validate(body))
    assert [chunk.kind for chunk in sample.prompt] == ["encoded_text", "image"]
    assert (sample.num_samples, sample.sampling_params, sample.prompt_logprobs) == (3, {"stop": []}, False)


# ---- results

RAGGED = PassResult(
    [np.float32([-1, -2]), np.float32([[-1, -2], [-3, -4]]), np.zeros((0,), np.float32)], {"loss:sum": 2.5}
)


def test_records_hold_arrays_of_one_trailing_shape() -> None:
    message = wire_pb2.ForwardBackwardOutput.FromString(to_protobuf(RAGGED))
    assert [record.num_datums for record in message.loss_fn_outputs] == [1, 1, 1]
    assert dict(message.metrics) == {"loss:sum": 2.5}
    field = message.loss_fn_outputs[1].fields["logprobs"]
    assert list(field.trailing_shape) == [2]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 16]
    assert np.frombuffer(field.data, "<f4").tolist() == [-1, -2, -3, -4]
    many = wire_pb2.ForwardBackwardOutput.FromString(to_protobuf(PassResult([np.float32([1, 2]), np.float32([3])], {})))
    assert np.frombuffer(many.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 12]


def test_json_results() -> None:
    outputs = json.loads(to_json(RAGGED))["loss_fn_outputs"]
    assert outputs[1] == {"logprobs": {"data": [-1, -2, -3, -4], "dtype": "float32", "shape": [2, 2]}}
    metrics = json.loads(to_json({"metrics": {"a:mean": float("inf"), "b:mean": 1.0}}), parse_constant=pytest.fail)
    assert metrics == {"metrics": {"b:mean": 1.0}}


def test_samples_in_both_forms() -> None:
    nan = float("nan")
    top = TopLogprobs(np.int32([[0, 0], [4, 5]]), np.float32([[nan, nan], [-1, -2]]))
    answer = SampledAnswer("stop", np.int32([9, 8]), np.float32([-0.5, -1.5]), top)
    result = SamplingResult([answer], np.float32([nan, -2]), top)
    message = wire_pb2.SampleResponse.FromString(to_protobuf(result))
    assert message.sequences[0].stop_reason == wire_pb2.STOP_REASON_STOP
    assert np.frombuffer(message.sequences[0].tokens, "<i4").tolist() == [9, 8]
    matrix = np.frombuffer(message.topk_prompt_logprobs.logprobs, "<f4").reshape(2, 2)
    assert matrix.tolist() == [[MISSING_LOGPROB, MISSING_LOGPROB], [-1, -2]]
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")[0])
    form = json.loads(to_json(result), parse_constant=pytest.fail)
    assert form["prompt_logprobs"] == [None, -2.0]
    assert form["topk_prompt_logprobs"] == [None, [[4, -1.0], [5, -2.0]]]
    assert form["sequences"] == [{"stop_reason": "stop", "tokens": [9, 8], "logprobs": [-0.5, -1.5]}]


def test_the_http_layer_imports_no_torch() -> None:
    code = "import sys, areal.tinker.api.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
