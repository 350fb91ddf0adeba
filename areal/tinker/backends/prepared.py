"""Validated requests as a backend receives them, its results, and the stored form of both. Arrays are numpy's, in the caller's order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import numpy as np

Scalar = float | str
"""Value of a loss configuration."""


@dataclass(frozen=True)
class AdapterSpec:
    """Adapter of a model.

    Attributes:
        rank: rank of its factors, at least 1.
        seed: seed of its initial factors; ``None`` lets the backend draw one.
        attention, mlp, head: kinds of layers that have factors; at least one is true.
        alpha: numerator of its scale ``alpha / rank``, above 0; ``None`` for that of the backend.
    """

    rank: int
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    head: bool = True
    alpha: float | None = None


@dataclass(frozen=True)
class Datum:
    """One training sample of ``T`` tokens. Index ``t`` refers to the prediction made at position ``t``.

    Attributes:
        input_ids: int64 ``[T]``, each within the vocabulary.
        target_ids: int64 ``[T]`` or ``[T, K]``, each within the vocabulary. Sparse tensors of the protocol are dense here.
        values: float32 arrays of the shape of ``target_ids`` by the protocol's name: ``weights``, ``logprobs``, ``advantages``,
            ``sequence_ratio_mask``. Exactly those that the loss reads; finite.
    """

    input_ids: np.ndarray
    target_ids: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PreparedBatch:
    """One forward or forward_backward request, after validation.

    Attributes:
        model_id: model that the request names.
        data: samples; at least one.
        loss: name of the loss in the protocol.
        config: configuration of the loss, with known keys only; missing keys have their defaults.
    """

    model_id: str
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(datum.input_ids) for datum in self.data)


@dataclass(frozen=True)
class PassResult:
    """Result of one forward or forward_backward request.

    Attributes:
        logprobs: for each datum, float32 log-probs of its targets in nats, of the shape of its ``target_ids``.
        metrics: numbers by name with the suffix of their reduction; ``loss:sum`` is always there.
    """

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdamParams:
    """Settings of one optimizer step. A ``grad_clip_norm`` of 0 does not clip. The defaults are those of the protocol."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingRequest:
    """A request for answers to one prompt, after validation.

    Attributes:
        prompt: token ids; at least one.
        num_samples: number of answers.
        max_tokens: maximum number of tokens of an answer; ``None`` for as many as the context allows. 0: only the prompt is scored, and
            answers are empty.
        seed: seed of the request; answer ``i`` is the same whatever else the server does. ``None`` draws one.
        stop_strings, stop_token_ids: ends of an answer; ``None`` for both means the model's own end tokens.
        temperature, top_k, top_p: distribution from which tokens are drawn; ``top_k`` of -1 keeps all tokens.
        prompt_logprobs: whether to return the log-probs of the prompt's tokens.
        prompt_top_k, sample_top_k: number of most likely tokens to return at each position of the prompt and of an answer.
    """

    prompt: Sequence[int]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    prompt_top_k: int = 0
    sample_top_k: int = 0


@dataclass(frozen=True)
class TopLogprobs:
    """The ``k`` most likely tokens at ``n`` positions: ``ids`` int32 and ``logprobs`` float32, both ``[n, k]``, the most likely first.

    A position without a distribution (the first of a prompt) has the id 0 and a log-prob of NaN. A token that ``top_k`` or ``top_p`` excludes
    has the log-prob ``-inf``.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampledAnswer:
    """One answer: ``tokens`` int32 ``[n]``, ``logprobs`` float32 ``[n]`` of the distribution that was drawn from."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class SamplingResult:
    """Result of a sampling request. ``prompt_logprobs`` is float32 ``[len(prompt)]`` with NaN for the first token."""

    answers: Sequence[SampledAnswer]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: TopLogprobs | None = None


