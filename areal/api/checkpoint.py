"""Description of a checkpoint, and the interface of a checkpointer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Object whose state is saved with a checkpoint, such as a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as containers, numbers and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, in place."""
        ...


@dataclass(frozen=True)
class SaveLoadMeta:
    """Path, format and content of one checkpoint.

    Attributes:
        path: directory of the checkpoint. A save makes it appear complete or not at all.
        weight_format: ``"hf"`` writes safetensors and the tokenizer, for ``transformers.from_pretrained``: weights only. ``"dcp"`` writes a
            torch distributed checkpoint with everything that a run needs to continue, loadable on any layout.
        with_optim: with ``"dcp"``, include optimizer state, schedule, step count and RNG state.
        asynchronous: return as soon as the values are copied. The next save or load, or ``wait_for_checkpoint``, waits for the writing.
        keep_last: after a save, keep only this many newest complete checkpoints in the parent directory of ``path``; ``None`` keeps all.
        chat_template: with ``"hf"``, text of the chat template to write; ``None`` writes that of the model.
        stateful: with ``"dcp"``, further state by name, saved and loaded in place (such as a data loader). Equal on all ranks.

    Raises:
        ValueError: a field is out of range.
    """

    path: str | Path
    weight_format: Literal["hf", "dcp"] = "hf"
    with_optim: bool = True
    asynchronous: bool = False
    keep_last: int | None = None
    chat_template: str | None = None
    stateful: dict[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight_format not in ("hf", "dcp"):
            raise ValueError(f"SaveLoadMeta.weight_format = {self.weight_format!r}: choose 'hf' or 'dcp'")
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"SaveLoadMeta.keep_last = {self.keep_last}: keep at least 1, or None to keep all")

    @property
    def has_optimizer(self) -> bool:
        """True if the checkpoint includes the optimizer state."""
        return self.weight_format == "dcp" and self.with_optim


class Checkpointer(Protocol):
    """Saves and loads an engine. Collective; an error on one rank is raised on all."""

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint; see :meth:`areal.api.TrainEngine.save`."""
        ...

    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint; see :meth:`areal.api.TrainEngine.load`."""
        ...

    def wait(self) -> None:
        """Wait until an asynchronous save is complete, and raise its error if it failed."""
        ...
