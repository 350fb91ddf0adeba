"""Plans of shards: what every rank sends is what it has, or what the ranks exchange, and together all of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from areal.inference.http.group.reshard_plan import (
    MOST_SHARDS,
    HeldPart,
    Numbers,
    Placements,
    ReshardPlan,
    box_of,
    join_boxes,
    plan_resharding,
)

Boxes = Sequence[Sequence[Numbers]]


def whole(shape: Sequence[int]) -> Numbers:
    return tuple((0, length, 1) for length in shape)


def along(shape: Sequence[int], dimension: int, index: int, count: int) -> Numbers:
    """Return one of several equal parts of a tensor."""
    length = shape[dimension] // count
    return tuple(
        (index * length, (index + 1) * length, 1) if d == dimension else (0, each, 1) for d, each in enumerate(shape)
    )


def planned(**tensors: tuple[tuple[int, ...], Boxes]) -> ReshardPlan:
    """Return the plan for tensors, each with its shape and the boxes of each rank."""
    ranks = len(next(iter(tensors.values()))[1])
    held = [
        [HeldPart(name, torch.float32, shape, box) for name, (shape, boxes) in tensors.items() for box in boxes[rank]]
        for rank in range(ranks)
    ]
    return plan_resharding(held)


def one(shape: tuple[int, ...], boxes: Boxes) -> tuple[tuple[int, int], Placements, bool]:
    """Return the mesh, the placements of one tensor, and whether the ranks exchange parts of it."""
    plan = planned(x=(shape, boxes))
    return plan.mesh, plan.tensors[0].placements, bool(plan.tensors[0].parts)


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_shards_of_all_ranks_are_sent_as_they_lie(dimension: int, ranks: int) -> None:
    shape = (16, 32, 48)
    boxes = [[along(shape, dimension, rank, ranks)] for rank in range(ranks)]
    placements = None if ranks == 1 else (dimension, -1)
    assert one(shape, boxes) == ((ranks, 1), placements, False)


def test_shards_with_replicas_are_sent_as_they_lie() -> None:
    """Replicas that follow each other, and such that come in turn."""
    shape = (8, 8)
    assert one(shape, [[along(shape, 1, rank // 2, 2)] for rank in range(4)]) == ((2, 2), (1, -1), False)
    assert one(shape, [[along(shape, 1, rank % 2, 2)] for rank in range(4)]) == ((2, 2), (-1, 1), False)


def test_rows_of_what_all_ranks_have_are_divided_among_them() -> None:
    assert one((8, 3), [[whole((8, 3))]] * 4) == ((4, 1), (0, -1), False)
    # An uneven one is sent whole.
    assert one((7, 3), [[whole((7, 3))]] * 4)[1:] == (None, False)


def test_other_layouts_are_exchanged_and_sent_by_rows() -> None:
    shape = (8, 8)
    tiles = [[((i * 4, i * 4 + 4, 1), (j * 4, j * 4 + 4, 1))] for i, j in product(range(2), range(2))]
    assert one(shape, tiles) == ((4, 1), (0, -1), True)
    # A stage of a pipeline, and an uneven division.
    assert one(shape, [[whole(shape)], []]) == ((2, 1), (0, -1), True)
    assert one((5, 2), [[((0, 3, 1), (0, 2, 1))], [((3, 5, 1), (0, 2, 1))]]) == ((2, 1), None, True)
    plan = planned(x=(shape, [[whole(shape)], []]))
    assert plan.tensors[0].parts == ((0, whole(shape)),)


def test_neighbouring_parts_of_a_rank_are_one() -> None:
    """Rows of the heads of a rank, in any order."""
    rows = [((i * 2, i * 2 + 2, 1), (0, 3, 1)) for i in range(4)]
    joined = join_boxes([rows[2], rows[1], rows[3]])
    assert joined is not None
    assert (joined.box, joined.dimension, joined.order) == (((2, 8, 1), (0, 3, 1)), 0, [1, 0, 2])
    assert join_boxes([rows[0], rows[2]]) is None
    assert join_boxes([]) is None
    assert join_boxes([((0, 4, 1), (0, 1, 1)), ((4, 8, 1), (1, 2, 1))]) is None
    assert join_boxes([((0, 4, 2), (0, 1, 1)), ((4, 8, 1), (0, 1, 1))]) is None
    assert join_boxes([((0, 1, 2), (0, 4, 1)), ((1, 2, 2), (0, 4, 1))]) is None  # rows 0 and 1
    alternating = join_boxes([((0, 3, 2), (0, 4, 1)), ((4, 8, 2), (0, 4, 1))])
    assert alternating is not None
    assert alternating.box == ((0, 8, 2), (0, 4, 1))  # rows 0, 2, 4 and 6
    assert one((8, 3), [[rows[1], rows[0]], [rows[2], rows[3]]]) == ((2, 1), (0, -1), False)


def test_more_ranks_than_shards_that_a_worker_joins() -> None:
    shape = (128, 2)
    plan = planned(x=(shape, [[along(shape, 0, rank, 64)] for rank in range(64)]))
    assert (max(plan.mesh), len(plan.tensors[0].parts)) == (MOST_SHARDS, 64)
    assert plan.tensors[0].placements in ((0, -1), (-1, 0))
    # No axis is short enough.
    plan = planned(x=((17, 2), [[whole((17, 2))]] * 17), y=((4 * 361, 2), [[whole((4 * 361, 2))]] * 17))
    assert [tensor.placements for tensor in plan.tensors] == [None, None]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 32])
def test_everything_is_sent(ranks: int) -> None:
    """Rows of all ranks are the whole tensor, each with the same number of replicas."""
    plan = planned(x=((48, 2), [[whole((48, 2))]] * ranks), y=((5,), [[whole((5,))]] * ranks))
    for tensor in plan.tensors:
        counts = [0] * tensor.shape[0]
        for rank in range(ranks):
            rows = plan.rows(tensor.placements, tensor.shape, rank)
            assert [(rows.start, rows.stop, 1)] == [box_of(tensor.shape, plan.mesh, tensor.placements, rank)[0]]
            for row in range(rows.start, rows.stop):
                counts[row] += 1
        assert len(set(counts)) == 1
        assert counts[0] > 0


def test_tensors_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"scale has 0 dimensions: NCCL's resharding takes 1 to 3; pass another carrier"
    ):
        planned(scale=((), [[()]]))
    with pytest.raises(ValueError, match="x: the ranks have 6 of 8 elements in 1 different parts"):
        planned(x=((8,), [[((0, 6, 1),)], [((0, 6, 1),)]]))
