"""Bugs of episodes that fail, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import asyncio
from typing import Any

from areal.tests.mutants.planting import Function, mutant


@mutant(
    "areal.trainer.rollout.report:RolloutReport._check_failures",
    "unit/rollout/test_runner.py::test_share_of_failed_episodes_is_limited[2-0.1-True]",
)
def failed_episodes_without_limit(right: Function) -> Function:
    """A batch of which most episodes failed is trained on."""
    return lambda self, failed, played, gather: None


@mutant(
    "areal.trainer.rollout.report:RolloutReport._first_errors",
    "dist/trainer/test_empty_ranks.py::test_too_many_failed_episodes_end_the_run_on_every_rank[w2]",
)
def first_error_of_this_rank_only(right: Function) -> Function:
    """The message about failed episodes has the error of this rank only."""
    return lambda self, gather: right(self, lambda value: [value])


@mutant(
    "areal.trainer.rollout.sequence:Sequence.oldest_version",
    "dist/trainer/test_empty_ranks.py::test_sync_that_sends_nothing_ends_the_run[w2]",
)
def staleness_not_measured(right: Function) -> Function:
    """The age of a sequence is not measured, so that a run goes on whose weights never reach the rollout."""
    return lambda self, default, oldest=None: default


@mutant(
    "areal.trainer.ppo:PPOTrainer._check_trained",
    "dist/trainer/test_empty_ranks.py::test_run_ends_after_steps_in_a_row_without_a_trained_token[w2]",
)
def empty_steps_without_limit(right: Function) -> Function:
    """A run goes on that trains on nothing."""
    return lambda self, updates: None


@mutant(
    "areal.trainer.rollout.call_pool:CallPool.call_in_any_case",
    "unit/chat/test_environment_episode.py::test_environment_is_closed_if_other_calls_are_before",
)
def queued_close_is_given_up(right: Function) -> Function:
    """An environment whose close waits for other calls stays open."""

    async def wrong(self: Any, seconds: float, *args: Any) -> Any:
        async with asyncio.timeout(seconds):
            return await self(*args)

    return wrong
