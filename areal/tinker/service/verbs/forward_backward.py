"""Verbs that compute a loss, ``forward`` and ``forward_backward``, and the validation of their samples, before any compute.

Each refusal is a :class:`UserError` of one request. A request has up to a thousand samples: what depends on elements is checked on one
array for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from areal.tinker.backends.backend import ModelLimits, TrainingBackend
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import Datum, PassResult, PreparedBatch, Scalar
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.params import check_keys, check_number, check_tokens
from areal.tinker.service.requests import RawDatum, RawTensor
from areal.tinker.service.verbs.verb import Capabilities, ModelRequest

LossKeys = Mapping[str, frozenset[str]]
"""Keys of a loss: ``inputs``, ``optional`` and ``config``."""

_TARGETS = "target_tokens"
_INTEGERS = ("int64", "int32")
_FLOATS = ("float32", "bfloat16")

_SMALL_SAMPLES, _SMALL_ELEMENTS = 16, 2**16
"""Size up to which a request is validated on the loop."""


@dataclass(frozen=True)
class ForwardBackward(ModelRequest, kind="forward_backward", batched=True):
    """forward_backward: adds the gradient of a loss to the pending gradients of the model."""

    data: Sequence[RawDatum] = ()
    loss_fn: str = "cross_entropy"
    loss_fn_config: Mapping[str, Scalar] = field(default_factory=dict)

    def notes(self) -> Any:
        if any(datum.spans for datum in self.data):
            return {"spans": [list(datum.spans) for datum in self.data]}
        return None

    def tokens(self) -> int:
        chunks = (chunk.tokens for datum in self.data for chunk in datum.model_input)
        return sum(len(tokens) for tokens in chunks if tokens is not None)

    def is_small(self) -> bool:
        # Sparse tensors may be large once they are dense.
        if len(self.data) > _SMALL_SAMPLES:
            return False
        chunks = sum(len(datum.model_input) for datum in self.data)
        tensors = [tensor for datum in self.data for tensor in datum.loss_fn_inputs.values()]
        elements = self.tokens() + sum(tensor.values.size for tensor in tensors)
        dense = all(tensor.crow_indices is None and tensor.col_indices is None for tensor in tensors)
        return dense and chunks <= _SMALL_SAMPLES and elements <= _SMALL_ELEMENTS

    def check(self, model: TrainedModel, server: Capabilities) -> PreparedBatch:
        loss, config = check_loss_config(self.loss_fn, self.loss_fn_config, server.losses)
        data = check_samples(self.data, loss, server.limits, server.settings.max_dense_elements)
        return PreparedBatch(model_id=self.model_id, data=data, loss=self.loss_fn, config=config)

    def without_content(self) -> Self:
        return replace(self, data=())

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[PreparedBatch]) -> list[Any]:
        return list(backend.forward_backward(prepared))

    @staticmethod
    def columns(prepared: PreparedBatch, result: PassResult) -> dict[str, Any]:
        return {"loss": float(result.metrics.get("loss:sum", float("nan"))), "tokens": prepared.tokens}


@dataclass(frozen=True)
class Forward(ForwardBackward, kind="forward", batched=True):
    """forward: computes a loss and its log-probs."""

    changes_model = False

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[PreparedBatch]) -> list[Any]:
        return list(backend.forward(prepared))

    @staticmethod
    def columns(prepared: PreparedBatch, result: PassResult) -> dict[str, Any]:
        return {"tokens": prepared.tokens}


def check_loss_config(
    name: str, config: Mapping[str, Scalar], losses: Mapping[str, LossKeys]
) -> tuple[LossKeys, dict[str, Scalar]]:
    """Return the keys of a loss, and its validated configuration.

    Args:
        losses: keys of each loss, from the backend.
    """
    if name not in losses:
        raise UserError(f"loss_fn is {name!r}: this server supports {', '.join(sorted(losses))}")
    check_keys(f"loss_fn_config of {name}", config, losses[name]["config"])
    checked = {
        key: value if isinstance(value, str) else check_number(f"loss_fn_config.{key}", value)
        for key, value in config.items()
    }
    return losses[name], checked


def check_samples(samples: Sequence[RawDatum], loss: LossKeys, limits: ModelLimits, max_elements: int) -> list[Datum]:
    """Return the validated samples of a request.

    Args:
        loss: keys of the loss, which decides what a sample must have.
        max_elements: most elements of targets or of one value, over all samples, once sparse tensors are dense.
    """
    if not len(samples):
        raise UserError("data is empty: give at least one sample")
    required = frozenset(loss["inputs"]) | {_TARGETS}
    known = required | frozenset(loss["optional"])
    # Token ids.
    inputs = [check_tokens(datum.model_input, f"data[{i}].model_input") for i, datum in enumerate(samples)]
    _check_lengths(inputs, limits)
    inputs = _check_ids(inputs, "model_input", limits)
    # Targets, which have the length of the input, and values, which have the shape of the targets.
    shapes = [_check_datum(i, datum, len(inputs[i]), required, known) for i, datum in enumerate(samples)]
    if sum(map(math.prod, shapes)) > max_elements:
        raise UserError(
            f"the targets have more than {max_elements} elements once they are dense: send fewer samples in a request"
        )
    targets = [_dense(i, _TARGETS, datum.loss_fn_inputs[_TARGETS], shapes[i]) for i, datum in enumerate(samples)]
    targets = _check_ids(targets, _TARGETS, limits)
    values: list[dict[str, np.ndarray]] = [{} for _ in samples]
    for name in sorted(known - {_TARGETS}):
        _check_values(name, samples, shapes, values)
    return [Datum(*sample) for sample in zip(inputs, targets, values, strict=True)]


def _check_lengths(inputs: Sequence[np.ndarray], limits: ModelLimits) -> None:
    for i, tokens in enumerate(inputs):
        if not len(tokens):
            raise UserError(f"data[{i}].model_input is empty: a sample must have at least one token")
        if len(tokens) > limits.max_tokens:
            raise UserError(
                f"data[{i}].model_input has {len(tokens)} tokens: at most {limits.max_tokens} are supported"
            )


def _check_ids(rows: Sequence[np.ndarray], name: str, limits: ModelLimits) -> list[np.ndarray]:
    """Check the range of all ids at once, and return the rows as slices of one int64 array."""
    flat, slices = _join(rows, np.int64)
    if flat.size and (flat.min() < 0 or flat.max() >= limits.vocab_size):
        i = next(i for i, row in enumerate(rows) if row.size and (row.min() < 0 or row.max() >= limits.vocab_size))
        wrong = rows[i][(rows[i] < 0) | (rows[i] >= limits.vocab_size)]
        raise UserError(
            f"data[{i}] has the id {wrong.flat[0]} in {name}: ids must be from 0 to {limits.vocab_size - 1}"
        )
    return slices


def _join(rows: Sequence[np.ndarray], dtype: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """One array of all rows, and the rows as slices of it in their shapes."""
    flat = np.concatenate([row.reshape(-1) for row in rows]).astype(dtype, copy=False)
    ends = np.cumsum([row.size for row in rows]).tolist()
    starts = [0, *ends[:-1]]
    return flat, [flat[a:b].reshape(row.shape) for row, a, b in zip(rows, starts, ends, strict=True)]


def _check_datum(
    i: int, datum: RawDatum, length: int, required: frozenset[str], known: frozenset[str]
) -> tuple[int, ...]:
    """Check names, types and sizes of a sample's inputs. Returns the shape of its targets."""
    names = datum.loss_fn_inputs.keys()
    if not required <= names:
        raise UserError(f"data[{i}].loss_fn_inputs lacks {sorted(required - names)}: the loss needs {sorted(required)}")
    if not names <= known:
        check_keys(f"data[{i}].loss_fn_inputs", names, known)
    shape = _shape(i, _TARGETS, datum.loss_fn_inputs[_TARGETS], length, None)
    for name, tensor in datum.loss_fn_inputs.items():
        allowed = _INTEGERS if name == _TARGETS else _FLOATS
        if tensor.dtype not in allowed:
            raise UserError(
                f"data[{i}].loss_fn_inputs[{name!r}] has the dtype {tensor.dtype!r}: it must be {allowed[0]}"
            )
        if tensor.values.dtype.kind not in ("iu" if name == _TARGETS else "fiu"):
            raise UserError(f"data[{i}].loss_fn_inputs[{name!r}] has elements that are not of the dtype {tensor.dtype}")
        _shape(i, name, tensor, length, shape)
    return shape


