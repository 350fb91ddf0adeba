"""Shared prefixes: the prefix tree compared with its definition, and token budgets."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api import MicroBatchSpec, PrefixTree
from areal.engine.attention.token_stream import TokenStream
from areal.utils.data import plan_batch
from areal.utils.data.prefixes import Prefixes

SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
"""Draw from few token ids, so that many samples share a prefix."""


def as_batch(samples: list[list[int]]) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor(ids)} for ids in samples]


def beginnings(samples: list[list[int]]) -> set[tuple[int, ...]]:
    """Return every prefix of every sample: each prefix is one token of the stream."""
    return {tuple(ids[: n + 1]) for ids in samples for n in range(len(ids))}


def check(tree: PrefixTree, samples: list[list[int]]) -> None:
    """Check that each stream token is one prefix, is routed to each sample with that prefix, and attends only to its own prefix."""
    assert len(tree) == sum(tree.own) == len(beginnings(samples))
    packed = [tuple(ids[: n + 1]) for ids in samples for n in range(len(ids))]
    stream = [packed[i] for i in tree.tokens]
    assert [stream[index] for index in tree.places] == packed
    branches = TokenStream.of([len(ids) for ids in samples], len(tree) + 3, tree)
    assert branches.positions().tolist() == [len(beginning) - 1 for beginning in stream] + [0, 1, 2]
    ends = list(accumulate(branches.own))
    *paths, padding = branches.all_paths()
    assert padding.tolist() == [len(tree), len(tree) + 1, len(tree) + 2]
    for own, end, path in zip(tree.own, ends, paths, strict=False):
        last = stream[end - 1]
        assert [stream[index] for index in path] == [last[: n + 1] for n in range(len(last))]
        assert path[-own:].tolist() == list(range(end - own, end))


@settings(max_examples=300, deadline=None)
@given(SAMPLES)
def test_stream_contains_every_prefix_once(samples: list[list[int]]) -> None:
    plan = plan_batch(as_batch(samples), MicroBatchSpec(share_prefixes=True))
    (tree,) = plan.trees
    assert tree is not None
    check(tree, [samples[i] for i in plan.bins[0]])


@settings(max_examples=300, deadline=None)
@given(SAMPLES, st.integers(9, 30), st.integers(1, 4), st.sampled_from([1, 4]), st.sampled_from([1, 2]))
def test_shared_prefix_counts_once_in_token_budget(
    samples: list[list[int]], budget: int, n_mbs: int, align: int, granularity: int
) -> None:
    samples = samples * granularity
    spec = MicroBatchSpec(
        max_tokens_per_mb=2 * budget // align * align + align,
        n_mbs=n_mbs,
        share_prefixes=True,
        granularity=granularity,
    )
    plan = plan_batch(as_batch(samples), spec, align=align)
    assert sorted(i for members in plan.bins for i in members) == list(range(len(samples)))
    assert plan.n_mbs >= min(n_mbs, len(samples) // granularity)
    for members, tree in zip(plan.bins, plan.trees, strict=True):
        assert all(
            members[k : k + granularity] == tuple(range(members[k], members[k] + granularity))
            for k in range(0, len(members), granularity)
        )
        assert tree is not None
        check(tree, [samples[i] for i in members])
        assert -(-len(tree) // align) * align <= (spec.max_tokens_per_mb or 0)


def test_groups_are_packed_together() -> None:
    """Pack sixteen shuffled groups of eight: a budget for four groups fits four, and each prompt is computed once."""
    prompts = torch.randint(0, 1000, (16, 50), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": torch.cat([prompts[i % 16], torch.tensor([1000 + i] * 10)])} for i in range(128)]
    plan = plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=4 * (50 + 8 * 10), share_prefixes=True))
    assert plan.n_mbs == 4
    assert [len(tree) for tree in plan.trees if tree is not None] == [4 * (50 + 8 * 10)] * 4


def test_outputs_are_shared_only_for_equal_requests() -> None:
    """Check that tokens with different targets, output masks or temperatures do not share outputs."""
    ids = [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 2]]
    batch: list[dict[str, Tensor]] = as_batch(ids)
    (tree,) = plan_batch(batch, MicroBatchSpec(share_prefixes=True)).trees
    assert tree is not None
    assert len(tree) == 5
    assert len(tree.scored) == 6  # 5, 6, 7 before 1, 7 before 2, 1, 2
    for sample, temperature in zip(batch, (1.0, 1.0, 0.5), strict=True):
        sample["temperature"] = torch.tensor(temperature)
    (tree,) = plan_batch(batch, MicroBatchSpec(share_prefixes=True)).trees
    assert tree is not None
    assert len(tree) == 5
    assert len(tree.scored) == 6 + 4
    answers = tree.answers.view(3, 4)
    assert (answers[0] == answers[1]).tolist() == [True, True, False, False]
    assert not (answers[1] == answers[2]).any()


def test_tokens_with_different_recorded_routing_are_not_shared() -> None:
    """Equal tokens replayed through different experts have different hidden states and must not be shared."""
    experts = torch.zeros(3, 2, 1, dtype=torch.int64)
    other = experts.clone()
    other[1, 1] = 3
    prefixes = Prefixes({"input_ids": [torch.tensor([1, 2, 3])] * 2, "routed_experts": [experts, other]})
    assert prefixes.shared(0, 1) == 1
    assert Prefixes({"input_ids": [torch.tensor([1, 2, 3])] * 2}).shared(0, 1) == 3


def test_sample_above_token_budget_raises() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 7 tokens, above MicroBatchSpec.max_tokens_per_mb = 6"):
        plan_batch(as_batch([[1, 2], [1] * 7]), MicroBatchSpec(max_tokens_per_mb=6, share_prefixes=True))
