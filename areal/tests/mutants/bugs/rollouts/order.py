"""Bugs of the order in which groups are trained on that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.tests.mutants.planting import Function, mutant
from areal.trainer.rollout.order import equal_counts

ORDER = "unit/rollout/test_completion_order.py::{}"
RANKS = "unit/rollout/test_ranks_that_complete.py::{}"


@mutant(
    "areal.trainer.rollout.order.completion:CompletionOrder.too_late",
    ORDER.format("test_trainer_hardly_waits_under_a_long_tail[cancelled]"),
)
def groups_beyond_the_bound_are_kept(right: Function) -> Function:
    """A group that is complete after the bound is trained on."""
    return lambda self, batch: []


@mutant(
    "areal.trainer.rollout.order.completion:CompletionOrder.too_late",
    ORDER.format("test_trainer_hardly_waits_under_a_long_tail[cancelled]"),
    ORDER.format("test_run_goes_on_from_its_state[False-1-1]"),
)
def bound_of_one_update_more(right: Function) -> Function:
    """A group may be in one batch more than the bound allows."""
    return lambda self, batch: right(self, batch - 1)


@mutant(
    "areal.trainer.rollout.order.group_order:GroupOrder.state",
    ORDER.format("test_run_goes_on_from_its_state[False-1-1]"),
)
def consumed_groups_played_again(right: Function) -> Function:
    """A resumed run plays groups again that were consumed before one that had begun earlier."""

    return lambda self: right(self) | {"ahead": []}


@mutant(
    "areal.trainer.rollout.order.group_order:GroupOrder.load",
    ORDER.format("test_state_does_not_wait_for_an_endless_episode[True]"),
)
def running_groups_not_played_again(right: Function) -> Function:
    """A resumed run leaves out groups that were being played when the state was saved."""

    def wrong(self: Any, state: Any, share: Any) -> None:
        right(self, state, share)
        self._finish(self._again)
        self._again = []

    return wrong


@mutant(
    "areal.trainer.rollout.runner:Runner._cancel",
    ORDER.format("test_group_beyond_the_bound_is_cancelled_and_replaced"),
)
def groups_beyond_the_bound_go_on(right: Function) -> Function:
    """Episodes of a group that was given up keep generating."""
    return lambda self, numbers: self._start_allowed()


@mutant(
    "areal.trainer.rollout.sequence:Sequence._segments_since",
    ORDER.format("test_partial_answers_are_trained_on_without_their_old_tokens"),
)
def old_tokens_of_partial_answers_trained(right: Function) -> Function:
    """Tokens of a partial answer that are older than the bound are trained on."""
    return lambda self, oldest: list(self.segments)


@mutant(
    "areal.trainer.rollout.order.resharding:resharded",
    "unit/rollout/test_resharding.py::test_every_batch_is_played_within_the_bound[2-1-True]",
)
def groups_that_wait_are_taken_over_at_any_place(right: Function) -> Function:
    """A run on another number of ranks keeps groups that are beyond the bound now, or behind more groups than may begin."""
    return lambda states, share, plan: right(states, share, dataclasses.replace(plan, in_order=False))


@mutant(
    "areal.trainer.rollout.order.shares:counts_of_complete",
    RANKS.format("test_trainer_hardly_waits_for_any_rank[16-10-cancelled]"),
    RANKS.format("test_slow_rank_gives_fewer_groups"),
)
def batches_of_equal_numbers(right: Function) -> Function:
    """A batch waits until each rank has its share of the groups."""

    def wrong(complete: Any, groups: int) -> Any:
        counts = equal_counts(len(complete), groups)
        return counts if all(len(its) >= count for its, count in zip(complete, counts, strict=True)) else None

    return wrong


@mutant(
    "areal.trainer.rollout.order.shares:position_of",
    RANKS.format("test_positions_are_those_of_a_batch[counts1]"),
    RANKS.format("test_slow_rank_gives_fewer_groups"),
)
def positions_of_equal_numbers(right: Function) -> Function:
    """Positions are those of ranks that give equally many groups, so that some coordinates train on more than others."""
    return lambda place, rank, counts: place * len(counts) + rank
