"""Programs that are right, wrong, or exceed a limit, each in a real process."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from areal.inference.protocol import Completion
from areal.tests.harness.limits import promptly
from areal.trainer.rewards.python_checker import PythonChecker, fenced_program
from areal.trainer.rollout import RewardPool

SIGNAL = """
import ctypes, os, platform
libc = ctypes.CDLL(None)
number = {{"x86_64": 234, "aarch64": 131}}[platform.machine()]  # tgkill
assert libc.syscall(number, {0}, {0}, 0) == 0 or libc.sigqueue({0}, 0, None) == 0
"""
DOUBLE = [("1\n2\n", "2\n4\n"), ("5", "10")]


def answer(program: str) -> list[dict[str, str]]:
    """Return a conversation whose last message has a program."""
    return [{"role": "assistant", "content": f"So:\n```python\n{textwrap.dedent(program)}\n```\nDone."}]


def checked(program: str, tests: Any, **options: Any) -> tuple[float, dict[str, int]]:
    """Return the reward of a program, and the counts that are not 0."""
    checker = PythonChecker(lambda item: item, **{"seconds": 20.0, **options})
    reward = checker(tests, answer(program))
    return reward, {name: count for name, count in checker.counts.items() if count}


def processes_with(mark: str) -> list[str]:
    """Return the processes whose command line, environment or working directory has a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (
                (path / "cmdline").read_bytes() + (path / "environ").read_bytes() + os.readlink(path / "cwd").encode()
            )
        except OSError:
            continue
        if mark.encode() in words and path.name != str(os.getpid()):
            found.append(path.name)
    return found


def test_pairs_of_input_and_output() -> None:
    right = "import sys\nfor line in sys.stdin:\n    print(2 * int(line), ' ')\nprint()"
    assert checked(right, DOUBLE) == (1.0, {"programs": 1, "passed": 2})
    once = "print(2 * int(input()))"
    assert checked(once, DOUBLE[::-1]) == (0.0, {"programs": 1, "passed": 1, "failed": 1})
    assert checked(once, DOUBLE) == (0.0, {"programs": 1, "failed": 1}), "a test ran that cannot change the reward"
    assert checked(once, DOUBLE, partial=True) == (0.5, {"programs": 1, "failed": 1, "passed": 1})
    assert checked("print(10)\nraise SystemExit(3)", DOUBLE[1:])[0] == 0


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return a - b", 0.0),
        ("def add(a, b): return a - b\nraise SystemExit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("def add(a, b) return", 0.0),
        ("def add(a, b): return a + b\nif __name__ != '__main__': raise ValueError", 1.0),
        ("def add(a: List[int], b): return a + b", 0.0),
    ],
    ids=["right", "wrong", "exits", "exits at once", "syntax", "main", "unknown annotation"],
)
def test_code_after_the_program(program: str, reward: float) -> None:
    """A program that ends before its tests has not passed them."""
    assert checked(program, ["assert add(2, 2) == 4\nassert add(1, 2) == 3"])[0] == reward


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", "timeouts"),
        ("import time\ntime.sleep(100)", "timeouts"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeouts"),
        ("x = bytearray(600 * 2**20)", "memory"),
        ("x = []\nwhile True: x.append('a' * 2**20)", "memory"),
        ("with open('file', 'wb') as file: file.write(b'x' * (2**20 + 1))", "output"),
        ("while True: print('x' * 1000, flush=True)", "output"),
        ("import os\nos.abort()", "crashes"),
        ("import ctypes\nctypes.string_at(0)", "crashes"),
        ("import os\nwhile True: os.fork()", "failed"),
        ("import subprocess\nsubprocess.run(['sleep', '100'])", "failed"),
        ("import os\nos.setsid()", "failed"),
        ("import os\nos.kill(os.getppid(), 0)", "failed"),
        (SIGNAL.format("os.getppid()"), "failed"),
        ("import socket\nsocket.socket()", "failed"),
    ],
)
def test_limits(program: str, outcome: str) -> None:
    with promptly():
        assert checked(program, ["pass"], seconds=2.0 if outcome == "timeouts" else 20.0) == (
            0.0,
            {"programs": 1, outcome: 1},
        )


