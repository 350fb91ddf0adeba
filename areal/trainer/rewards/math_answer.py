"""Rewards of mathematical answers, compared with the item's answer by math-verify."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from areal.trainer.rewards.answer_text import AnswerText, last_content
from areal.trainer.rollout.call_pool import CallPool

try:
    import math_verify
except ImportError as error:
    raise ImportError("MathReward needs math-verify: pip install 'areal[rewards]'") from error

Verdict = Literal["right", "wrong", "unparsed", "timeouts"]

_START_SECONDS = 120.0
"""Time limit of the start of a process, which imports the main module of the program."""
_BOXED = re.compile(r"\\boxed\b")
_BETWEEN = re.compile(r"(?:\s|[,;$&]|\band\b|\bor\b)*")
"""Text between two boxes that are one answer."""
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


class _OutOfTime(BaseException):
    """Not an ``Exception``, which math-verify would catch."""


class MathReward:
    """Reward of a mathematical answer: 1 if math-verify finds it equal to the item's answer, else 0. ``await reward(item, answer)``.

    Comparisons run in processes, because some answers take minutes to evaluate, and math-verify's own time limits need a main thread.
    The script must protect its main code by ``if __name__ == "__main__"``. An answer that takes too long is wrong, and counted.

    Args:
        gold: function from an item to the right answer: LaTeX or a number, such as ``"\\\\frac{1}{2}"``; delimiters are optional.
        text: function from an answer to its text. The last ``\\boxed{}``, with those directly before it, or number, or what is behind
            "final answer is", is compared.
        seconds: time limit of a comparison.
        workers: maximum number of processes.

    Attributes:
        counts: number of answers by verdict: ``right``, ``wrong``, ``unparsed`` (no answer was found), ``timeouts``, and ``failed``
            (raised; not a reward).

    Raises:
        ImportError: math-verify is not installed.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        gold: Callable[[Any], str],
        *,
        text: AnswerText = last_content,
        seconds: float = 5.0,
        workers: int = 2,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"MathReward.seconds = {seconds}: it must be above 0")
        self._gold, self._text, self._seconds = gold, text, seconds
        # A second limit, for code that the first cannot interrupt.
        self._pool = MathPool(compare_answers, workers=workers, seconds=seconds + _START_SECONDS, processes=True)
        self.counts: Counter[str] = Counter(dict.fromkeys(("right", "wrong", "unparsed", "timeouts", "failed"), 0))

    async def __call__(self, item: Any, answer: Any) -> float:
        """Return the reward of an answer.

        Raises:
            RuntimeError: the item's answer cannot be parsed, or the comparison failed: names both answers.
            TimeoutError: the process could not be interrupted, or did not start.
        """
        gold, text = self._gold(item), self._text(answer)
        try:
            verdict = await self._pool(gold, text, self._seconds)
        except Exception:
            self.counts["failed"] += 1
            raise
        self.counts[verdict] += 1
        return float(verdict == "right")

    def close(self) -> None:
        """End the processes. The reward may be used again."""
        self._pool.close()


class MathPool(CallPool):
    """Processes that compare answers."""

    noun = "comparison"

    def describe(self, argument: Any) -> str:
        return f"the comparison with the answer {argument}"


def compare_answers(gold: str, text: str, seconds: float) -> Verdict:
    """Compare the final answer of a text with the right one. Runs in the main thread of a process.

    Args:
        gold: right answer.
        text: text of a model.
        seconds: time limit.

    Raises:
        ValueError: ``gold`` cannot be parsed.
        Exception: sympy could not compare the answers.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    # The right answer is the data set's, and has no limit of this kind.
    right = _parsed(gold if any(each in gold for each in _DELIMITERS) else f"${gold}$")
    if not right:
        raise ValueError(f"the right answer {gold!r} cannot be parsed: it must be a number or LaTeX")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        found = _parsed(_with_last_boxed(text))
        if not found:
            return "unparsed"
        return "right" if math_verify.verify(right, found, timeout_seconds=None, raise_on_error=True) else "wrong"
    except _OutOfTime:
        return "timeouts"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _with_last_boxed(text: str) -> str:
    """Return a text without its earlier ``\\boxed``, which math-verify would merge with the last. Neighbours are one answer."""
    begins = [match.start() for match in _BOXED.finditer(text)]
    begin = begins.pop() if begins else 0
    while begins and _BETWEEN.fullmatch(text, _end_of_group(text, begins[-1]), begin):
        begin = begins.pop()
    return _BOXED.sub("", text[:begin]) + text[begin:]


def _end_of_group(text: str, begin: int) -> int:
    """Return the position behind the first group in braces from ``begin`` on."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth <= 0:
            return place + 1
    return len(text)


def _parsed(text: str) -> list[Any]:
    """Return what math-verify finds in a text; empty if that is nothing."""
    return list(math_verify.parse(text, parsing_timeout=None))
