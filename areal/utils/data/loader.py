"""A data loader that shards samples by data-parallel rank, and resumes on any number of ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from areal.utils.data.packing import deal

logger = logging.getLogger(__name__)

_STATE = ("seed", "epoch", "cursor")
_SIZES = ("length", "batch_size")


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _ShardSampler(Sampler[list[int]]):
    """Sampler of this rank's indices of each global batch.

    Attributes:
        epoch: current epoch.
        cursor: number of samples of this epoch that all ranks together have received.
    """

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

    def batch_end(self) -> int:
        """Return the end of the global batch that begins at the cursor."""
        end = self.cursor + self.batch_size
        # A last batch with fewer samples than ranks is joined to the batch before it.
        return self.length if self.length - end < self.dp_size else end

    def __iter__(self) -> Iterator[list[int]]:
        ordered_for, order = None, []
        # The loader advances the cursor between two batches. The order is computed again only for another seed or epoch.
        while self.cursor < self.length:
            if ordered_for != (self.seed, self.epoch):
                ordered_for, order = (self.seed, self.epoch), self.order()
            yield self.rank_indices(order[self.cursor : self.batch_end()])

    def rank_indices(self, batch: list[int]) -> list[int]:
        """Return this rank's indices of a global batch: of similar cost, or a contiguous slice."""
        if self.costs is not None:
            return [batch[i] for i in deal([self.costs[i] for i in batch], self.dp_size)[self.dp_rank]]
        first, last = (len(batch) * r // self.dp_size for r in (self.dp_rank, self.dp_rank + 1))
        return batch[first:last]

    def order(self) -> list[int]:
        """Return the order of the full dataset in this epoch, equal on all ranks."""
        if not self.shuffle:
            return list(range(self.length))
        # Seed and epoch are mixed by large odd numbers, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
        generator = torch.Generator().manual_seed(
            (self.seed * 0x9E3779B97F4A7C15 + self.epoch * 0xD1B54A32D192ED03) % 2**63
        )
        return torch.randperm(self.length, generator=generator).tolist()


class ShardedLoader(StatefulDataLoader[Any]):
    """Loader of this rank's samples, in an order that is global over ranks. Created by :func:`sharded_loader`.

    One iteration runs from the current position to the end of the epoch, the next iteration over the next epoch. After an
    iteration that was left early, or after loading a state, the next one continues from there. The position is after the last
    batch that was *yielded*: a batch whose loading raised is loaded again. Only one iteration can be active at a time.
    """

    def __init__(self, dataset: SizedDataset, sampler: _ShardSampler, collate: Callable[[list[Any]], Any]) -> None:
        source: Dataset[Any] = dataset  # type: ignore[assignment]  # any object with a length and items will do
        # A separate generator: otherwise each iteration draws from the global one, and a resumed run differs.
        generator = torch.Generator()
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecated. The caller cannot change that.
            warnings.filterwarnings("ignore", message=".*set_vital.*")
            super().__init__(source, batch_sampler=sampler, collate_fn=collate, num_workers=0, generator=generator)
        self._position = sampler

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._position.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            # Before the yield: a state that is saved while the caller uses the batch must count it.
            self._position.cursor = self._position.batch_end()
            yield batch
        self._position.epoch += 1
        self._position.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return ``seed``, ``epoch`` and ``cursor`` (samples of this epoch received by all ranks), and the sizes of data set and batch.

        Equal on all ranks.
        """
        return {name: getattr(self._position, name) for name in (*_STATE, *_SIZES)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of a loader of the same dataset, on any number of ranks.

        The rest of the epoch consists of exactly those samples that were not yielded. If fewer samples are left than there are
        ranks, some ranks get an empty list. Another ``batch_size`` takes effect, and is logged.

        Raises:
            ValueError: this is not the state of a loader, or the state is in the middle of an epoch of a dataset of another length.
        """
        # Check everything before anything is changed.
        values = [state_dict.get(name) for name in _STATE]
        if any(not isinstance(value, int) or value < 0 for value in values):
            raise ValueError(
                f"the loader's state is {state_dict}: expected whole numbers {list(_STATE)}, as state_dict() returns "
                "them"
            )
        # States of earlier releases are without sizes. Between two epochs, the length does not matter.
        cursor, length = state_dict["cursor"], self._position.length
        saved_length = state_dict.get("length", length)
        if cursor > length or (cursor and saved_length != length):
            raise ValueError(
                f"the loader's state has cursor = {cursor} in a dataset of {saved_length} samples, and this one has {length}: samples would be "
                "left out or repeated; load it with its own dataset, or begin an epoch without the state"
            )
        saved = state_dict.get("batch_size", self._position.batch_size)
        if saved != self._position.batch_size and self._position.dp_rank == 0:
            logger.warning(
                "batch_size = %d takes effect; the loader's state was saved with %d", self._position.batch_size, saved
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

    An epoch is one order of all samples, divided into global batches of ``batch_size``. Each rank gets a contiguous slice of
    every global batch; slices differ by at most one sample. With ``costs``, ranks get samples of similar total cost instead.
    So the global batches are the same for every ``dp_size``. No sample is dropped: the last batch may be short, and if it has
    fewer than ``dp_size`` samples, it is joined to the batch before it.

    Args:
        dataset: map-style dataset, with ``len()`` and items by index.
        batch_size: number of samples of a global batch, over all ranks.
        dp_rank: data-parallel rank. Processes with the same data-parallel rank get the same samples.
        dp_size: number of data-parallel ranks.
        seed: seed of the order, together with the epoch. Equal on all ranks.
        shuffle: whether the order is random, and different in each epoch.
        costs: cost of each sample of the dataset, such as its :func:`~areal.utils.data.sequence_cost`. Balances the ranks,
            which wait for the slowest one.
        collate: function that converts a list of samples to a batch. Defaults to the list itself.

    Raises:
        ValueError: an argument is out of range, or there are fewer samples than ranks.
    """
    # Every rank must get at least one sample of every global batch.
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
