"""Where a run leaves what it needs to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from areal.api import SaveLoadMeta, Stateful, TrainEngine

Engines = Mapping[str, TrainEngine]
"""The engines of a run, by name."""


class Checkpoints:
    """Checkpoints ``step-000010`` and so on, in one folder for each engine of a run; each complete or not there at all.

    Args:
        folder: of this run alone.
        every: steps between checkpoints; 0 writes none.
        keep_last: how many are kept; of several engines one more, so that all have one of the same step.
        asynchronous: go on while a checkpoint is written.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, folder: str | Path, *, every: int, keep_last: int = 1, asynchronous: bool = False) -> None:
        if every < 0 or keep_last < 1:
            raise ValueError(f"every = {every}, keep_last = {keep_last}: every is at least 0, and keep_last at least 1")
        self.folder = Path(folder)
        self._every = every
        self._keep_last = keep_last
        self._asynchronous = asynchronous

    def save_if_due(self, engines: Engines, step: int, stateful: Mapping[str, Stateful]) -> bool:
        """Save after every so many steps. Collective.

        Args:
            engines: by the name of their folder. The state goes with the last of them.

        Returns:
            Whether it did.
        """
        due = self._every > 0 and step % self._every == 0
        if due:
            for name, engine in engines.items():
                engine.save(self._meta(name, engines, step, stateful))
        return due

    def resume(self, engines: Engines, stateful: Mapping[str, Stateful]) -> int | None:
        """Load the newest checkpoint of all engines, on this or another layout. Collective.

        Returns:
            After which step it was saved, or ``None`` where there is none.
        """
        steps = self.steps(engines)
        if not steps:
            return None
        for name, engine in engines.items():
            engine.load(self._meta(name, engines, steps[-1], stateful))
        return steps[-1]

    def steps(self, names: Iterable[str]) -> list[int]:
        """After which steps there are checkpoints of all that are named, rising."""
        found = [
            {int(path.name.removeprefix("step-")) for path in (self.folder / name).glob("step-*[0-9]")}
            for name in names
        ]
        return sorted(set.intersection(*found))

    def _meta(self, name: str, engines: Engines, step: int, stateful: Mapping[str, Stateful]) -> SaveLoadMeta:
        return SaveLoadMeta(
            self.folder / name / f"step-{step:06d}",
            weight_format="dcp",
            stateful=dict(stateful) if name == list(engines)[-1] else {},
            keep_last=self._keep_last + (len(engines) > 1),
            asynchronous=self._asynchronous,
        )
