"""The parts of tensors that one rank has, in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from areal.api.weights import LocalTensor
from areal.inference.http.group.boxes import join_boxes
from areal.weight_sync.chain import box_numbers


class HeldTensors:
    """Parts of the tensors of one rank, by name, which may be taken in another order than they come.

    Args:
        parts: all parts.
        counts: number of parts of each tensor.
    """

    def __init__(self, parts: Iterator[LocalTensor], counts: Mapping[str, int]) -> None:
        self._parts, self._counts = parts, counts
        self._read: dict[str, list[LocalTensor]] = {}

    def take(self, name: str) -> list[LocalTensor]:
        """Return the parts of a tensor, as one if they follow each other; none if this rank has none."""
        while len(self._read.get(name, ())) < self._counts.get(name, 0):
            part = next(self._parts)
            self._read.setdefault(part.name, []).append(part)
        parts = self._read.pop(name, [])
        joined = join_boxes([box_numbers(part.box) for part in parts])
        if joined is None or len(parts) == 1:
            return parts
        values = torch.cat([parts[index].tensor.detach() for index in joined.order], joined.dimension)
        return [LocalTensor(name, values, tuple(slice(*numbers) for numbers in joined.box), parts[0].shape)]
