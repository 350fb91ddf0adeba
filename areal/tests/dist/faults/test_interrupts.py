"""Interrupts of a call, such as Ctrl-C: they are raised as they are, and nothing of the call is left."""

from __future__ import annotations

import pytest
from torch import Tensor

from areal.api import MicroBatch, MicroBatchSpec, TokenOutputs
from areal.tests.dist.faults.lost import everywhere
from areal.tests.dist.faults.twins import twins
from areal.tests.harness.limits import promptly
from areal.tests.harness.tiny import global_batch, layouts, local_batch, loss, started
from areal.tests.harness.world import world
from areal.utils.distributed import EngineLostError


def interrupted(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, int]:
    if mb.index == 1:
        raise KeyboardInterrupt
    return loss(outputs, mb.data), mb.index


@pytest.mark.parametrize("backend", layouts(1))
def test_interrupted_call_leaves_no_gradients(backend: str) -> None:
    with twins(backend, mb_spec=MicroBatchSpec(n_mbs=2)) as pair:
        for forward_only in (False, True):
            mbs = pair.engine.microbatches(pair.batch())
            with pytest.raises(KeyboardInterrupt):
                pair.engine.forward_backward_batch(mbs, interrupted, forward_only=forward_only)
            pair.check()


@pytest.mark.world(2)
def test_interrupt_of_one_rank_ends_the_engine() -> None:
    def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, int]:
        return interrupted(outputs, mb) if world().rank == 1 else (loss(outputs, mb.data), mb.index)

    with started("fsdp:d2", mb_spec=MicroBatchSpec(n_mbs=2)) as engine:
        mbs = engine.microbatches(local_batch(engine, global_batch()))
        with promptly(), pytest.raises(KeyboardInterrupt if world().rank == 1 else EngineLostError) as caught:
            engine.forward_backward_batch(mbs, process)
        says = str(caught.value)
        assert world().rank == 1 or "rank 1: KeyboardInterrupt in micro-batch 1" in says
        assert everywhere(engine._components is None) == [True, True]
