"""Request bodies as the SDK sends them."""

from __future__ import annotations

from typing import Any

import numpy as np

from areal.tinker.api import wire_pb2


def tensor(values: Any, dtype: type = np.float32) -> wire_pb2.Tensor:
    """Return a dense tensor."""
    array = np.asarray(values, dtype)
    kind = wire_pb2.DTYPE_FLOAT32 if dtype is np.float32 else wire_pb2.DTYPE_INT64
    return wire_pb2.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def sparse(
    values: Any, crow: list[int], col: list[int], shape: tuple[int, int], dtype: type = np.float32
) -> wire_pb2.Tensor:
    """Return a sparse tensor."""
    parts = wire_pb2.SparseCsr(
        values=np.asarray(values, dtype).tobytes(),
        crow_indices=np.asarray(crow, np.int64).tobytes(),
        col_indices=np.asarray(col, np.int64).tobytes(),
    )
    kind = wire_pb2.DTYPE_FLOAT32 if dtype is np.float32 else wire_pb2.DTYPE_INT64
    return wire_pb2.Tensor(sparse_csr=parts, dtype=kind, shape=shape)


def datum(tokens: list[int], **inputs: wire_pb2.Tensor) -> wire_pb2.Datum:
    """Return a sample of one chunk of tokens."""
    chunk = wire_pb2.Chunk(encoded_text=wire_pb2.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes()))
    return wire_pb2.Datum(model_input=[chunk], loss_fn_inputs=inputs)


def cross_entropy_request(**fields: Any) -> wire_pb2.ForwardBackwardRequest:
    """Return a request with two samples, one dense and one sparse."""
    dense = datum([1, 2, 3], target_tokens=tensor([2, 3, 4], np.int64), weights=tensor([1.0, -0.5, 0.0]))
    targets = sparse([7, 8], [0, 1, 2], [0, 1], (2, 2), np.int64)
    ragged = datum([5, 6], target_tokens=targets, weights=sparse([1.0, 2.0], [0, 1, 2], [0, 1], (2, 2)))
    defaults: dict[str, Any] = {
        "model_id": "s:train:0",
        "seq_id": 3,
        "loss_fn": "cross_entropy",
        "data": [dense, ragged],
    }
    return wire_pb2.ForwardBackwardRequest(**{**defaults, **fields})


def cross_entropy_json(**fields: Any) -> dict[str, Any]:
    """Return the dense sample of :func:`cross_entropy_request` in the JSON form of old clients."""
    inputs = {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, -0.5, 0.0], "dtype": "float32", "shape": [3]},
    }
    chunks = [{"tokens": [1, 2, 3], "type": "encoded_text"}]
    given = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
    return {"model_id": "s:train:0", "seq_id": 3, "forward_backward_input": given, **fields}


PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON_BODIES: dict[str, dict[str, Any]] = {
    "client/config": {"sdk_version": "0.38.0"},
    "client/dynamic_config": {"sdk_version": "0.38.0"},
    "create_session": {"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "0.38.0", "type": "create_session"},
    "session_heartbeat": {"session_id": "session-1", "type": "session_heartbeat"},
    "sessions/session-1/finish": {"reason": {"type": "success"}, "detail": None},
    "telemetry": {"events": [], "platform": "linux", "sdk_version": "0.38.0", "session_id": "x"},
    "create_model": {
        "session_id": "session-1",
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 8, "train_mlp": True, "train_attn": True, "train_unembed": True},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    },
    "get_info": {"model_id": "s:train:0", "type": "get_info"},
    "unload_model": {"model_id": "s:train:0", "type": "unload_model"},
    "forward_backward": cross_entropy_json(),
    "forward": {"model_id": "s:train:0", "seq_id": 3, "forward_input": cross_entropy_json()["forward_backward_input"]},
    "optim_step": {"model_id": "s:train:0", "seq_id": 4, "adam_params": {"learning_rate": 1e-3, "eps": 1e-12}},
    "save_weights": {"model_id": "s:train:0", "seq_id": 5, "path": "a", "ttl_seconds": 3600, "overwrite": False},
    "save_weights_for_sampler": {
        "model_id": "s:train:0",
        "seq_id": 6,
        "sampling_session_seq_id": 0,
        "kind": "snapshot",
    },
    "save_weights_external": {"model_id": "s:train:0", "seq_id": 7, "path": "a"},
    "load_weights": {"session_id": "session-1", "model_seq_id": 1, "path": "tinker://r/weights/a", "optimizer": True},
    "create_sampling_session": {"session_id": "session-1", "sampling_session_seq_id": 0, "base_model": "tiny"},
    "asample": {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "stop": ["x"], "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    },
    "retrieve_future": {"request_id": "lost", "allow_metadata_only": True},
    "cancel_future": {"request_id": "a"},
    "weights_info": {"tinker_path": "tinker://r/weights/a"},
    "training_runs/r/checkpoints/weights/a/publish": {},
    "auth/token": {},
}
"""A body of every POST route."""
