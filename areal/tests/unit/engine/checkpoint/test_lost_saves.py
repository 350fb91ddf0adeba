"""Saves that were under way when a rank was lost: they wait for the files of those that live, and not for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.engine.checkpoint import async_save
from areal.engine.checkpoint.async_save import CheckpointSaver, SaveTask, WrittenFiles
from areal.tests.harness.limits import wait_until


def saving(control: Any, path: Path) -> CheckpointSaver:
    """Return a saver of two ranks whose first one has written its files."""
    saver = CheckpointSaver(control)
    saver.save(
        path, "test", lambda draft: SaveTask(lambda: WrittenFiles([]), lambda payloads: [], {}), asynchronous=True
    )
    return saver


def publishers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint-publish"]


class Control:
    """The control plane of the first of two ranks."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.verdict: Any = None

    def attempt(self, work: Any, note: str = "") -> Any:
        return work()

    def attempt_and_gather(self, work: Any, note: str = "") -> list[Any]:
        return [work()] * 2

    def ending_on_error(self, note: str) -> Any:
        return pytest.MonkeyPatch.context()


@pytest.mark.parametrize("reported", [False, True], ids=["lost before", "lost after its report"])
def test_save_ends_after_the_loss_of_a_rank(reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_save, "_LOST_SECONDS", 0.3)
    control = Control()
    before = publishers()
    saver = saving(control, tmp_path / "step-1")
    wait_until(lambda: bool(list(tmp_path.glob(".*draft*/.report-0"))))
    control.verdict = SimpleNamespace(lost=True)
    if reported:
        (draft,) = tmp_path.glob(".*draft*")
        (draft / ".report-1").write_bytes((draft / ".report-0").read_bytes())
    wait_until(lambda: publishers() == before, "the thread has ended")
    assert (tmp_path / "step-1").exists() == reported
    assert not list(tmp_path.glob(".*draft*"))
    del saver


def test_error_of_a_save_whose_draft_is_gone_is_raised(tmp_path: Path) -> None:
    """Nothing can be asked about the disk of a folder that is not there."""
    error = RuntimeError("position 7")
    assert async_save._explained(error, tmp_path / "gone") is error
