"""Reductions of gradients that overlap with the backward, in one order on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel


class Reductions:
    """Begins the reductions of all buckets of a rank in the order in which a backward completes them.

    Ranks must begin the collectives of a process group in one order. Megatron-Core begins the reduction of a bucket when all of its
    parameters have gradients, which is another order if the losses of two ranks reach different parameters: a micro-batch that only fills
    up reaches all outputs, a loss those that it reads. Here a bucket waits for those before it, and :meth:`begin` adds the rest.

    Without overlap there are none: Megatron-Core then reduces all buckets at once, at the end.

    Args:
        chunks: model chunks of this rank. Their buckets begin by this object from now on.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups: list[Any] = []
        self._complete: set[int] = set()
        self._begun = 0
        for chunk in reversed(chunks):
            if chunk.ddp_config.overlap_grad_reduce:
                position = {parameter: number for number, parameter in enumerate(chunk.module.parameters())}
                # A bucket is complete when the backward has reached the first of its parameters.
                first = {group: min(position[x] for x in group.params) for group in bucket_groups(chunk)}
                self._groups += sorted(first, key=lambda group: -first[group])
        for number, group in enumerate(self._groups):
            group.start_grad_sync = functools.partial(self._complete_bucket, number)

    def begin(self) -> None:
        """Begin the reductions that the last backward has not begun, such as of parameters that it did not reach.

        Afterwards all ranks have begun the same ones, so that each may wait for them without the others.
        """
        for number in range(len(self._groups)):
            self._complete_bucket(number)

    def forget(self) -> None:
        """Begin with the first bucket again, after all reductions have ended."""
        self._complete.clear()
        self._begun = 0

    def _complete_bucket(self, number: int, force_all_reduce: bool = False) -> None:
        """Begin the reduction of a bucket as soon as those before it have begun, in place of Megatron-Core's method of a bucket."""
        self._complete.add(number)
        while self._begun in self._complete:
            group = self._groups[self._begun]
            self._begun += 1
            type(group).start_grad_sync(group, force_all_reduce)


def bucket_groups(chunk: DistributedDataParallel) -> list[Any]:
    """Return the groups of buckets that are reduced together: dense parameters, then experts."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
