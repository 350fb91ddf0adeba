"""The numbers of a run, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Event files for TensorBoard.

    Args:
        folder: where they go.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
