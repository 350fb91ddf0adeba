"""One checkpoint, written by all ranks and published by one, now or in the background.

Threads of different ranks never meet in a process group, which training may be using: each rank's thread leaves a report in the draft when
its files are on the disk, and the first rank's thread publishes once all reports are there. The calling threads agree over the
control plane when the save is waited for, so that a lost rank or an error is raised on all.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.engine.checkpoint.atomic_dir import FileRecord, discard, open_draft, prune, publish
from areal.utils.distributed import ControlPlane

Observe = Callable[[str], None]
"""Called with the name of each stage of a save as it is reached, on every rank, from whichever thread is there."""

_POLL_SECONDS = 0.02


def ignore(stage: str) -> None:
    """An :data:`Observe` that does nothing."""


@dataclass(frozen=True)
class WrittenFiles:
    """What one rank wrote: its files, and whatever the rank that finishes the checkpoint needs to know."""

    files: Sequence[FileRecord]
    payload: Any = None


@dataclass(frozen=True)
class SaveTask:
    """What a rank does for a save, apart from any collective.

    Attributes:
        write: writes this rank's files into the draft and brings them to the disk.
        finish: given every rank's payload, writes the last files. Called on the first rank alone.
        about: goes into the manifest.
    """

    write: Callable[[], WrittenFiles]
    finish: Callable[[list[Any]], Sequence[FileRecord]]
    about: dict[str, Any]


class CheckpointSaver:
    """Runs the saves of one engine, one at a time.

    Args:
        control: over all ranks of the engine.
        observe: told of every stage.
    """

    def __init__(self, control: ControlPlane, observe: Observe = ignore) -> None:
        self._control = control
        self._observe = observe
        self._job: _SaveJob | None = None

    def save(
        self,
        path: Path,
        kind: str,
        prepare: Callable[[Path], SaveTask],
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Save. Collective.

        Args:
            prepare: called with the draft, on every rank and in this thread; may use collectives. If the save is asynchronous, what
                its work refers to must not change any more.
            keep_last: after publishing, keep only so many complete checkpoints in the parent directory.

        Raises:
            ValueError, RuntimeError: what went wrong on any rank, on every rank. What was at ``path`` before is still there.
        """
        self.wait()
        path = path.resolve()
        draft = self._open_draft(path)
        self._observe("draft opened")
        try:
            work = self._control.attempt(lambda: prepare(draft), f"nothing was saved to {path}")
        except Exception:
            self._discard(draft)
            raise
        self._observe("prepared")
        self._job = _SaveJob(self._control, path, draft, kind, work, keep_last, self._observe)
        self._job.start()
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when the save under way, if any, is published. Collective.

        Raises:
            ValueError, RuntimeError: what went wrong on any rank, on every rank.
        """
        job, self._job = self._job, None
        if job is None:
            return
        note = f"nothing was saved to {job.path}"
        try:
            self._control.settle(job.written(), note)
            self._control.settle(job.published(), note)
        except Exception:
            job.stop()
            self._discard(job.draft)
            raise

    def _open_draft(self, path: Path) -> Path:
        """Create the draft on the first rank. Returns its path on every rank."""
        first, *_ = self._control.attempt_and_gather(
            lambda: open_draft(path) if self._control.rank == 0 else path  # the other ranks' value is not used
        )
        return first

    def _discard(self, draft: Path) -> None:
        if self._control.rank == 0:
            discard(draft)


class _SaveJob:
    """The threads of one save on one rank."""

    def __init__(
        self,
        control: ControlPlane,
        path: Path,
        draft: Path,
        kind: str,
        work: SaveTask,
        keep_last: int | None,
        observe: Observe,
    ) -> None:
        self.path, self.draft = path, draft
        self._rank, self._size = control.rank, control.size
        self._kind, self._work, self._keep_last, self._observe = kind, work, keep_last, observe
        self._stopped = threading.Event()
        self._errors: dict[str, BaseException] = {}
        self._writer = self._thread("write", self._write)
        self._publisher = self._thread("publish", self._publish) if self._rank == 0 else None

    def start(self) -> None:
        self._writer.start()
        if self._publisher is not None:
            self._publisher.start()

    def written(self) -> BaseException | None:
        """Wait for this rank's files; what went wrong."""
        self._writer.join()
        return self._errors.get("write")

    def published(self) -> BaseException | None:
        """Wait for the publication, which happens on the first rank; what went wrong."""
        if self._publisher is not None:
            self._publisher.join()
        return self._errors.get("publish")

    def stop(self) -> None:
        """Wait no longer for other ranks."""
        self._stopped.set()
        self._writer.join()
        if self._publisher is not None:
            self._publisher.join()

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                self._errors[name] = error

        return threading.Thread(target=run, name=f"checkpoint-{name}", daemon=True)

    def _write(self) -> None:
        self._observe("writing")
        written = self._work.write()
        self._observe("written")
        partial = self.draft / f".report-{self._rank}.partial"
        partial.write_bytes(pickle.dumps(written))
        partial.rename(_report(self.draft, self._rank))
        self._observe("reported")

    def _publish(self) -> None:
        reports = [_report(self.draft, rank) for rank in range(self._size)]
        while not all(report.exists() for report in reports):
            if self._stopped.is_set() or "write" in self._errors:
                return
            time.sleep(_POLL_SECONDS)
        written: list[WrittenFiles] = [pickle.loads(report.read_bytes()) for report in reports]
        self._observe("all written")
        last = self._work.finish([w.payload for w in written])
        self._observe("finished")
        for report in reports:
            report.unlink()
        files = [file for w in written for file in w.files]
        publish(self.draft, self.path, self._kind, [*files, *last], self._work.about)
        self._observe("published")
        if self._keep_last is not None:
            prune(self.path.parent, self._keep_last)


def _report(draft: Path, rank: int) -> Path:
    return draft / f".report-{rank}"