def _shape(i: int, name: str, tensor: RawTensor, length: int, targets: tuple[int, ...] | None) -> tuple[int, ...]:
    """Shape of an input: ``[T]`` or ``[T, K]``, and that of the targets."""
    where = f"data[{i}].loss_fn_inputs[{name!r}]"
    sparse = tensor.crow_indices is not None or tensor.col_indices is not None
    # A flat list has the shape of the targets.
    if tensor.shape is None:
        if sparse:
            raise UserError(f"{where} is sparse and has no shape: give [{length}, K]")
        shape: tuple[int, ...] = (
            targets if targets is not None and tensor.values.size == math.prod(targets) else (tensor.values.size,)
        )
    else:
        shape = tuple(int(n) for n in tensor.shape)
    if len(shape) not in (1, 2) or shape[0] != length or (len(shape) == 2 and shape[1] < 1):
        raise UserError(
            f"{where} has the shape {list(shape)}: it must be [{length}] or [{length}, K], as the input has {length} tokens"
        )
    if targets is not None and shape != targets:
        raise UserError(f"{where} has the shape {list(shape)}: it must be that of {_TARGETS}, {list(targets)}")
    if not sparse and tensor.values.size != math.prod(shape):
        raise UserError(f"{where} has {tensor.values.size} elements: its shape {list(shape)} has {math.prod(shape)}")
    return shape


