"""Bugs of rewards and environments that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

ENVIRONMENT = "unit/chat/test_environment_episode.py::test_{}"
JUDGE = "unit/rewards/test_judge.py::test_{}"
PROGRAMS = "unit/rewards/test_python_checker.py::test_{}"


@mutant("areal.trainer.rewards.judge:Judge._read_score", JUDGE.format("reply_without_a_score_raises_and_is_not_kept"))
def reply_without_a_score_is_zero(right: Function) -> Function:
    """A judge that does not answer as asked gives a reward of 0, which is trained on."""

    def wrong(self: Any, reply: str) -> float:
        try:
            return float(right(self, reply))
        except ValueError:
            return 0.0

    return wrong


@mutant("areal.trainer.rewards.python_checker:_same", PROGRAMS.format("pairs_of_input_and_output"))
def first_line_of_output_is_compared(right: Function) -> Function:
    """A program passes if the first line of its output is right."""
    return lambda output, expected: right(output.partition("\n")[0], expected.partition("\n")[0])


@mutant(
    "areal.trainer.rollout.environment_episode:_Made.close",
    ENVIRONMENT.format("cancelled_episode_closes_its_environment"),
)
def environment_is_not_closed(right: Function) -> Function:
    """Environments of episodes that end stay open."""
    return lambda self: None
