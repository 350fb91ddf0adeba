"""CPU-seconds of tests: what counts, and which tests are too expensive."""

from __future__ import annotations

import json
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


def test_command_names_the_test_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "expensive.txt").write_text("10.0 a.py::old[x y]\n")
    monkeypatch.setattr(costs, "EXPENSIVE", tmp_path / "expensive.txt")
    assert known() == {"a.py::old[x y]": 10.0}
    (tmp_path / "costs.json").write_text(json.dumps({"a.py::old[x y]": 10.0, "a.py::new": 7.0}))
    assert main([str(tmp_path / "costs.json")]) == 1
    assert "a.py::new takes 7.0 CPU-seconds" in capsys.readouterr().out
    # Seconds of one test vary between runs: within a factor of two of the limit, it is named only.
    (tmp_path / "costs.json").write_text(json.dumps({"a.py::old[x y]": 10.0, "a.py::new": 5.0}))
    assert main([str(tmp_path / "costs.json")]) == 0
    assert "a.py::new takes 5.0 CPU-seconds" in capsys.readouterr().out
    (tmp_path / "costs.json").write_text(json.dumps({"a.py::old[x y]": 10.0, "a.py::new": 1.0}))
    assert main([str(tmp_path / "costs.json")]) == 0
