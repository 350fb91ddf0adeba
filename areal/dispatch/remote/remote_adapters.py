"""The adapters of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.api import LoRAConfig, NamedTensor

Call = Callable[..., Any]


class GroupAdapters:
    """Implements :class:`areal.api.Adapters` by calls to all ranks.

    Args:
        call: calls a member by its name, ``adapters.`` included, with keyword arguments.
        stream: the same for a stream of tensors.
    """

    def __init__(self, call: Call, stream: Call) -> None:
        self._call, self._stream = call, stream

    @property
    def names(self) -> tuple[str, ...]:
        return self._call("adapters.names")

    @property
    def selected(self) -> str:
        return self._call("adapters.selected")

    def add(self, name: str, lora: LoRAConfig | None = None, *, seed: int | None = None) -> None:
        self._call("adapters.add", name=name, lora=lora, seed=seed)

    def select(self, name: str) -> None:
        self._call("adapters.select", name=name)

    def remove(self, name: str) -> None:
        self._call("adapters.remove", name=name)

    def save(
        self, name: str, path: str | Path, *, with_optim: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        self._call("adapters.save", name=name, path=path, with_optim=with_optim, about=about)

    def load(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        self._call("adapters.load", name=name, path=path, with_optim=with_optim)

    def peft_config(self) -> dict[str, Any]:
        return self._call("adapters.peft_config")

    def named_tensors(self) -> Iterator[NamedTensor]:
        return self._stream("adapters.named_tensors")
