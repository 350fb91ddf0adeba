"""CPU-seconds of tests: what counts, and which tests are too expensive."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from areal.tests.everyday import costs
from areal.tests.everyday.costs import LIMIT, known, main, new_expensive


def test_expensive_tests_have_to_be_listed() -> None:
    listed = {"old": 10.0}
    assert new_expensive({"old": 9.0, "cheap": LIMIT - 0.1, "new": LIMIT + 0.1}, listed) == {"new": LIMIT + 0.1}


def test_limit_is_scaled_by_the_speed_of_the_machine() -> None:
    listed = {"old": 10.0, "elsewhere": 50.0}
    assert new_expensive({"old": 20.0, "new": 2 * LIMIT - 0.1}, listed) == {}
    assert new_expensive({"old": 20.0, "new": 2 * LIMIT + 0.1}, listed)
    # A fast machine does not lower the limit.
    assert new_expensive({"old": 5.0, "cheap": LIMIT - 0.1}, listed) == {}


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, alone: float) -> int:
    """Run the command for a test that is not listed, and that takes these seconds in the session and alone."""
    (folder / "expensive.txt").write_text("10.0 a.py::old[x y]\n")
    (folder / "costs.json").write_text(json.dumps({"a.py::old[x y]": 10.0, "a.py::new": seconds}))
    monkeypatch.setattr(costs, "EXPENSIVE", folder / "expensive.txt")
    monkeypatch.setattr(costs, "alone", lambda tests: dict.fromkeys(tests, alone))
    assert known() == {"a.py::old[x y]": 10.0}
    return main([str(folder / "costs.json")])


@pytest.mark.parametrize(
    ("seconds", "alone", "exit_code"),
    [
        pytest.param(7.0, 6.5, 1, id="expensive twice"),
        pytest.param(7.0, 5.0, 0, id="expensive next to other processes"),
        pytest.param(5.0, 7.0, 0, id="within the noise"),
    ],
)
def test_command_names_the_test(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    alone: float,
    exit_code: int,
) -> None:
    """And fails if it is far above the limit in two runs."""
    assert command(tmp_path, monkeypatch, seconds, alone) == exit_code
    assert f"a.py::new takes {seconds} CPU-seconds" in capsys.readouterr().out


def test_cheap_tests_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, monkeypatch, 1.0, 7.0) == 0
    assert "at most" not in capsys.readouterr().out


def test_seconds_alone_are_those_of_a_session_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], check: bool, env: dict[str, str]) -> None:
        assert command[1:3] == ["-m", "pytest"]
        option = next(word for word in command if word.startswith("--costs="))
        Path(option.removeprefix("--costs=")).write_text(json.dumps(dict.fromkeys(command[-2:], 1.5)))
        assert check
        assert env["OMP_NUM_THREADS"] == "1"

    monkeypatch.setattr(subprocess, "run", run)
    assert costs.alone(["a.py::one", "a.py::two[x y]"]) == {"a.py::one": 1.5, "a.py::two[x y]": 1.5}
