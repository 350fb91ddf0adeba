"""Full tensors under the names that Hugging Face writes to disk, and how they get from a trainer to whoever generates with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


class NamedTensor(NamedTuple):
    """A full (unsharded) tensor under its Hugging Face name."""

    name: str
    tensor: Tensor


class TensorSource(Protocol):
    """Streams weights. Collective: every rank iterates to the end, at the same pace."""

    def named_tensors(self) -> Iterator[NamedTensor]: ...


class WeightSource(TensorSource, Protocol):
    """Streams an engine's weights or gradients. Collective: every rank iterates to the end, at the same pace."""

    def named_gradients(self) -> Iterator[NamedTensor]: ...


SelectName = Callable[[str], bool]
"""Says of a Hugging Face name whether its tensor is to be sent. It must say the same on every rank."""

UpdateKind = Literal["full", "selected"]
"""``"full"``: all weights of the model, and a receiver refuses fewer. ``"selected"``: some of them; the others stay."""


@dataclass(frozen=True)
class WeightUpdateMeta:
    """One update of weights, as it was sent.

    Attributes:
        version: of the weights, a counter that the caller keeps (such as ``TrainEngine.version``); at least 0.
        kind: whether it holds all weights.
        n_tensors: how many. nbytes: how many bytes of values, in the dtypes in which they were sent.
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
    """The trainer's end of a way for weights."""

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        """Bring the weights of ``source`` to every receiver. Collective over the trainer's ranks: all iterate the source.

        Args:
            version: what receivers call these weights from then on.
            select: which tensors to send; all without it.

        Returns:
            What was sent, on every rank.

        Raises:
            ValueError: the weights do not fit a receiver, or none was selected. RuntimeError: a receiver or a rank is gone, or does not
                answer; names it. On every rank. Unless the message says otherwise, receivers go on with the version that they had.
        """
        ...

    def close(self) -> None:
        """Give back what the transport holds. May be called twice."""
        ...


class WeightReceiver(Protocol):
    """The end at which weights arrive: it puts them into a module, a whole version at a time."""

    @property
    def version(self) -> int | None:
        """The version in the module; ``None`` before the first arrived."""
        ...

    def pending(self) -> bool:
        """Whether another version has arrived or is on its way, so that :meth:`receive` has something to do now."""
        ...

    def receive(self, timeout: float | None = None) -> int:
        """Wait for the next version and put it into the module. Nothing else may use the module meanwhile.

        Args:
            timeout: seconds to wait for an update to begin; ``None`` waits for ever.

        Returns:
            The version that now serves.

        Raises:
            TimeoutError: none began. ValueError: the weights do not fit the module. RuntimeError: the trainer is gone. The module then
                has the version that it had.
        """
        ...

    def close(self) -> None:
        """Give back what the receiver holds. The module stays as it is. May be called twice."""
        ...