def _check_values(
    name: str, data: Sequence[RawDatum], shapes: Sequence[tuple[int, ...]], values: list[dict[str, np.ndarray]]
) -> None:
    """Check that a value is finite in all samples at once, and add it to ``values``. An optional one may be missing in some samples."""
    present = [i for i, datum in enumerate(data) if name in datum.loss_fn_inputs]
    if not present:
        return
    flat, rows = _join([_dense(i, name, data[i].loss_fn_inputs[name], shapes[i]) for i in present], np.float32)
    if not np.isfinite(flat).all():
        i = next(i for i, row in zip(present, rows, strict=True) if not np.isfinite(row).all())
        raise UserError(
            f"data[{i}].loss_fn_inputs[{name!r}] has a NaN or an infinite element: all must be finite in float32"
        )
    for i, row in zip(present, rows, strict=True):
        values[i][name] = row


def _dense(i: int, name: str, tensor: RawTensor, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of a tensor in the given shape, with zeros for the elements that a sparse one leaves out."""
    values = np.asarray(tensor.values).reshape(-1)
    if tensor.crow_indices is None and tensor.col_indices is None:
        return values.reshape(shape)
    where = f"data[{i}].loss_fn_inputs[{name!r}]"
    if tensor.crow_indices is None or tensor.col_indices is None or len(shape) != 2:
        raise UserError(f"{where} is sparse: it needs crow_indices, col_indices and a shape [T, K]")
    # Structure of CSR: one range of elements per row, which together cover all elements, and columns within the shape.
    crow, col = np.asarray(tensor.crow_indices).reshape(-1), np.asarray(tensor.col_indices).reshape(-1)
    if crow.dtype.kind not in "iu" or col.dtype.kind not in "iu":
        raise UserError(f"{where} has indices of {crow.dtype} and {col.dtype}: they must be integers")
    if crow.size != shape[0] + 1 or crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        raise UserError(
            f"{where} has wrong crow_indices: {shape[0] + 1} numbers that rise from 0 to the number of elements, {values.size}"
        )
    if col.size != values.size:
        raise UserError(f"{where} has {col.size} col_indices for {values.size} elements: give one for each")
    if col.size and (col.min() < 0 or col.max() >= shape[1]):
        raise UserError(
            f"{where} has col_indices from {col.min()} to {col.max()}: they must be from 0 to {shape[1] - 1}"
        )
    rows = np.repeat(np.arange(shape[0]), np.diff(crow))
    # Two elements at one place would be ambiguous.
    places = rows * shape[1] + col
    if np.unique(places).size != places.size:
        raise UserError(f"{where} has two elements in the same row and column: give each once")
    dense = np.zeros(shape, values.dtype)
    dense.reshape(-1)[places] = values
    return dense
