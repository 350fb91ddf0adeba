"""Boxes: parts of a tensor, by the start, stop and step of the indices in each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Numbers = tuple[tuple[int, int, int], ...]
"""Start, stop and step of a part in each dimension."""


def count_elements(box: Numbers) -> int:
    """Return the number of elements of a box."""
    return prod(len(range(*numbers)) for numbers in box)


def block_of(shape: Sequence[int], blocks: int, dimension: int | None, index: int) -> Numbers:
    """Return one of several equal blocks of a tensor along a dimension; the full tensor if ``dimension`` is None."""
    box = [(0, length, 1) for length in shape]
    if dimension is not None:
        length = shape[dimension] // blocks
        box[dimension] = (index * length, (index + 1) * length, 1)
    return tuple(box)


def overlap(box: Numbers, block: Numbers) -> Numbers | None:
    """Return the elements of a box that are in a block, which has steps of 1; ``None`` if there are none."""
    part = []
    for (start, stop, step), (first, end, _) in zip(box, block, strict=True):
        start += max(0, -(-(first - start) // step)) * step
        stop = min(stop, end)
        if start >= stop:
            return None
        part.append((start, stop, step))
    return tuple(part)


def within(part: Numbers, box: Numbers) -> tuple[slice, ...]:
    """Return the index of a part in the tensor that has the elements of a box."""
    places = []
    for numbers, (start, _, step) in zip(part, box, strict=True):
        indices = range(*numbers)
        stride = indices.step // step
        first = (indices.start - start) // step
        places.append(slice(first, first + (len(indices) - 1) * stride + 1, stride))
    return tuple(places)


class Joined(NamedTuple):
    """Parts that follow each other along one dimension.

    Attributes:
        box: what they are together.
        dimension: the dimension.
        order: their indices, from the first to the last.
    """

    box: Numbers
    dimension: int
    order: list[int]


def join_boxes(boxes: Sequence[Numbers]) -> Joined | None:
    """Return the parts of a tensor as one, such as the rows of neighbouring heads; ``None`` if they leave gaps."""
    if not boxes:
        return None
    order = sorted(range(len(boxes)), key=boxes.__getitem__)
    first, last = boxes[order[0]], boxes[order[-1]]
    dimension = next((d for d, numbers in enumerate(first) if numbers != last[d]), 0)
    box = [*first[:dimension], (first[dimension][0], last[dimension][1], first[dimension][2]), *first[dimension + 1 :]]
    stop = first[dimension][0]
    for index in order:
        numbers = boxes[index]
        start, _, step = numbers[dimension]
        others = [pair for d, pair in enumerate(zip(numbers, first, strict=True)) if d != dimension]
        if (start, step) != (stop, first[dimension][2]) or any(own != expected for own, expected in others):
            return None
        stop = start + len(range(*numbers[dimension])) * step
    return Joined(tuple(box), dimension, order)