def test_what_a_program_may_do() -> None:
    program = """
        import os, socket, sys, threading
        assert os.listdir() == [] and os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
        assert set(os.environ) <= {"PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}
        assert sys.argv == ["program.py"] and sys.stdin.read() == ""
        assert sorted(os.listdir("/proc/self/fd"))[:3] == ["0", "1", "2"] and len(os.listdir("/proc/self/fd")) == 4
        thread = threading.Thread(target=print, args=("ä",))
        thread.start(); thread.join()
        open("kept", "w").write("x" * 1000)
        socket.socketpair()
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.raise_signal(signal.SIGUSR1)
        print(os.getcwd(), file=open(os.path.join(os.getcwd(), "name"), "w"))
    """
    os.environ["A_SECRET"] = "1"
    try:
        with Path(__file__).open():
            assert checked(program, [("", "ä")], file_size=2000)[0] == 1
    finally:
        del os.environ["A_SECRET"]


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process nor a folder, also of a program that is killed while threads write files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = """
        import os, threading
        def write(k):
            i = 0
            while True:
                i += 1
                open(f"{k}-{i % 50}", "w").write("x")
        for k in range(4): threading.Thread(target=write, args=(k,)).start()
        for start in (os.fork, lambda: os.posix_spawn("/bin/sleep", ["sleep", "60"], {}), lambda: os.system("sleep 60 &")):
            try:
                start()
            except PermissionError:
                pass
    """
    assert checked(program, ["pass"], seconds=2.0)[1] == {"programs": 1, "timeouts": 1}
    assert not processes_with(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_time_limit_is_of_all_tests() -> None:
    """After a test that hangs, others have no time left."""
    with promptly():
        reward, counts = checked(
            "import sys\nwhile sys.stdin.read() != 'a': pass\nprint(1)",
            [("a", "1"), ("b", "1"), ("a", "1")],
            partial=True,
            seconds=1.0,
        )
    assert counts == {"programs": 1, "passed": 1, "timeouts": 1}
    assert reward == pytest.approx(1 / 3)


def test_answers_without_a_program_are_counted() -> None:
    checker = PythonChecker(lambda item: ["pass"])
    assert checker({}, [{"role": "assistant", "content": "I cannot."}]) == 0
    assert checker.counts["no_program"] == 1
    assert fenced_program("```python\na\n```\nor\n```\nb\n```\nor\n```sh\nc\n```\n") == "b\n"
    # The end of a block in another language begins none.
    assert fenced_program("```sh\na\n```\nThen:\n```Python\nb\n```\nIt prints\n```text\n1\n```\n") == "b\n"
    assert fenced_program("1. So:\n   ```python\n   if a:\n       b\n   ```\n") == "if a:\n    b\n"


def test_failures_that_are_not_the_programs_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that cannot be prepared is no reward of 0."""
    checker = PythonChecker(lambda item: item["tests"])
    for tests, words in (
        ([], "there is none"),
        ([" "], "test = ' '"),
        ([("a",)], r"test = \('a',\)"),
        ([("a", 1)], "pair"),
    ):
        with pytest.raises(ValueError, match=words):
            checker({"tests": tests}, answer("pass"))
    with pytest.raises(ValueError, match=r"pass text=decoded\(tokenizer\)"):
        checker({"tests": ["pass"]}, Completion((1,), (0.0,), (0,), "stop"))
    broken = tmp_path / "launcher.py"
    broken.write_text("raise OSError('the kernel refuses')")
    monkeypatch.setattr("areal.trainer.rewards.python_checker._LAUNCHER", broken)
    with pytest.raises(RuntimeError, match=r"(?s)cannot run programs here: .*OSError: the kernel refuses"):
        checker({"tests": ["pass"]}, answer("pass"))
    broken.write_text("while True: pass")
    with pytest.raises(TimeoutError, match=r"did not start within PythonChecker.seconds = 0.2"):
        PythonChecker(lambda item: ["pass"], seconds=0.2)({}, answer("pass"))


def test_bad_numbers_are_named() -> None:
    for options, words in (
        ({"seconds": 0}, "PythonChecker.seconds = 0"),
        ({"memory": 1000}, "PythonChecker.memory = 1000"),
        ({"file_size": 0}, "PythonChecker.file_size = 0"),
    ):
        with pytest.raises(ValueError, match=words):
            PythonChecker(lambda item: ["pass"], **options)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="PythonChecker on 'darwin'"):
        PythonChecker(lambda item: ["pass"])


def test_reward_pool_runs_programs_at_the_same_time() -> None:
    checker = PythonChecker(lambda item: [("", item)], seconds=20.0)

    async def rewards() -> list[float]:
        pool = RewardPool(checker, workers=4)
        made = await asyncio.gather(*(pool(str(i), answer(f"print({i % 5})")) for i in range(8)))
        pool.close()
        return made

    assert asyncio.run(rewards()) == [1.0] * 5 + [0.0] * 3
    assert checker.counts["programs"] == 8
