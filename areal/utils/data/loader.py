"""A data loader that shards by data-parallel rank and resumes on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from areal.utils.data.packing import deal

_STATE = ("seed", "epoch", "cursor")


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _ShardSampler(Sampler[list[int]]):
    """The indices of this rank's part of each global batch, from wherever ``cursor`` stands."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool,
        costs: Sequence[float] | None,
    ) -> None:
        self.length = length
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = shuffle
        self.costs = costs
        self.epoch = 0
        self.cursor = 0

    def __len__(self) -> int:
        full, tail = divmod(self.length, self.batch_size)
        return max(1, full + (tail >= self.dp_size))

    def stop(self) -> int:
        """Where the global batch that begins at the cursor ends."""
        end = self.cursor + self.batch_size
        # A tail that cannot give every rank a sample joins the batch before it.
        return self.length if self.length - end < self.dp_size else end

    def __iter__(self) -> Iterator[list[int]]:
        made, order = None, []
        while self.cursor < self.length:
            if made != (self.seed, self.epoch):
                made, order = (self.seed, self.epoch), self.order()
            yield self.share(order[self.cursor : self.stop()])

    def share(self, batch: list[int]) -> list[int]:
        """This rank's part of a global batch."""
        if self.costs is not None:
            return [batch[i] for i in deal([self.costs[i] for i in batch], self.dp_size)[self.dp_rank]]
        first, last = (len(batch) * r // self.dp_size for r in (self.dp_rank, self.dp_rank + 1))
        return batch[first:last]

    def order(self) -> list[int]:
        """The epoch's order of the whole dataset; the same on every rank."""
        if not self.shuffle:
            return list(range(self.length))
        # Mixed so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        generator = torch.Generator().manual_seed(
            (self.seed * 0x9E3779B97F4A7C15 + self.epoch * 0xD1B54A32D192ED03) % 2**63
        )
        return torch.randperm(self.length, generator=generator).tolist()


class ShardedLoader(StatefulDataLoader[Any]):
    """This rank's part of one global order of samples; made by :func:`sharded_loader`.

    One iteration runs from where the loader stands to the end of the epoch; the next begins the next epoch. Where an
    iteration is left early, or a state was loaded, the next one goes on from there. The loader stands behind the last
    batch that it *yielded*: one whose loading raised comes again. Iterate in one place at a time.
    """

    def __init__(self, dataset: SizedDataset, sampler: _ShardSampler, collate: Callable[[list[Any]], Any]) -> None:
        source: Dataset[Any] = dataset  # type: ignore[assignment]  # any object with a length and items will do
        # A generator of its own: otherwise each iteration draws from the global one, and a resumed run differs.
        generator = torch.Generator()
        with warnings.catch_warnings():
            # torchdata 0.11 calls something that torch 2.13 deprecated; the caller can do nothing about it.
            warnings.filterwarnings("ignore", message=".*set_vital.*")
            super().__init__(source, batch_sampler=sampler, collate_fn=collate, num_workers=0, generator=generator)
        self._position = sampler

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._position.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            # Before the yield: a state that is taken while the caller works on the batch counts it.
            self._position.cursor = self._position.stop()
            yield batch
        self._position.epoch += 1
        self._position.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """``seed``, ``epoch`` and ``cursor``, the samples of this epoch that all ranks together were given. The same on
        every rank."""
        return {name: getattr(self._position, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a loader of the same dataset stood, on whatever number of ranks.

        The samples of the rest of the epoch are exactly those that had not been yielded. Should fewer of them be left
        than there are ranks now, some ranks get an empty list.

        Raises:
            ValueError: this is not the state of a loader, or of one with a longer dataset.
        """
        values = [state_dict.get(name) for name in _STATE]
        if any(not isinstance(value, int) or value < 0 for value in values):
            raise ValueError(
                f"the loader's state is {state_dict}: expected whole numbers {list(_STATE)}, as state_dict() returns "
                "them"
            )
        if state_dict["cursor"] > self._position.length:
            raise ValueError(
                f"the loader's state has cursor = {state_dict['cursor']} in a dataset of {self._position.length}: load "
                "it with its own dataset"
            )
        for name in _STATE:
            setattr(self._position, name, state_dict[name])


def sharded_loader(
    dataset: SizedDataset,
    *,
    batch_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int = 0,
    shuffle: bool = True,
    costs: Sequence[float] | None = None,
    collate: Callable[[list[Any]], Any] = list,
) -> ShardedLoader:
    """Shard a map-style dataset by data-parallel rank, batch by batch.

    An epoch is one order of all samples, cut into global batches of ``batch_size``; each rank gets a contiguous part of
    every batch, the parts differing by at most one sample, or with ``costs`` parts of about the same cost. So the
    global batches are the same for every ``dp_size``. Nothing is dropped: a last short batch is passed on, and one of
    fewer than ``dp_size`` samples joins the batch before it.

    Args:
        dataset: ``len()`` and items by index.
        batch_size: samples of a global batch, over all ranks.
        dp_rank: this rank's data-parallel coordinate; ranks that share it get the same samples.
        dp_size: data-parallel ranks.
        seed: of the order, together with the epoch; the same on every rank.
        shuffle: whether the order is random, and another in each epoch.
        costs: of each sample of the dataset, such as its tokens, or their :func:`~areal.utils.data.sequence_cost`: ranks wait for the slowest.
        collate: makes a batch of a list of samples; the list itself by default.

    Raises:
        ValueError: a number is out of range, or there are fewer samples than ranks.
    """
    length = len(dataset)
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank = {dp_rank} of dp_size = {dp_size}: a rank is from 0 to dp_size - 1")
    if batch_size < dp_size:
        raise ValueError(
            f"batch_size = {batch_size} is below dp_size = {dp_size}: it counts samples over all ranks; give each at "
            "least 1"
        )
    if length < dp_size:
        raise ValueError(
            f"the dataset has {length} samples for dp_size = {dp_size} ranks: take fewer ranks, or more samples"
        )
    if seed < 0:
        raise ValueError(f"seed = {seed}: a seed is 0 or above")
    if costs is not None and len(costs) != length:
        raise ValueError(f"costs has {len(costs)} numbers for a dataset of {length} samples: give one for each")
    sampler = _ShardSampler(length, batch_size, dp_rank, dp_size, seed, shuffle, costs)
    return ShardedLoader(dataset, sampler, collate)
