"""Streams of micro-batches: what several devices of one process compute."""

from __future__ import annotations

import random

import pytest
import torch

from areal.api import MicroBatch, MicroBatchSpec
from areal.tests.grid.cases import CASES, samples
from areal.utils.data import BatchPlan, plan_batch


def built(plan: BatchPlan) -> tuple[MicroBatch, ...]:
    return plan.build(n_mbs=plan.n_mbs, device=torch.device("cpu")).mbs


@pytest.mark.parametrize("budget", [None, 64, 100])
@pytest.mark.parametrize("n_mbs", [None, 3])
def test_streams_are_within_the_budget_and_hold_every_sequence(budget: int | None, n_mbs: int | None) -> None:
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))]
        batch = [{"input_ids": torch.full((n,), n)} for n in lengths]
        plan = plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=budget, n_mbs=n_mbs), streams=4)
        mbs = built(plan)
        assert sorted(i for mb in mbs for i in mb.sample_ids) == list(range(len(lengths)))
        assert len(mbs) >= min(n_mbs or 1, len(lengths))
        for mb in mbs:
            assert 1 <= len(mb.streams) <= 4
            # A micro-batch is its streams end to end.
            assert mb.sample_ids == tuple(i for stream in mb.streams for i in stream.sample_ids)
            assert torch.equal(mb.data["input_ids"], torch.cat([stream.data["input_ids"] for stream in mb.streams]))
            assert all(stream.n_tokens <= (budget or 10**9) for stream in mb.streams)
        # As few micro-batches as four devices need, unless more are wanted.
        if budget is not None and n_mbs is None:
            one_by_one = plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=budget))
            assert len(mbs) == -(-one_by_one.n_mbs // 4)


def test_sequences_are_spread_over_streams() -> None:
    (mb,) = built(plan_batch([{"input_ids": torch.zeros(8, dtype=torch.long)}] * 8, MicroBatchSpec(), streams=4))
    assert [stream.n_tokens for stream in mb.streams] == [16] * 4


def test_micro_batches_of_one_device_have_no_streams() -> None:
    batch = samples(CASES["ragged"])
    plan, same = (
        plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=40)),
        plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=40), streams=1),
    )
    assert plan.bins == same.bins
    assert all(not mb.streams for mb in built(same))


def test_tree_of_streams_is_that_of_their_trees() -> None:
    """The stream of a micro-batch is those of its streams, and a token reads the outputs that it has there."""
    spec = MicroBatchSpec(share_prefixes=True, max_tokens_per_mb=40)
    for mb in built(plan_batch(samples(CASES["family"]), spec, streams=3)):
        assert mb.tree is not None
        tokens = mb.data["input_ids"]
        assert torch.equal(tokens[mb.tree.tokens][mb.tree.stream_index], tokens)
        assert torch.equal(tokens[mb.tree.output_tokens][mb.tree.output_index], tokens)
        assert len(mb.tree) == sum(len(stream.tree or ()) for stream in mb.streams)
        ids = [stream.data["input_ids"][stream.tree.tokens] for stream in mb.streams if stream.tree is not None]
        assert torch.equal(tokens[mb.tree.tokens], torch.cat(ids))
        contexts = mb.tree.context_index.split(list(mb.tree.context_lengths))
        assert all(int(context.max()) < len(mb.tree) for context in contexts)
        # The last token of a context is that of its branch.
        ends = torch.tensor(mb.tree.lengths).cumsum(0) - 1
        assert [int(context[-1]) for context in contexts] == ends.tolist()
