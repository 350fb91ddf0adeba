"""Stored form of results: a JSON header, and the arrays after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from areal.tinker.backends.prepared import PassResult, SampledAnswer, SamplingResult, TopLogprobs


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
    # Size of the header, header, arrays.
    header["arrays"] = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps(header).encode()
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)]
    )


def decode_result(blob: bytes) -> Any:
    """Return what :func:`encode_result` received."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    arrays = _arrays(blob, 8 + size, header["arrays"])
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


def _top(top: TopLogprobs | None) -> list[np.ndarray]:
    return [] if top is None else [np.asarray(top.ids, np.int32), np.asarray(top.logprobs, np.float32)]


def _arrays(blob: bytes, offset: int, described: list[Any]) -> Iterator[np.ndarray]:
    for dtype, shape in described:
        count = int(np.prod(shape))
        yield np.frombuffer(blob, np.dtype(dtype), count, offset).reshape(shape)
        offset += count * np.dtype(dtype).itemsize
