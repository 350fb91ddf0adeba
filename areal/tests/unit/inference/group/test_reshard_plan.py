"""Plans of shards: blocks are what the ranks have, or are assembled from it, and each server gets the full tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from areal.inference.http.group.boxes import Numbers, block_of, join_boxes, overlap, within
from areal.inference.http.group.reshard_plan import (
    MOST_SHARDS,
    HeldPart,
    Placements,
    PlannedTensor,
    RankTraffic,
    ReshardPlan,
    plan_resharding,
)

Boxes = Sequence[Sequence[Numbers]]


def whole(shape: Sequence[int]) -> Numbers:
    return tuple((0, length, 1) for length in shape)


def along(shape: Sequence[int], dimension: int, index: int, count: int) -> Numbers:
    """Return one of several parts of a tensor, as :func:`torch.chunk` divides it."""
    length = -(-shape[dimension] // count)
    start, stop = (min(each * length, shape[dimension]) for each in (index, index + 1))
    return tuple((start, stop, 1) if d == dimension else (0, each, 1) for d, each in enumerate(shape))


def planned(servers: int = 1, **tensors: tuple[tuple[int, ...], Boxes]) -> ReshardPlan:
    """Return the plan for tensors, each with its shape and the boxes of each rank."""
    ranks = len(next(iter(tensors.values()))[1])
    held = [
        [HeldPart(name, torch.float32, shape, box) for name, (shape, boxes) in tensors.items() for box in boxes[rank]]
        for rank in range(ranks)
    ]
    return plan_resharding(held, servers)


def one(shape: tuple[int, ...], boxes: Boxes) -> tuple[tuple[int, ...], Placements, int]:
    """Return the ranks that send to a server, the placements of one tensor, and the number of bytes that ranks exchange."""
    plan = planned(x=(shape, boxes))
    return plan.senders(0), plan.tensors[0].placements, sum(each.from_ranks for each in plan.traffic())


def blocks_of(tensor: PlannedTensor, boxes: Boxes) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return a tensor, and the block that each rank assembles from the parts that ranks have."""
    full = torch.arange(torch.Size(tensor.shape).numel()).reshape(tensor.shape)
    joined = [own if (one := join_boxes(own)) is None else [one.box] for own in boxes]
    parts = [{box: full[tuple(slice(*each) for each in box)] for box in own} for own in joined]
    exchange = tensor.exchange
    assembled = {}
    for rank, box in exchange.blocks.items():
        block = torch.full([len(range(*each)) for each in box], -1)
        for piece in exchange.pieces[rank]:
            assert piece.target == rank
            block[within(piece.box, box)] = parts[piece.source][piece.part][within(piece.box, piece.part)]
            # What a rank has is not received.
            assert piece.source == rank or piece.part not in parts[rank]
            assert piece.source == rank or piece in exchange.sent[piece.source]
        assembled[rank] = block
    return full, assembled


def assert_servers_get_everything(plan: ReshardPlan, tensors: Mapping[str, tuple[tuple[int, ...], Boxes]]) -> None:
    for tensor in plan.tensors:
        full, blocks = blocks_of(tensor, tensors[tensor.name][1])
        for server in range(plan.servers):
            own = [blocks[rank] for rank in plan.senders(server)]
            if tensor.placements is None:
                assert all(torch.equal(each, full) for each in own)
            else:
                assert len({each.shape for each in own}) == 1
                assert torch.equal(torch.cat(own, tensor.placements[0]), full)


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_shards_of_all_ranks_are_sent_as_they_lie(dimension: int, ranks: int) -> None:
    shape = (16, 32, 48)
    boxes = [[along(shape, dimension, rank, ranks)] for rank in range(ranks)]
    placements = None if ranks == 1 else (dimension, -1)
    assert one(shape, boxes) == (tuple(range(ranks)), placements, 0)
    size = 16 * 32 * 48 * 4 // ranks
    assert planned(3, x=(shape, boxes)).traffic() == [RankTraffic(3 * size, 0, 0)] * ranks


