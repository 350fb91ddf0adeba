"""Mathematical answers, compared by the installed math-verify."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.inference.protocol import Completion
from areal.tests.harness.limits import PATIENTLY, promptly, wait_until
from areal.trainer.rewards import MathReward, decoded, last_content
from areal.trainer.rewards.math_answer import compare_answers

BOX = "So it is $\\boxed{%s}$."
TOWER = BOX % "9^{9^{9^{9^9}}}"


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("4", BOX % "4", "right"),
        ("4", "2 + 2 = 4", "right"),
        ("4", "First 4, then 5. The final answer is 5.", "wrong"),
        ("\\frac{1}{2}", BOX % "0.5", "right"),
        ("3\\sqrt{2}", BOX % "\\sqrt{18}", "right"),
        ("3\\sqrt{2}", BOX % "3", "wrong"),
        ("$x^2 + 2x + 1$", BOX % "(x+1)^2", "right"),
        ("(1, 2)", BOX % "(2, 1)", "wrong"),
        ("2", "\\boxed{1}. Hmm, that is wrong. It is \\boxed{2}.", "right"),
        ("2", "\\boxed{\\frac{2}{1}} is the answer, not \\boxed{1}", "wrong"),
        ("1, 2", "\\boxed{1} and \\boxed{2}", "right"),
        ("4", "I do not know.", "unparsed"),
        ("4", "", "unparsed"),
    ],
)
def test_verdicts(gold: str, text: str, verdict: str) -> None:
    assert compare_answers(gold, text, 20.0) == verdict


def test_answers_that_take_too_long_are_interrupted() -> None:
    """Also where math-verify catches every ``Exception``. The handler of the signal is that of before."""
    before = signal.getsignal(signal.SIGALRM)
    with promptly():
        assert compare_answers("4", TOWER, 0.3) == "timeouts"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_right_answer_must_be_one() -> None:
    with pytest.raises(ValueError, match="the right answer '' cannot be parsed"):
        compare_answers("", BOX % "4", 5.0)


def test_rewards_and_counts_of_processes() -> None:
    """One process survives answers that hang and items that are wrong, and ends when the reward is closed."""
    reward = MathReward(lambda item: item, workers=1, seconds=1.0)

    async def all_of_them() -> list[Any]:
        answers = [("4", BOX % "4"), ("4", BOX % "5"), ("4", TOWER), ("4", "?"), ("", BOX % "4"), ("4", BOX % "2^2")]
        work = (reward(gold, [{"role": "assistant", "content": text}]) for gold, text in answers)
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENTLY)

    results = asyncio.run(all_of_them())
    assert [each for each in results if isinstance(each, float)] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert str(results[4]) == "ValueError: the right answer '' cannot be parsed: it must be a number or LaTeX"
    assert reward.counts == {"right": 2, "wrong": 1, "timeouts": 1, "unparsed": 1, "failed": 1}
    (worker,) = reward._pool._workers
    pid = worker._process.pid  # type: ignore[attr-defined]
    assert pid != os.getpid()
    reward.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or worker._process.exitcode is not None)  # type: ignore[attr-defined]


def test_text_of_an_answer() -> None:
    class Words:
        def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return " ".join(map(str, token_ids))

    completion = Completion((1, 2), (0.0, 0.0), (0, 0), "stop")
    assert decoded(Words())(completion) == "1 2"
    assert last_content([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    assert last_content("c") == "c"
    for wrong, words in (
        (completion, "decoded"),
        ([], "no message"),
        ([{"role": "assistant"}], "no message"),
        (3, "no message"),
    ):
        with pytest.raises(ValueError, match=words):
            last_content(wrong)


def test_bad_numbers_are_named() -> None:
    for options, words in (({"seconds": 0}, "MathReward.seconds = 0"), ({"workers": 0}, "MathPool.workers = 0")):
        with pytest.raises(ValueError, match=words):
            MathReward(str, **options)


def test_package_is_imported_without_its_extras() -> None:
    """A missing package is named, with the command that installs it, by what needs it alone."""
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "import areal.trainer.rewards as rewards\n"
        "assert not {'httpx2', 'sympy', 'reasoning_gym'} & set(sys.modules)\n"
        "rewards.PythonChecker\n"
        "try: rewards.MathReward\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENTLY, check=False)
    assert run.stdout.strip() == "MathReward needs math-verify: pip install 'areal[rewards]'", run.stderr
