"""Sharded data loader: every sample is loaded exactly once, on any number of ranks, before and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api import Stateful
from areal.utils.data import ShardedLoader, deal, sequence_cost, sharded_loader


def loaders(n: int, dp_size: int, **kwargs: Any) -> list[ShardedLoader]:
    return [sharded_loader(range(n), dp_rank=r, dp_size=dp_size, **{"batch_size": 8, **kwargs}) for r in range(dp_size)]


def global_batches(ranks: list[ShardedLoader]) -> Iterator[list[int]]:
    for shards in zip(*ranks, strict=True):
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        yield [sample for shard in shards for sample in shard]


@settings(deadline=None)
@given(st.integers(4, 60), st.integers(1, 4), st.integers(4, 12), st.booleans())
def test_epoch_yields_every_sample_once_for_any_dp_size(n: int, dp_size: int, batch_size: int, shuffle: bool) -> None:
    ranks = loaders(n, dp_size, batch_size=batch_size, shuffle=shuffle, seed=3)
    for epoch in range(2):
        assert [loader.epoch for loader in ranks] == [epoch] * dp_size
        batches = list(global_batches(ranks))
        assert len(batches) == len(ranks[0])
        order = [sample for batch in batches for sample in batch]
        assert sorted(order) == list(range(n))
        assert shuffle or order == list(range(n))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches[-1]) < batch_size + dp_size
        assert all(batches[-1][i::dp_size] for i in range(dp_size))


@settings(deadline=None)
@given(
    st.integers(8, 60), st.integers(0, 1), st.integers(0, 6), st.sampled_from([(4, 2), (2, 4), (3, 1), (1, 4), (2, 2)])
)
def test_loader_state_resumes_with_another_dp_size(n: int, epoch: int, step: int, sizes: tuple[int, int]) -> None:
    before = loaders(n, sizes[0], seed=7)
    for _ in range(epoch):
        assert len(list(global_batches(before))) == len(before[0])
    seen: list[int] = []
    batches = global_batches(before)
    for _ in range(step):
        seen += next(batches, [])
        if len(seen) == n:
            break
    states = [loader.state_dict() for loader in before]
    position = {"seed": 7, "epoch": epoch, "cursor": len(seen)}
    assert states == [position | {"length": n, "batch_size": 8}] * sizes[0]
    after = loaders(n, sizes[1], seed=0)
    for loader in after:
        assert isinstance(loader, Stateful)
        loader.load_state_dict(states[0])
    left = [sample for batch in global_batches(after) for sample in batch]
    assert sorted(seen + left) == list(range(n))
    reference = [sample for batch in batches for sample in batch]
    assert left == reference
    following = [[s for batch in global_batches(ranks) for s in batch] for ranks in (before, after)]
    assert sorted(following[0]) == list(range(n))
    assert following[0] == following[1]


def test_order_depends_on_epoch_and_seed() -> None:
    orders = set()
    for seed in range(3):
        (loader,) = loaders(20, 1, seed=seed)
        orders |= {tuple(s for batch in loader for s in batch) for _ in range(3)}
    assert len(orders) == 9


def test_interrupted_iteration_resumes() -> None:
    (loader,) = loaders(20, 1, shuffle=False)
    assert next(iter(loader)) == list(range(8))
    assert [len(batch) for batch in loader] == [8, 4]
    assert loader.state_dict() == {"seed": 0, "epoch": 1, "cursor": 0, "length": 20, "batch_size": 8}


def test_another_data_set_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders(16, 1, shuffle=False)
    next(iter(loader))
    state = loader.state_dict()
    for length in (8, 12, 20):
        (other,) = loaders(length, 1)
        with pytest.raises(ValueError, match=f"16 samples, and this one has {length}.*repeated"):
            other.load_state_dict(state)
    # Between two epochs the data set may change; states of earlier releases have no sizes.
    other.load_state_dict(state | {"epoch": 1, "cursor": 0})
    other.load_state_dict({"seed": 0, "epoch": 0, "cursor": 8})
    assert not caplog.records
    (other,) = loaders(16, 1, batch_size=4, shuffle=False)
    other.load_state_dict(state)
    assert list(other) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [record.getMessage() for record in caplog.records] == [
        "batch_size = 4 takes effect; the loader's state was saved with 8"
    ]


def test_short_last_batch_is_merged_into_the_previous_one() -> None:
    assert [list(loader) for loader in loaders(10, 3, shuffle=False)] == [
        [[0, 1, 2]],
        [[3, 4, 5]],
        [[6, 7, 8, 9]],
    ]
    assert [len(loader) for loader in loaders(11, 3)] == [2, 2, 2]


class Flaky:
    """Dataset that raises once, on one sample."""

    def __init__(self) -> None:
        self.failed = False

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 9 and not self.failed:
            self.failed = True
            raise OSError("a disk that comes back")
        return index


def test_batch_is_retried_after_a_loading_error() -> None:
    loader = sharded_loader(Flaky(), batch_size=4, dp_rank=0, dp_size=1, shuffle=False)
    seen: list[int] = []
    with pytest.raises(OSError, match="comes back"):
        seen.extend(sample for batch in loader for sample in batch)
    assert loader.state_dict()["cursor"] == 8
    assert seen + [sample for batch in loader for sample in batch] == list(range(12))


def test_loader_collates_and_keeps_global_rng_state() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    loader = sharded_loader(range(9), batch_size=4, dp_rank=0, dp_size=1, collate=torch.tensor)
    assert sum(int(batch.sum()) for batch in loader) == 36
    assert torch.equal(torch.get_rng_state(), state)


def test_loader_balances_cost_over_ranks() -> None:
    """Balance one long sample among short ones: the global batches do not change, and no rank gets far more cost than another."""
    costs = [1.0 + 63 * (i % 8 == 0) for i in range(64)]
    plain, dealt = (loaders(64, 2, batch_size=16, seed=5, costs=c) for c in (None, costs))
    for batch, shards in zip(global_batches(plain), zip(*dealt, strict=True), strict=True):
        assert sorted(batch) == sorted(i for shard in shards for i in shard)
        sums = [sum(costs[i] for i in shard) for shard in shards]
        long = sum(costs[i] > 1 for i in batch)
        assert max(sums) - min(sums) <= (64 if long % 2 else 1)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=30), st.integers(1, 6))
def test_balanced_shards_are_complete_and_even(costs: list[float], n: int) -> None:
    shards = deal(costs, n)
    assert sorted(i for shard in shards for i in shard) == list(range(len(costs)))
    assert len(shards) == n
    assert all(shards) or len(costs) < n
    sums = [sum(costs[i] for i in shard) for shard in shards]
    assert max(sums) - min(sums) <= max(costs) * (1 + 1e-9)


def test_invalid_costs_raise() -> None:
    with pytest.raises(ValueError, match=r"costs\[1\] = 0"):
        deal([1.0, 0.0], 2)
    with pytest.raises(ValueError, match="n = 0"):
        deal([1.0], 0)
    assert sequence_cost(1000, 0.001) == 2000


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"costs": [1.0]}, "costs has 1 numbers for a dataset of 9 samples"),
        ({"dp_rank": 2}, "dp_rank = 2 of dp_size = 2"),
        ({"batch_size": 1}, "batch_size = 1 is below dp_size = 2"),
        ({"dataset": range(1)}, "the dataset has 1 samples for dp_size = 2"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_invalid_loader_arguments_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharded_loader(**{"dataset": range(9), "batch_size": 4, "dp_rank": 0, "dp_size": 2, **kwargs})


@pytest.mark.parametrize("state", [{}, {"seed": 0, "epoch": 0, "cursor": -1}, {"seed": 0, "epoch": 0, "cursor": "3"}])
def test_invalid_loader_state_raises(state: dict[str, Any]) -> None:
    (loader,) = loaders(9, 1)
    with pytest.raises(ValueError, match="the loader's state is"):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match="cursor = 10 in a dataset of 9 samples"):
        loader.load_state_dict({"seed": 0, "epoch": 0, "cursor": 10})
