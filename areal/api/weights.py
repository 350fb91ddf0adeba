"""Full tensors under Hugging Face names, and the interfaces that send them from a trainer to inference engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor


class NamedTensor(NamedTuple):
    """A full (unsharded) tensor under its Hugging Face name."""

    name: str
    tensor: Tensor


class LocalTensor(NamedTuple):
    """A part of a weight that one rank holds: ``full[box]`` of the tensor with this name and ``shape``.

    Attributes:
        name: Hugging Face name.
        tensor: values, in the shape of ``full[box]``, on the device that has them.
        box: a slice for each dimension.
        shape: of the full tensor.
    """

    name: str
    tensor: Tensor
    box: tuple[slice, ...]
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Stream of weights. Collective: all ranks iterate to the end, in step with each other."""

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield full tensors under their Hugging Face names."""
        ...


class WeightSource(TensorSource, Protocol):
    """Stream of an engine's weights and gradients. Collective: all ranks iterate to the end, in step with each other."""

    def named_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Yield full tensors under their Hugging Face names.

        Args:
            dtype: dtype that the caller casts the tensors to. If it is narrower, shards may be cast before they are gathered.
        """
        ...

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield full gradients under the Hugging Face names of their parameters."""
        ...


def stream_of(source: TensorSource, dtype: torch.dtype | None) -> Iterator[NamedTensor]:
    """Return the tensors of a source for a caller that casts them to ``dtype``. Collective, with the same dtype on all ranks.

    A source whose ``named_tensors`` has the argument ``dtype`` gathers shards that are cast already. Others yield their own dtype.
    """
    if dtype is None or "dtype" not in inspect.signature(source.named_tensors).parameters:
        return source.named_tensors()
    casting: Callable[..., Iterator[NamedTensor]] = source.named_tensors
    return casting(dtype=dtype)


SelectName = Callable[[str], bool]
"""Returns True for the Hugging Face names of tensors to send. Must return the same on all ranks."""

UpdateKind = Literal["full", "selected"]
"""``"full"``: all weights of the model; a receiver raises if any is missing. ``"selected"``: some weights; the others stay unchanged."""


@dataclass(frozen=True)
class WeightUpdateMeta:
    """Description of one weight update.

    Attributes:
        version: the caller's counter of the weights, such as ``TrainEngine.version``; at least 0.
        kind: all weights, or a selection.
        n_tensors: number of tensors.
        nbytes: bytes of their values, in the dtypes in which they were sent.

    Raises:
        ValueError: a field is out of range.
    """

    version: int
    kind: UpdateKind
    n_tensors: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"version = {self.version}: versions count from 0")
        if self.kind not in ("full", "selected"):
            raise ValueError(f"WeightUpdateMeta.kind = {self.kind!r}: choose 'full' or 'selected'")


class WeightTransport(Protocol):
    """Sends weights from a trainer to receivers."""

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        """Send the weights of ``source`` to all receivers. Collective over the trainer's ranks: all iterate the source.

        Errors are raised on all ranks. Unless the message says otherwise, receivers keep their previous version.

        Args:
            source: stream of weights, such as an engine.
            version: version of these weights at the receivers.
            select: filter of the tensors to send. Default: all.

        Returns:
            Description of the update, on all ranks.

        Raises:
            ValueError: the weights do not fit a receiver, or ``select`` excludes all.
            RuntimeError: a receiver or a rank died or does not answer; names it.
        """
        ...

    def close(self) -> None:
        """Release buffers and connections. May be called twice."""
        ...


class WeightReceiver(Protocol):
    """Receives weights and copies them into a module, one complete version at a time."""

    @property
    def version(self) -> int | None:
        """Version of the weights in the module; ``None`` before the first update."""
        ...

    def pending(self) -> bool:
        """Return True if an update has begun or arrived, so that :meth:`receive` does not wait for one."""
        ...

    def receive(self, timeout: float | None = None) -> int:
        """Wait for the next version and copy it into the module. The module must not be used meanwhile.

        After an error the module has its previous version.

        Args:
            timeout: seconds to wait for an update to begin; ``None`` waits without limit.

        Returns:
            Version that is now in the module.

        Raises:
            TimeoutError: no update began.
            ValueError: the weights do not fit the module.
            RuntimeError: the trainer died.
        """
        ...

    def close(self) -> None:
        """Release buffers and connections. The module keeps its weights. May be called twice."""
        ...
