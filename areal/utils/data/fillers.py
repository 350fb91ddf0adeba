"""Fillers: dummy micro-batches of one token, which keep ranks in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX

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
