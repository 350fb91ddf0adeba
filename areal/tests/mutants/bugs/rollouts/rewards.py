"""Bugs of rewards and environments that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import re
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


@mutant(
    "areal.trainer.rewards.python_checker:fenced_program",
    PROGRAMS.format("answers_without_a_program_are_counted"),
)
def end_of_a_foreign_block_begins_a_program(right: Function) -> Function:
    """Blocks of other languages are not matched, so that text behind one counts as the program."""
    fence = re.compile(r"^```(?:python)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return lambda text: (fence.findall(text) or [None])[-1]


@mutant(
    "areal.trainer.rewards.math_answer:_with_last_boxed", "unit/rewards/test_math_reward.py::test_verdicts[2-*-right]"
)
def withdrawn_answer_counts(right: Function) -> Function:
    """An answer that the model has taken back is compared, too."""
    return lambda text: text