def encode_result(result: Any) -> bytes:
    """Return the bytes of a :class:`PassResult`, a :class:`SamplingResult` or a dict of the JSON answer."""
    arrays: list[np.ndarray] = []
    if isinstance(result, PassResult):
        # One array for all samples: a request has up to a thousand of them.
        rows = [np.asarray(row, dtype=np.float32) for row in result.logprobs]
        arrays.append(np.concatenate([row.reshape(-1) for row in rows]) if rows else np.zeros(0, np.float32))
        header: dict[str, Any] = {
            "type": "pass",
            "shapes": [row.shape for row in rows],
            "metrics": {name: float(value) for name, value in result.metrics.items()},
        }
    elif isinstance(result, SamplingResult):
        answers = []
        for answer in result.answers:
            arrays += [np.asarray(answer.tokens, np.int32), np.asarray(answer.logprobs, np.float32), *_top(answer.top)]
            answers.append({"stop_reason": answer.stop_reason, "top": answer.top is not None})
        arrays += [] if result.prompt_logprobs is None else [np.asarray(result.prompt_logprobs, np.float32)]
        arrays += _top(result.prompt_top)
        header = {"type": "samples", "answers": answers}
        header |= {"prompt": result.prompt_logprobs is not None, "prompt_top": result.prompt_top is not None}
    else:
        header = {"type": "json", "value": result}
    return _join(header, arrays)


def _join(header: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Return the size of the header, the header and the arrays."""
    header["arrays"] = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps(header).encode()
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)]
    )


def _divide(blob: bytes) -> tuple[dict[str, Any], Iterator[np.ndarray]]:
    """Return the header and the arrays."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    return header, _arrays(blob, 8 + size, header["arrays"])


def decode_result(blob: bytes) -> Any:
    """Return what :func:`encode_result` received."""
    header, arrays = _divide(blob)
    if header["type"] == "pass":
        flat, shapes = next(arrays), [tuple(shape) for shape in header["shapes"]]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        rows = np.split(flat, ends[:-1]) if shapes else []
        return PassResult([row.reshape(shape) for row, shape in zip(rows, shapes, strict=True)], header["metrics"])
    if header["type"] == "samples":
        answers = [
            SampledAnswer(
                stop_reason=answer["stop_reason"],
                tokens=next(arrays),
                logprobs=next(arrays),
                top=TopLogprobs(next(arrays), next(arrays)) if answer["top"] else None,
            )
            for answer in header["answers"]
        ]
        prompt = next(arrays) if header["prompt"] else None
        return SamplingResult(
            answers, prompt, TopLogprobs(next(arrays), next(arrays)) if header["prompt_top"] else None
        )
    return header["value"]


def encode_request(request: Any) -> bytes:
    """Return the bytes of a dataclass whose fields are JSON values, bytes, arrays, or dataclasses of them."""
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if is_dataclass(value):
            return {
                "type": type(value).__name__,
                "fields": {f.name: plain(getattr(value, f.name)) for f in fields(value)},
            }
        if isinstance(value, Mapping):
            return {"mapping": {name: plain(each) for name, each in value.items()}}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return _join({"request": plain(request)}, arrays)


def decode_request(blob: bytes, types: Mapping[str, type]) -> Any:
    """Return what :func:`encode_request` received, with lists for tuples.

    Args:
        types: dataclasses that may occur, by name.

    Raises:
        KeyError: another dataclass occurs.
    """
    header, stored = _divide(blob)
    arrays = list(stored)

    def value(plain: Any) -> Any:
        if isinstance(plain, list):
            return [value(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        if "array" in plain:
            return arrays[plain["array"]]
        if "bytes" in plain:
            return bytes.fromhex(plain["bytes"])
        if "mapping" in plain:
            return {name: value(each) for name, each in plain["mapping"].items()}
        return types[plain["type"]](**{name: value(each) for name, each in plain["fields"].items()})

    return value(header["request"])


def _top(top: TopLogprobs | None) -> list[np.ndarray]:
    return [] if top is None else [np.asarray(top.ids, np.int32), np.asarray(top.logprobs, np.float32)]


def _arrays(blob: bytes, offset: int, described: list[Any]) -> Iterator[np.ndarray]:
    for dtype, shape in described:
        count = int(np.prod(shape))
        yield np.frombuffer(blob, np.dtype(dtype), count, offset).reshape(shape)
        offset += count * np.dtype(dtype).itemsize
