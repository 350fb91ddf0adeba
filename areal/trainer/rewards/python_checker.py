"""Rewards of programs that a model writes: tests run them in processes with limits."""

from __future__ import annotations

import collections.abc
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from areal.trainer.rewards.answer_text import AnswerText, last_content
from areal.trainer.rewards.python_launcher import Job

Test = str | collections.abc.Sequence[str]
"""Code to run after the program, or a pair of standard input and expected standard output."""

Outcome = Literal["passed", "failed", "timeouts", "memory", "output", "crashes"]

_LAUNCHER = Path(__file__).with_name("python_launcher.py")
_ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a program. Libraries with a thread per core would reserve memory for each."""
_SMALLEST_MEMORY = 64 * 2**20
_SHOWN = 500
"""Maximum number of characters of a process's errors in an error message."""
_FENCE = re.compile(r"^([ \t]*)```[ \t]*([^\s`]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
"""A fenced block: indentation, language and content. Blocks of other languages match too, so that their ends are no beginnings."""
_LANGUAGES = ("", "py", "python", "python3")


def fenced_program(text: str) -> str | None:
    """Return the last fenced block of Python in a text, or of no language; ``None`` if there is none."""
    blocks = [
        textwrap.dedent(content) if indented else content
        for indented, language, content in _FENCE.findall(text)
        if language.lower() in _LANGUAGES
    ]
    return blocks[-1] if blocks else None


class PythonChecker:
    """Reward of a program: 1 if it passes all tests of the item, else 0; with ``partial``, the fraction of tests that it passes.

    Each test runs in a process with ``python -I``, in an empty folder that is removed, without the environment and the open files of this
    process. The process cannot start others, open sockets or signal others (a filter of system calls). This is not a security boundary:
    a program can read and write every file that the user can, and a program of root can raise its limits.

    A program that fails, hangs or exceeds a limit does not pass: its fault, which :attr:`counts` counts. A process that could not be
    prepared is an error. The reward blocks its thread; tests of an episode that was cancelled end at the time limit.

    Args:
        tests: function from an item to its tests, at least one: code to run after the program, such as assertions, or pairs of standard
            input and expected standard output, compared without white space at ends of lines and of the output.
        text: function from an answer to its text.
        program: function from this text to the program; ``None`` if there is none.
        seconds: time limit of a program, over all its tests.
        memory: maximum bytes of address space of a process.
        file_size: maximum bytes of each file that a program writes, also of its output.
        partial: give the fraction of the tests passed. Without it, the first test that does not pass is the last that runs.

    Attributes:
        counts: number of answers (``programs``, ``no_program``), and of test runs by outcome: ``passed``, ``failed`` (wrong or raised),
            ``timeouts``, ``memory``, ``output`` (a file or output was too large), ``crashes`` (ended by a signal).

    Raises:
        ValueError: a number is out of range.
        RuntimeError: the system is not Linux.
    """

    def __init__(
        self,
        tests: Callable[[Any], collections.abc.Sequence[Test]],
        *,
        text: AnswerText = last_content,
        program: Callable[[str], str | None] = fenced_program,
        seconds: float = 10.0,
        memory: int = 512 * 2**20,
        file_size: int = 2**20,
        partial: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"PythonChecker on {sys.platform!r}: it needs Linux, which can limit a program")
        if not 0 < seconds < math.inf:
            raise ValueError(f"PythonChecker.seconds = {seconds}: it must be above 0 and finite")
        if memory < _SMALLEST_MEMORY:
            raise ValueError(f"PythonChecker.memory = {memory}: Python needs at least {_SMALLEST_MEMORY} bytes")
        if file_size < 1:
            raise ValueError(f"PythonChecker.file_size = {file_size}: it must be at least 1")
        self._tests, self._text, self._program = tests, text, program
        self._seconds, self._memory, self._file_size, self._partial = seconds, memory, file_size, partial
        names = ("programs", "no_program", "passed", "failed", "timeouts", "memory", "output", "crashes")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._counting = threading.Lock()

    def __call__(self, item: Any, answer: Any) -> float:
        """Return the reward of an answer.

        Raises:
            ValueError: the item has no tests, or one that is neither code nor a pair.
            RuntimeError: a process could not be prepared: names the reason.
            TimeoutError: a process did not start within the time limit.
        """
        tests = [_checked(test) for test in self._tests(item)]
        if not tests:
            raise ValueError(f"tests of the item {item!r:.200}: there is none, so that every program would pass")
        program = self._program(self._text(answer))
        self._count("programs" if program is not None else "no_program")
        if program is None:
            return 0.0
        passed, deadline = 0, time.monotonic() + self._seconds
        for i, test in enumerate(tests):
            outcome = self._run(program, test, deadline, first=i == 0)
            self._count(outcome)
            passed += outcome == "passed"
            # The next test has no time left, or does not change the reward.
            if outcome == "timeouts" or (outcome != "passed" and not self._partial):
                break
        return passed / len(tests) if self._partial else float(passed == len(tests))

    def _count(self, name: str) -> None:
        # Several threads call a reward.
        with self._counting:
            self.counts[name] += 1

    def _run(self, program: str, test: Test, deadline: float, *, first: bool) -> Outcome:
        """Run one test of a program until ``deadline``, on the monotonic clock."""
        code, (given, expected) = (test, ("", None)) if isinstance(test, str) else ("", test)
        with tempfile.TemporaryDirectory(prefix="areal-program-") as name:
            folder = Path(name)
            (folder / "work").mkdir()
            (folder / "stdin").write_text(given, encoding="utf-8")
            job = self._job(folder, program, code)
            (folder / "job").write_text(json.dumps(job))
            status = _status(folder, deadline)
            errors = _read(folder / "stderr")
            # Later tests may have no time left to start, which is the fault of the program.
            if not Path(job["ready"]).exists() and (status is not None or first):
                if status is None:
                    raise TimeoutError(f"Python did not start within PythonChecker.seconds = {self._seconds:g}")
                raise RuntimeError(
                    f"PythonChecker cannot run programs here: {errors[-_SHOWN:].strip()} (status {status})"
                )
            if status != 0:
                return _failure(status, errors)
            right = Path(job["passed"]).exists() if expected is None else _same(_read(folder / "stdout"), expected)
            return "passed" if right else "failed"

    def _job(self, folder: Path, program: str, test: str) -> Job:
        return {
            "program": program,
            "test": test,
            "ready": str(folder / "ready"),
            "passed": str(folder / "passed"),
            "cpu_seconds": math.ceil(self._seconds),
            "memory": self._memory,
            "file_size": self._file_size,
        }


def _checked(test: Test) -> Test:
    """Return a test, and raise a ``ValueError`` for one that would not test anything."""
    pair = not isinstance(test, str) and len(test) == 2 and all(isinstance(each, str) for each in test)
    if pair or (isinstance(test, str) and test.strip()):
        return test
    raise ValueError(f"test = {test!r:.200}: it must be code, or a pair of standard input and expected output")


def _status(folder: Path, deadline: float) -> int | None:
    """Run the job of a folder, and return its exit code, negative for a signal; ``None`` if it was killed at the deadline."""
    command = [sys.executable, "-I", "-X", "utf8", str(_LAUNCHER), str(folder / "job")]
    environment = _ENVIRONMENT | {"HOME": str(folder / "work"), "TMPDIR": str(folder / "work")}
    # Files instead of pipes: the limit of file sizes holds for output too, and nobody has to read while the program runs.
    with (
        (folder / "stdin").open("rb") as given,
        (folder / "stdout").open("wb") as output,
        (folder / "stderr").open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=given,
            stdout=output,
            stderr=errors,
            cwd=folder / "work",
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # It has no children: it cannot start processes.
            process.kill()


def _failure(status: int | None, errors: str) -> Outcome:
    """Return why a program ended with another status than 0."""
    if status is None or status == -signal.SIGXCPU:
        return "timeouts"
    if status < 0:
        return "crashes"
    # The last line of a traceback has the class of the exception.
    last = errors.rstrip().rpartition("\n")[2]
    if last.partition(":")[0].endswith("MemoryError"):
        return "memory"
    return "output" if "[Errno 27]" in last else "failed"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _same(output: str, expected: str) -> bool:
    """Return whether two texts are equal but for white space at the ends of lines and at the end."""
    one, other = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return one == other
