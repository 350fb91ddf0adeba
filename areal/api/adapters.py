"""Low-rank adapters of an engine: several under names, of which one is selected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from areal.api.config import LoRAConfig
from areal.api.weights import NamedTensor


class Adapters(Protocol):
    """The adapters of one engine. The selected one computes and is trained.

    Each has its own weights, pending gradients, optimizer state, learning rate and step count, which nothing done to another
    changes by a bit. Every method is collective.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were added."""
        ...

    @property
    def selected(self) -> str:
        """The one that computes and is trained."""
        ...

    def add(self, name: str, lora: LoRAConfig | None = None, *, seed: int | None = None) -> None:
        """Add one that changes nothing yet: its ``B`` is zero. It is not selected by that.

        Args:
            name: letters, digits, ``-``, ``_`` and dots.
            lora: the engine's own where ``None``.
            seed: of its ``A``; the engine's own where ``None``. The same on every layout.

        Raises:
            ValueError: there is one of that name, or ``lora`` names layers that cannot have adapters.
        """
        ...

    def select(self, name: str) -> None:
        """Compute with it, and train it, from now on. Gradients that are pending for another stay with that.

        Raises:
            ValueError: there is none of that name.
        """
        ...

    def remove(self, name: str) -> None:
        """Forget it.

        Raises:
            ValueError: there is none of that name, or it is selected.
        """
        ...

    def save(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        """Write it in peft's format, complete or not at all.

        Args:
            path: of a directory; ``PeftModel.from_pretrained(model, path)`` loads it.
            with_optim: also optimizer state, learning rate and step count, in a file of their own.

        Raises:
            ValueError: there is none of that name, or ``path`` holds something else.
        """
        ...

    def load(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        """Add an adapter from a directory in peft's format, or replace the one of that name, with its gradients and optimizer state.

        Args:
            with_optim: also what :meth:`save` wrote with it; without, it starts afresh.

        Raises:
            ValueError: it is damaged, of another model, or more than low-rank adapters of linear layers. Nothing was changed.
        """
        ...

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The selected one's weights: full, under the names in peft's files. Every rank iterates to the end."""
        ...
