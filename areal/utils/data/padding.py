"""Padding: of sequences to one rectangular tensor, and back; and of a rank's micro-batches, by fillers.

Fillers are dummy micro-batches of one token, which keep ranks in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX


def round_up(n: int, multiple: int) -> int:
    """Round ``n`` up to a multiple of ``multiple``."""
    return -(-n // multiple) * multiple


def pad(tensors: Sequence[Tensor], *, value: float = 0, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Right-pad tensors ``[S_i, ...]`` to one tensor.

    Args:
        tensors: ``B`` tensors that differ only in their first dimension.
        value: value of the padding.
        width: ``S``. Defaults to the longest length.

    Returns:
        ``[B, S, ...]`` and the attention mask, bool ``[B, S]``.

    Raises:
        ValueError: there are no tensors, trailing shapes differ, or a tensor is longer than ``width``.
    """
    if not tensors:
        raise ValueError("pad got no tensors: pass at least one")
    first = tensors[0]
    bad = next((i for i, x in enumerate(tensors) if x.dim() == 0 or x.shape[1:] != first.shape[1:]), None)
    if bad is not None:
        raise ValueError(
            f"pad got shape {list(tensors[bad].shape)} at {bad} beside {list(first.shape)} at 0: only the first "
            "dimension may differ"
        )
    longest = max(len(x) for x in tensors)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"pad got width = {width} for a tensor of {longest}: raise the width")
    # Fill row by row, and mark the real positions.
    out = first.new_full((len(tensors), width, *first.shape[1:]), value)
    for row, x in zip(out, tensors, strict=True):
        row[: len(x)] = x
    lengths = torch.tensor([len(x) for x in tensors], device=first.device)
    return out, torch.arange(width, device=first.device) < lengths[:, None]


def unpad(padded: Tensor, attention_mask: Tensor) -> list[Tensor]:
    """Undo :func:`pad`: return the ``B`` tensors ``[S_i, ...]`` of a right-padded ``[B, S, ...]``, as views.

    Raises:
        ValueError: the shapes do not match, or the mask is invalid; see :func:`row_lengths`.
    """
    if padded.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"the padded tensor is {list(padded.shape)} but its attention_mask {list(attention_mask.shape)}: both "
            "start with [B, S]"
        )
    return [row[:length] for row, length in zip(padded, row_lengths(attention_mask), strict=True)]


def row_lengths(attention_mask: Tensor) -> list[int]:
    """Return the number of real positions of each row of a right-padded batch. Reads the device once.

    Args:
        attention_mask: ``[B, S]``, ones and zeros in any dtype, or booleans.

    Raises:
        ValueError: a row is left-padded or has a hole, or a value is neither 0 nor 1. The error names the row.
    """
    real = attention_mask != 0
    # A real position directly after padding: the row is not right-padded.
    rises = (real[:, 1:] & ~real[:, :-1]).any(1)
    odd = _odd_values(attention_mask).any(1)
    lengths, rising, other = torch.stack([real.sum(1), rises.long(), odd.long()]).tolist()
    # Errors. Details are read from the device only now.
    if any(other):
        row = other.index(1)
        value = attention_mask[row][_odd_values(attention_mask[row])][0].item()
        raise ValueError(
            f"attention_mask[{row}] holds {value}: it marks real positions with 1 and padding with 0; pass packed "
            "sequences as a list"
        )
    if any(rising):
        row = rising.index(1)
        what = "has a hole" if real[row, 0] else "is left-padded"
        raise ValueError(
            f"attention_mask[{row}] {what}: batches are right-padded; convert it with "
            "areal.utils.data.from_left_padded(batch)"
        )
    return lengths


def _odd_values(mask: Tensor) -> Tensor:
    return (mask != 0) & (mask != 1)


def closing_order(attention_mask: Tensor) -> Tensor:
    """Return for each row the order of columns that moves real positions to the front, int64 ``[B, S]``. Stable."""
    return (attention_mask == 0).to(torch.int8).argsort(dim=1, stable=True)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return ``x[i, columns[i, j]]``, ``[B, J, ...]``, for ``x`` ``[B, S, ...]`` and int64 ``columns`` ``[B, J]``."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, columns]


def from_left_padded(batch: Mapping[str, Any], *, per_sequence: Sequence[str] = ()) -> dict[str, Any]:
    """Right-pad a batch that is left-padded, padded on both sides, or has holes.

    Real positions move to the front of their row and keep their order, with the values of all per-token keys. The width does
    not change.

    Args:
        batch: dict with ``attention_mask`` ``[B, S]``. Tensors ``[B, S, ...]`` are per-token; others are not changed.
        per_sequence: keys that are not per-token although their shape is ``[B, S, ...]``.

    Returns:
        A new dict. Keys that are not per-token are the caller's tensors.

    Raises:
        ValueError: ``attention_mask`` is missing or not ``[B, S]``.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(
            "from_left_padded needs attention_mask, a tensor [B, S] with 1 at real positions; add it to the batch"
        )
    # One order of columns for all per-token keys.
    columns = closing_order(mask)
    return {
        key: take_columns(value, columns)
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape and key not in per_sequence
        else value
        for key, value in batch.items()
    }


ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]
"""Shape of one token, sequence or payload of a key, and dtype of the key."""


@dataclass(frozen=True)
class KeyForms:
    """Shapes and dtypes of the keys of a batch, without values. Small, and picklable.

    Attributes:
        tokens: per-token keys, with the shape after the first dimension.
        sequences: per-sequence keys, with the shape after the first dimension.
        payloads: payloads, with the shape after the first dimension of the first sample's tensor.
    """

    tokens: Mapping[str, ShapeAndDtype] = field(default_factory=dict)
    sequences: Mapping[str, ShapeAndDtype] = field(default_factory=dict)
    payloads: Mapping[str, ShapeAndDtype] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokens: Mapping[str, Tensor], sequences: Mapping[str, Tensor], payloads: Mapping[str, Sequence[Tensor]]
    ) -> KeyForms:
        """Return the forms of packed keys ``[T, ...]`` and ``[n, ...]``, and of lists with at least one payload."""
        firsts = {key: payload[0] for key, payload in payloads.items()}
        return cls(
            *({key: (tuple(x.shape[1:]), x.dtype) for key, x in kind.items()} for kind in (tokens, sequences, firsts))
        )

    def filler(self, device: torch.device) -> dict[str, Any]:
        """Return the keys of a filler: one token of id 0, without a target and without weight in a loss."""
        values: dict[str, Any] = {
            key: torch.zeros((1, *shape), dtype=dtype, device=device) for key, (shape, dtype) in self.tokens.items()
        }
        values["target_ids"].fill_(IGNORE_INDEX)
        # Per-sequence values are 1: a temperature of 0 would give NaN.
        values |= {
            key: torch.ones((1, *shape), dtype=dtype, device=device) for key, (shape, dtype) in self.sequences.items()
        }
        values |= {
            key: [torch.zeros((0, *shape), dtype=dtype, device=device)] for key, (shape, dtype) in self.payloads.items()
        }
        return values


NO_SAMPLES = KeyForms(tokens=dict.fromkeys(("input_ids", "target_ids"), ((), torch.int64)))
"""Keys of a batch without samples: those that every batch has."""
