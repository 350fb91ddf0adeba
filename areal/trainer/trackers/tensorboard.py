"""Tracker that writes event files for TensorBoard. Separate from the other trackers, because it needs an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A :class:`~areal.trainer.trackers.Tracker` that writes event files.

    Args:
        folder: output directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