def test_blocks_are_in_the_order_of_the_ranks_shards() -> None:
    """Replicas that follow each other, and such that come in turn."""
    shape = (8, 8)
    assert one(shape, [[along(shape, 1, rank // 2, 2)] for rank in range(4)]) == ((0, 1, 2, 3), (1, -1), 0)
    assert one(shape, [[along(shape, 1, rank % 2, 2)] for rank in range(4)]) == ((0, 2, 1, 3), (1, -1), 0)


def test_rows_of_what_all_ranks_have_are_divided_among_them() -> None:
    assert one((8, 3), [[whole((8, 3))]] * 4) == ((0, 1, 2, 3), (0, -1), 0)
    assert one((7, 4), [[whole((7, 4))]] * 4) == ((0, 1, 2, 3), (1, -1), 0)
    # An uneven one is sent whole.
    assert one((7, 3), [[whole((7, 3))]] * 4)[1:] == (None, 0)


def test_ranks_receive_what_they_miss_of_their_block() -> None:
    shape = (8, 8)
    tiles = [[((i * 4, i * 4 + 4, 1), (j * 4, j * 4 + 4, 1))] for i, j in product(range(2), range(2))]
    traffic = planned(x=(shape, tiles)).traffic()
    assert traffic == [RankTraffic(64, 32, 32)] * 4  # each rank has a half of its block
    # A stage of a pipeline, and an uneven division.
    assert planned(x=(shape, [[whole(shape)], []])).traffic() == [RankTraffic(128, 128, 0), RankTraffic(128, 0, 128)]
    assert one((5, 2), [[((0, 3, 1), (0, 2, 1))], [((3, 5, 1), (0, 2, 1))]])[1:] == ((1, -1), 20)


def test_matrices_of_data_and_tensor_parallel_ranks_are_sent_as_they_lie() -> None:
    """Only those that are divided along both dimensions are exchanged, a half of them."""
    shape = (64, 64)
    rows = [[along(shape, 0, rank % 2 * 2 + rank // 2, 4)] for rank in range(4)]
    tiles = [[(along(shape, 0, rank // 2, 2)[0], along(shape, 1, rank % 2, 2)[1])] for rank in range(4)]
    tensors: dict[str, tuple[tuple[int, ...], Boxes]]
    tensors = {"up": (shape, rows), "gate": (shape, rows), "down": (shape, tiles)}
    plan = planned(1, **tensors)
    assert_servers_get_everything(plan, tensors)
    share = plan.nbytes // 4
    assert plan.traffic() == [RankTraffic(share, share // 6, share // 6)] * 4
    assert share + share // 6 <= 1.2 * share


def shapes_of_qwen3_8b(layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Return shapes of the model with few layers, the embedding in proportion."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (151936 * layers // 36 // 64 * 64, 4096)}
    of_layer = {"q": (4096, 4096), "k": (1024, 4096), "up": (12288, 4096), "down": (4096, 12288), "norm": (4096,)}
    return {**shapes, **{f"{name}.{layer}": shape for layer in range(layers) for name, shape in of_layer.items()}}


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [17, 24, 32, 64, 256])
def test_more_ranks_than_blocks(ranks: int, servers: int) -> None:
    """A rank sends a 16th to its part of the servers, and receives a part of this block."""
    tensors = {
        name: (shape, [[along(shape, 0, rank, ranks)] for rank in range(ranks)])
        for name, shape in shapes_of_qwen3_8b().items()
    }
    plan = planned(servers, **tensors)
    traffic = plan.traffic()
    model, blocks = plan.nbytes, len(plan.groups)
    # Servers get all of it, in as few bytes of a rank as 16 blocks allow.
    assert sum(each.to_servers for each in traffic) == servers * model
    assert sum(each.to_ranks for each in traffic) == sum(each.from_ranks for each in traffic)
    assert max(each.from_ranks for each in traffic) <= model / blocks
    assert all(len(set(plan.senders(server))) == blocks <= MOST_SHARDS for server in range(servers))
    if ranks % MOST_SHARDS == 0:
        neighbours = ranks // MOST_SHARDS
        assert blocks == MOST_SHARDS
        assert max(each.to_servers for each in traffic) == -(-servers // neighbours) * model / MOST_SHARDS
        # Neighbours exchange their shards, and nobody else's.
        assert max(each.to_ranks for each in traffic) <= min(servers, neighbours) * model / ranks * 1.01
        assert max(each.from_ranks for each in traffic) <= (neighbours - 1) * model / ranks * 1.01


def test_each_server_gets_everything_from_64_ranks() -> None:
    shapes = {"x": (128, 2), "y": (100, 64), "z": (7, 3), "u": (5,)}
    tensors = {name: (shape, [[along(shape, 0, rank, 64)] for rank in range(64)]) for name, shape in shapes.items()}
    plan = planned(3, **tensors)
    assert plan.senders(0) != plan.senders(1) != plan.senders(2)
    assert_servers_get_everything(plan, tensors)


def random_boxes(rng: random.Random, shape: tuple[int, ...], ranks: int) -> list[list[Numbers]]:
    """Return boxes of the ranks that cover a tensor: a grid of parts, each on one rank or more; rows may alternate."""
    cuts = []
    for length in shape:
        inner = sorted(rng.sample(range(1, length), min(length - 1, rng.choice([0, 0, 1, 2, 3]))))
        cuts.append([(start, stop, 1) for start, stop in zip([0, *inner], [*inner, length], strict=True)])
    if shape[0] % 2 == 0 and rng.random() < 0.3:
        cuts[0] = [(0, shape[0], 2), (1, shape[0], 2)]
    boxes: list[list[Numbers]] = [[] for _ in range(ranks)]
    for box in product(*cuts):
        replicas = rng.sample(range(ranks), rng.choice([1, 1, 2, ranks]) if ranks > 1 else 1)
        for rank in replicas:
            boxes[rank].append(box)
    return boxes


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_reach_every_server(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("areal.inference.http.group.reshard_plan.MOST_SHARDS", rng.choice([2, 4, 16]))
    ranks, servers = rng.choice([1, 2, 3, 4, 6, 8, 12, 20]), rng.choice([1, 2, 3, 5])
    tensors = {}
    for name in "abcdef":
        shape = tuple(rng.choice([4, 6, 8, 12, 16]) for _ in range(rng.choice([1, 2, 3])))
        boxes = random_boxes(rng, shape, ranks)
        # A rank's parts are joined, after which those of two ranks must not overlap in part.
        if any(len(own) > 1 and join_boxes(own) is not None for own in boxes):
            boxes = [[whole(shape)] for _ in range(ranks)]
        tensors[name] = (shape, boxes)
    plan = planned(servers, **tensors)
    assert_servers_get_everything(plan, tensors)
    traffic = plan.traffic()
    assert sum(each.to_ranks for each in traffic) == sum(each.from_ranks for each in traffic)
    if all(each.placements is not None for each in plan.tensors):
        assert sum(each.to_servers for each in traffic) == servers * plan.nbytes


def test_overlap_of_alternating_rows_with_a_block() -> None:
    odd, block = ((1, 16, 2), (0, 4, 1)), block_of((16, 4), 4, 0, 1)
    part = overlap(odd, block)
    assert part == ((5, 8, 2), (0, 4, 1))
    rows = torch.arange(16)
    assert rows[1::2][within(part, odd)[0]].tolist() == [5, 7]
    assert rows[4:8][within(part, block)[0]].tolist() == [5, 7]
    assert overlap(((0, 3, 1), (0, 4, 1)), block) is None
    assert overlap(((4, 4, 1), (0, 4, 1)), block) is None


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
    assert one((8, 3), [[rows[1], rows[0]], [rows[2], rows[3]]]) == ((0, 1), (0, -1), 0)


def test_tensors_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"scale has 0 dimensions: NCCL's resharding takes 1 to 3; pass another carrier"
    ):
        planned(scale=((), [[()]]))
    with pytest.raises(ValueError, match="x: the ranks have 6 of 8 elements in 1 different parts"):
        planned(x=((8,), [[((0, 6, 1),)], [((0, 6, 1),)]]))
