"""What to save or load, where and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is saved with a checkpoint, such as a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class SaveLoadMeta:
    """One checkpoint.

    Attributes:
        path: its directory. When saving, it appears complete or not at all.
        weight_format: ``"hf"`` is safetensors that ``transformers.from_pretrained`` loads, with the tokenizer beside it: weights alone.
            ``"dcp"`` is torch distributed checkpoint: all that a run needs to go on, loadable in any layout.
        with_optim: with ``"dcp"``, also optimizer state, schedule, step and RNG.
        asynchronous: return once the values are copied; the next save, load or ``wait_for_checkpoint`` waits for the rest.
        keep_last: after publishing, remove all but this many newest complete checkpoints in ``path``'s parent directory.
        stateful: further state by name, saved and loaded in place with ``"dcp"`` (a data loader). It must be the same on every rank.
    """

    path: str | Path
    weight_format: Literal["hf", "dcp"] = "hf"
    with_optim: bool = True
    asynchronous: bool = False
    keep_last: int | None = None
    stateful: dict[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight_format not in ("hf", "dcp"):
            raise ValueError(f"SaveLoadMeta.weight_format = {self.weight_format!r}: choose 'hf' or 'dcp'")
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"SaveLoadMeta.keep_last = {self.keep_last}: keep at least 1, or None to keep all")


class Checkpointer(Protocol):
    """Saves and loads an engine. Every rank calls it; errors are raised on every rank."""

    def save(self, meta: SaveLoadMeta) -> None: ...

    def load(self, meta: SaveLoadMeta) -> None: ...

    def wait(self) -> None:
        """Return when an asynchronous save is published; raise what it raised."""
        ...
