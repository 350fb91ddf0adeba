"""Full tensors under the names that Hugging Face writes to disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class NamedTensor(NamedTuple):
    """A full (unsharded) tensor under its Hugging Face name."""

    name: str
    tensor: Tensor


class WeightSource(Protocol):
    """Streams an engine's weights or gradients. Collective: every rank iterates to the end, at the same pace."""

    def named_tensors(self) -> Iterator[NamedTensor]: ...

    def named_gradients(self) -> Iterator[NamedTensor]: ...
