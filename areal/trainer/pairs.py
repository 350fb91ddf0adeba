"""Pairs of answers, one preferred to the other, as batches."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.utils.data import Segment, from_segments


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as token ids; each answer with the token that ends it."""

    prompt: collections.abc.Sequence[int]
    chosen: collections.abc.Sequence[int]
    rejected: collections.abc.Sequence[int]

    def samples(self, number: int = 0) -> list[dict[str, Tensor]]:
        """Chosen and rejected as two samples with ``loss_mask`` on the answers, and ``pair_ids`` that say that they belong together."""
        return [
            from_segments([Segment(list(self.prompt), trainable=False), Segment(list(answer), trainable=True)])
            | {"pair_ids": torch.tensor(number)}
            for answer in (self.chosen, self.rejected)
        ]


def flatten(pairs: collections.abc.Sequence[Pair]) -> list[dict[str, Any]]:
    """The samples of some pairs, the two of a pair next to each other."""
    return [sample for number, pair in enumerate(pairs) for sample in pair.samples(number)]
