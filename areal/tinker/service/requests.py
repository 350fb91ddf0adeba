"""Content of requests as the HTTP layer decodes it, before validation, and the answers. Fields have the protocol's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a request.

    Attributes:
        dtype: name in the protocol: ``float32``, ``int64``, ``int32`` or ``bfloat16``.
        shape: shape that the client states; ``None`` for a flat list.
        values: elements as one flat numpy array (bfloat16 as float32). Of a sparse tensor, its non-zero elements.
        crow_indices, col_indices: int64 index arrays of a sparse CSR tensor; ``None`` for a dense one.
    """

    dtype: str
    values: np.ndarray
    shape: tuple[int, ...] | None = None
    crow_indices: np.ndarray | None = None
    col_indices: np.ndarray | None = None


@dataclass(frozen=True)
class RawChunk:
    """A chunk of a model input: ``tokens`` (int64 ``[n]``) if ``kind`` is ``encoded_text``."""

    kind: str
    tokens: np.ndarray | None = None


@dataclass(frozen=True)
class RawDatum:
    """A training sample. ``spans`` are its provenance spans as JSON values, which are stored only."""

    model_input: Sequence[RawChunk]
    loss_fn_inputs: Mapping[str, RawTensor]
    spans: Sequence[Any] = ()


@dataclass(frozen=True)
class Sample:
    """asample. ``sampling_session_id``, or ``base_model`` or ``model_path`` of old clients, names the weights."""

    digest: bytes
    prompt: Sequence[RawChunk]
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: RawTensor | None = None
    record_stability_info: bool = False


@dataclass(frozen=True)
class Submitted:
    """Answer to a request whose result is a future. ``sample_sequence_ids`` has one id per answer of a sampling request."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None


FutureState = Literal["pending", "done", "failed", "gone"]
"""``gone``: the result was lost with an earlier server process, and the client may send the request again (sampling only)."""


@dataclass(frozen=True)
class Outcome:
    """State of a future.

    Attributes:
        state: see :data:`FutureState`.
        kind: kind of the request, such as ``forward_backward``.
        result: :class:`~areal.tinker.backends.prepared.PassResult`, :class:`~areal.tinker.backends.prepared.SamplingResult`, or a dict of the
            JSON answer.
        error, category: message and ``user``, ``server`` or ``unknown`` of a failed request.
        queue_state: ``active`` or ``paused_capacity`` of a pending request.
        result_bytes: size of the stored result.
    """

    state: FutureState
    kind: str
    result: Any = None
    error: str | None = None
    category: str | None = None
    queue_state: str = "active"
    result_bytes: int = 0
