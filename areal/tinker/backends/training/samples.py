"""Data of the protocol as samples of an engine, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.losses.loss_interface import CLIP_KEYS, ProtocolLoss
from areal.tinker.backends.prepared import Datum


def engine_samples(data: Sequence[Datum], loss: ProtocolLoss) -> list[dict[str, Tensor]]:
    """Return one sample for each datum, with ``input_ids``, ``target_ids`` and the values that the loss reads.

    If the data differ in their numbers of targets per position, the missing ones are added without a target. Thresholds that some data have are
    added to the others from the configuration of the loss, and so are weights of 1.

    Raises:
        UserError: a datum lacks a value, or marks no token for its sequence ratio.
    """
    names = set(loss.inputs - {"target_tokens"})
    names |= {name for name in loss.optional if any(name in datum.values for datum in data)}
    width = max(_width(datum.target_ids) for datum in data)
    return [_sample(index, datum, sorted(names), width, loss) for index, datum in enumerate(data)]


def _sample(index: int, datum: Datum, names: Sequence[str], width: int, loss: ProtocolLoss) -> dict[str, Tensor]:
    targets = _widened(datum.target_ids, np.int64, width, IGNORE_INDEX)
    sample = {"input_ids": _tensor(datum.input_ids, np.int64), "target_ids": targets}
    for name in names:
        values = datum.values.get(name)
        if values is None and name in CLIP_KEYS:
            values = np.full(datum.target_ids.shape, getattr(loss, name), dtype=np.float32)
        if values is None and name == "weights" and name in loss.optional:
            values = np.ones(datum.target_ids.shape, dtype=np.float32)
        if values is None:
            raise UserError(f"data[{index}].loss_fn_inputs has no {name!r}, which the loss needs: add it")
        # The widened targets have the log-prob 0 and, with these zeros, the loss 0.
        sample[name] = _widened(values, np.float32, width, 0)
    if "sequence_ratio_mask" in sample and not sample["sequence_ratio_mask"].any() and sample["advantages"].any():
        raise UserError(
            f"data[{index}].loss_fn_inputs['sequence_ratio_mask'] marks no token: mark those of the sequence's ratio"
        )
    return sample


def target_arrays(outputs: Sequence[Tensor], data: Sequence[Datum]) -> list[np.ndarray]:
    """Return per-target outputs of an engine as float32 arrays of the shapes of the targets."""
    arrays = []
    for output, datum in zip(outputs, data, strict=True):
        array: np.ndarray[Any, Any] = output.detach().cpu().float().numpy()
        shape = datum.target_ids.shape
        if array.ndim > 1:
            array = array[:, : _width(datum.target_ids) or 1].reshape(shape)
        arrays.append(array)
    return arrays


def _width(targets: np.ndarray) -> int:
    """Return the number of targets of a position if the array has that dimension, else 0."""
    return targets.shape[1] if targets.ndim > 1 else 0


def _widened(values: np.ndarray, dtype: Any, width: int, fill: float) -> Tensor:
    """Return an array ``[T]`` or ``[T, K]`` as a tensor ``[T]``, or ``[T, width]`` with a width above 0."""
    if width and values.shape[1:] != (width,):
        wide = np.full((len(values), width), fill, dtype=dtype)
        columns = values.reshape(len(values), -1)
        wide[:, : columns.shape[1]] = columns
        values = wide
    return _tensor(values, dtype)


def _tensor(values: np.ndarray, dtype: Any) -> Tensor:
    # Arrays of a request may be views of its bytes, which cannot be written: those are copied.
    return torch.from_numpy(np.require(values, dtype=dtype, requirements=["C", "W"]))
