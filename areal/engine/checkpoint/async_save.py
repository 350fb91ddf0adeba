"""Save one checkpoint: all ranks write their files, the first rank publishes. Synchronous, or in background threads.

Background threads use no process group, because training may be using it. Instead, each rank's thread writes a report file
into the draft when its files are on disk, and the first rank's thread publishes the draft when all reports exist. The calling
threads agree over the control plane in :meth:`CheckpointSaver.wait`, so that an error or a lost rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.engine.checkpoint.atomic_dir import FileRecord, discard, open_draft, prune, publish
from areal.utils.distributed import ControlPlane

logger = logging.getLogger(__name__)

_LOST_SECONDS = 60.0
"""Seconds that a save waits for the files of all ranks after the loss of one."""

_POLL_SECONDS = 0.02  # between looks for the reports of other ranks
_FULL_BYTES = 2**20  # free bytes below which a failed write is explained by a full disk


@dataclass(frozen=True)
class WrittenFiles:
    """Files that one rank wrote, and a payload for the rank that finishes the checkpoint."""

    files: Sequence[FileRecord]
    payload: Any = None


@dataclass(frozen=True)
class SaveTask:
    """The work of one rank for a save. It calls no collective, so that it can run in a thread.

    Attributes:
        write: function that writes this rank's files into the draft and syncs them to disk.
        finish: function that receives the payloads of all ranks and writes the last files. Called on the first rank only.
        about: entries for the manifest.
    """

    write: Callable[[], WrittenFiles]
    finish: Callable[[list[Any]], Sequence[FileRecord]]
    about: dict[str, Any]


class CheckpointSaver:
    """Runs the saves of one engine, one at a time.

    Args:
        control: control plane over all ranks of the engine.
        source: directory that the engine reads in each save, which ``keep_last`` does not remove.
    """

    def __init__(self, control: ControlPlane, source: str | None = None) -> None:
        self._control = control
        self._source = None if source is None else Path(source).resolve()
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
        """Save a checkpoint. Collective.

        Args:
            path: directory of the checkpoint.
            kind: format, for the manifest.
            prepare: function that receives the draft directory and returns this rank's task. It runs on every rank in the
                calling thread and may use collectives. For an asynchronous save, the data of the task must not change later.
            keep_last: number of complete checkpoints to keep in the parent directory, or ``None`` for all.
            asynchronous: whether to return before the files are written.

        Raises:
            ValueError, RuntimeError: the error of any rank, raised on every rank. A previous checkpoint at ``path`` is kept.
        """
        # 1. Wait for the previous save, and create an empty draft directory next to ``path``.
        self.wait()
        path = path.resolve()
        draft = self._open_draft(path)
        logger.debug("%s: draft opened", path)

        # 2. Everything that needs collectives or the current values of tensors happens here, in the calling thread.
        def prepare_together() -> SaveTask:
            # After an error on one rank alone, the others would wait for its exchanges.
            with self._control.ending_on_error(f"nothing was saved to {path}"):
                return prepare(draft)

        try:
            task = self._control.attempt(prepare_together, f"nothing was saved to {path}")
        except Exception:
            self._discard(draft)
            raise
        logger.debug("%s: prepared", path)

        # 3. Write and publish in threads. A synchronous save waits for them.
        self._job = _SaveJob(self._control, path, draft, kind, task, keep_last, self._source)
        self._job.start()
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when the current save, if any, is published. Collective.

        Raises:
            ValueError, RuntimeError: the error of any rank, raised on every rank.
        """
        job, self._job = self._job, None
        if job is None:
            return
        note = f"nothing was saved to {job.path}"
        try:
            # First the files of all ranks, then the publication: a rank that could not write would be waited for in vain.
            self._control.settle(job.written(), note)
            self._control.settle(job.published(), note)
        except Exception:
            # Stop the threads before the draft is removed under them.
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
    """The threads of one save on one rank: one writes this rank's files; on the first rank, another one publishes."""

    def __init__(
        self,
        control: ControlPlane,
        path: Path,
        draft: Path,
        kind: str,
        task: SaveTask,
        keep_last: int | None,
        source: Path | None,
    ) -> None:
        self.path, self.draft = path, draft
        self._control, self._rank, self._size = control, control.rank, control.size
        self._kind, self._task, self._keep_last, self._source = kind, task, keep_last, source
        self._stopped = threading.Event()
        self._errors: dict[str, BaseException] = {}
        self._writer = self._thread("write", self._write)
        self._publisher = self._thread("publish", self._publish) if self._rank == 0 else None

    def start(self) -> None:
        self._writer.start()
        if self._publisher is not None:
            self._publisher.start()

    def written(self) -> BaseException | None:
        """Wait for this rank's files. Return the error of writing them, if any."""
        self._writer.join()
        return self._errors.get("write")

    def published(self) -> BaseException | None:
        """Wait for the publication, which runs on the first rank only. Return its error, if any."""
        if self._publisher is not None:
            self._publisher.join()
        return self._errors.get("publish")

    def stop(self) -> None:
        """Stop waiting for other ranks, and join the threads."""
        self._stopped.set()
        self._writer.join()
        if self._publisher is not None:
            self._publisher.join()

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Return a thread that keeps the error of ``target`` for the calling thread."""

        def run() -> None:
            try:
                target()
            except BaseException as error:
                self._errors[name] = _explained(error, self.draft)

        return threading.Thread(target=run, name=f"checkpoint-{name}", daemon=True)

    def _write(self) -> None:
        """Write this rank's files, then its report."""
        logger.debug("%s: writing", self.path)
        written = self._task.write()
        logger.debug("%s: written", self.path)
        # Renamed when complete: the first rank must not read half a report.
        partial = self.draft / f".report-{self._rank}.partial"
        partial.write_bytes(pickle.dumps(written))
        partial.rename(_report(self.draft, self._rank))
        logger.debug("%s: reported", self.path)

    def _publish(self) -> None:
        """Wait for the reports of all ranks, write the last files and publish the checkpoint."""
        reports = [_report(self.draft, rank) for rank in range(self._size)]
        end = math.inf
        while not all(report.exists() for report in reports):
            if self._stopped.is_set() or "write" in self._errors:
                return
            # A rank that was lost may have written its files; others go on writing theirs.
            verdict = self._control.verdict
            if verdict is not None and verdict.lost:
                end = min(end, time.monotonic() + _LOST_SECONDS)
            if time.monotonic() > end:
                discard(self.draft)
                return
            time.sleep(_POLL_SECONDS)
        written: list[WrittenFiles] = [pickle.loads(report.read_bytes()) for report in reports]
        logger.debug("%s: all written", self.path)
        # Files that describe the others, such as the metadata of all tensors.
        last = self._task.finish([w.payload for w in written])
        logger.debug("%s: finished", self.path)
        # Reports do not belong to the checkpoint.
        for report in reports:
            report.unlink()
        files = [file for w in written for file in w.files]
        publish(self.draft, self.path, self._kind, [*files, *last], self._task.about)
        logger.debug("%s: published", self.path)
        if self._keep_last is not None:
            prune(self.path.parent, self._keep_last, source=self._source)


def _explained(error: BaseException, folder: Path) -> BaseException:
    """Return an error that names a full disk as its cause: torch's own names a position in a file."""
    with contextlib.suppress(OSError):  # the folder may be gone
        if isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < _FULL_BYTES:
            return OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: free some, or save to another directory ({error})",
                str(folder),
            )
    return error


def _report(draft: Path, rank: int) -> Path:
    return draft / f".report-{rank}"
