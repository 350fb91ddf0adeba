"""Interface to the low-rank adapters of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from areal.api.sections.lora import LoRAConfig
from areal.api.weights import NamedTensor


class Adapters(Protocol):
    """Named adapters of one engine. The selected adapter is applied in the forward and is trained.

    With the per-sequence key ``adapter``, an index in :attr:`names`, the samples of a batch name theirs instead. Such a call adds to the
    pending gradients of the named adapters; after an error these are as before the call.

    Each adapter has separate weights, pending gradients, optimizer state, learning rate and step count. Operations on one adapter do not change
    any bit of another. Every method is collective.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters, in the order in which they were added."""
        ...

    @property
    def selected(self) -> str:
        """Name of the adapter that is applied and trained."""
        ...

    def add(self, name: str, lora: LoRAConfig | None = None, *, seed: int | None = None) -> None:
        """Add an adapter without selecting it. Its ``B`` is zero, so that it does not change the model's outputs yet.

        Args:
            name: letters, digits, ``-``, ``_`` and dots.
            lora: rank, scale and target layers. Default: ``config.lora`` of the engine.
            seed: seed of its ``A``, which is the same on every layout. Default: ``config.seed``.

        Raises:
            ValueError: the name is taken, or ``lora`` names layers that cannot have adapters.
        """
        ...

    def select(self, name: str) -> None:
        """Apply and train this adapter from now on. Pending gradients of the previous adapter are kept for it.

        Raises:
            ValueError: the name is unknown.
        """
        ...

    def remove(self, name: str) -> None:
        """Delete an adapter with its gradients and optimizer state.

        Raises:
            ValueError: the name is unknown, or the adapter is selected.
        """
        ...

    def save(
        self, name: str, path: str | Path, *, with_optim: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write an adapter in peft's format. The directory appears complete or not at all.

        Args:
            name: adapter to save.
            path: directory. ``PeftModel.from_pretrained(model, path)`` loads it.
            with_optim: also write optimizer state, learning rate and step count, to a separate file.
            about: entries for the manifest of the directory, as JSON values.

        Raises:
            ValueError: the name is unknown, or ``path`` has other content.
        """
        ...

    def load(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        """Load an adapter from a directory in peft's format. Replaces an adapter of that name with its gradients and state.

        Args:
            name: name of the adapter in this engine.
            path: directory.
            with_optim: also load the optimizer state that :meth:`save` wrote. Otherwise the optimizer starts anew.

        Raises:
            ValueError: the files are damaged, of another model, or contain more than low-rank adapters of linear layers. Nothing was changed.
        """
        ...

    def peft_config(self) -> dict[str, Any]:
        """Return the configuration of the selected adapter, as in peft's ``adapter_config.json``: JSON values."""
        ...

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the weights of the selected adapter: full tensors under the names of peft's files. Every rank iterates to the end."""
        ...
