"""Micro-batches that stay on the ranks, as the driver sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from areal.api import MicroBatch, MicroBatchList
from areal.dispatch.shards import ShardPlan


@dataclass(frozen=True)
class RemoteMicroBatches(MicroBatchList):
    """The layout of the micro-batches of all coordinates. Their tensors are on the ranks.

    ``real``, ``n_tokens`` and ``restore`` work as for the micro-batches of an engine: micro-batches are ordered by coordinate, and samples have
    their index in the caller's batch.

    Attributes:
        key: name of the micro-batches on the ranks.
    """

    key: str = ""


def joined_layouts(plan: ShardPlan, lists: Sequence[MicroBatchList], key: str) -> RemoteMicroBatches:
    """Return the micro-batches of all coordinates as one list.

    Args:
        plan: division of the batch.
        lists: layouts of the micro-batches of each coordinate.
        key: name of the micro-batches on the ranks.
    """
    real: list[MicroBatch] = []
    for samples, mbs in zip(plan.indices, lists, strict=True):
        for mb in mbs.real:
            sample_ids = tuple(samples[i] for i in mb.sample_ids)
            real.append(dataclasses.replace(mb, index=len(real), sample_ids=sample_ids))
    dropped = sorted(samples[i] for samples, mbs in zip(plan.indices, lists, strict=True) for i in mbs.dropped)
    # All ranks name the same adapters.
    adapters = lists[0].adapters
    return RemoteMicroBatches(mbs=tuple(real), form=plan.form, dropped=tuple(dropped), adapters=adapters, key=key)
