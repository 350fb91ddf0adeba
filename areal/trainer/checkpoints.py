"""Periodic checkpoints of a run, and resumption from the newest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from areal.api import SaveLoadMeta, Stateful, TrainEngine

Engines = Mapping[str, TrainEngine]
"""The engines of a run, by the name of their checkpoint directory."""


class Checkpoints:
    """Checkpoints ``<engine>/step-000010`` and so on in one directory. Each appears complete or not at all.

    Args:
        folder: directory of this run only.
        every: steps between checkpoints; 0 writes none.
        keep_last: number of checkpoints to keep. With several engines, one more is kept, so that a common step always exists.
        asynchronous: continue training while a checkpoint is written.
        stateful: further state of the run, saved and loaded with each checkpoint.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int,
        keep_last: int = 1,
        asynchronous: bool = False,
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        if every < 0 or keep_last < 1:
            raise ValueError(f"every = {every}, keep_last = {keep_last}: every is at least 0, and keep_last at least 1")
        self.folder = Path(folder)
        self._every = every
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._stateful = stateful or {}

    def save_if_due(self, engines: Engines, step: int, stateful: Mapping[str, Stateful]) -> bool:
        """Save if ``step`` is a multiple of ``every``. Collective.

        Args:
            engines: by the name of their directory.
            step: number of steps taken.
            stateful: further state of the run, saved with the last engine.

        Returns:
            True if a checkpoint was saved (or its asynchronous save started).
        """
        due = self._every > 0 and step % self._every == 0
        if due:
            self.save(engines, step, stateful)
        return due

    def save(self, engines: Engines, step: int, stateful: Mapping[str, Stateful]) -> None:
        """Save a checkpoint, whether one is due or not. Collective. Arguments as for :meth:`save_if_due`."""
        for name, engine in engines.items():
            engine.save(self._meta(name, engines, step, stateful))

    def resume(self, engines: Engines, stateful: Mapping[str, Stateful]) -> int | None:
        """Load the newest checkpoint that all engines have, on the same or another layout. Collective.

        Returns:
            Step of the checkpoint, or ``None`` if there is none.
        """
        steps = self.steps(engines)
        if not steps:
            return None
        for name, engine in engines.items():
            engine.load(self._meta(name, engines, steps[-1], stateful))
        return steps[-1]

    def steps(self, names: Iterable[str]) -> list[int]:
        """Return the steps for which all named engines have a checkpoint, in ascending order."""
        # A step counts only if every engine has it: a run may have died between two saves.
        steps_of_each = [
            {int(path.name.removeprefix("step-")) for path in (self.folder / name).glob("step-*[0-9]")}
            for name in names
        ]
        return sorted(set.intersection(*steps_of_each))

    def _meta(self, name: str, engines: Engines, step: int, stateful: Mapping[str, Stateful]) -> SaveLoadMeta:
        return SaveLoadMeta(
            self.folder / name / f"step-{step:06d}",
            weight_format="dcp",
            # The run's state is saved once, with the last engine.
            stateful={**stateful, **self._stateful} if name == list(engines)[-1] else {},
            keep_last=self._keep_last + (len(engines) > 1),
            asynchronous=self._asynchronous,
        )
