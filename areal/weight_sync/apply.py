"""Write full tensors into a module by their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.api.weights import NamedTensor
from areal.engine.checkpoint.tensor_layout import DiskTensor, disk_layout, joined, stored_tensors
from areal.engine.lora.adapter_plan import PREFIX
from areal.utils.dtensor import full_box


@dataclass(frozen=True)
class _Slot:
    """Destination of a tensor on disk, or of a slice of one: a box of a tensor of the module."""

    tensor: Tensor
    piece: DiskTensor

    def view(self) -> Tensor:
        return self.piece.cut(self.tensor.detach())


class _Slots(list[_Slot]):
    """Destinations of all slices of a tensor on disk; one, if it is not merged from several tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self[0].piece.shape

    def fill(self, values: Tensor) -> None:
        for slot in self:
            slot.view().copy_(values if slot.piece.index is None else values[slot.piece.index])

    def read(self) -> Tensor:
        return next(joined((slot.piece, slot.view()) for slot in self)).tensor


class Replica:
    """A module whose weights can be read and written by their Hugging Face names.

    transformers may store them in another form, e.g. stacked experts. A weight with several names (tied embeddings)
    is accepted under any of them, once. In a model with a peft adapter, the adapter's weights have the names in
    peft's files, and the base weights have their usual names.

    Args:
        module: a transformers model, or any module with the parameter names of its source. Not sharded, on any
            device, in any dtype.

    Raises:
        ValueError: the module has two adapters, whose names in files are equal.

    Attributes:
        version: version of the weights in the module. ``None`` before the first update, and after an in-place
            update that failed midway.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version: int | None = None
        # One tensor of the module may be several on disk, e.g. stacked experts: make a slot for each of those.
        layout = disk_layout(module) if isinstance(module, PreTrainedModel) else {}
        self._slots: dict[str, _Slots] = {}
        for name, tensor in stored_tensors(module):
            for piece in layout.get(name, (DiskTensor(name, full_box(tensor.shape)),)):
                slot = _Slot(tensor, replace(piece, name=_name_in_files(piece.name)))
                slots = self._slots.setdefault(slot.piece.name, _Slots())
                # Only slices of a tensor on disk share its name.
                if slots and slot.piece.index is None:
                    raise ValueError(
                        f"{type(module).__name__} has two adapters with {slot.piece.name!r}: leave one in it"
                    )
                slots.append(slot)
        # Further names of a shared weight map to its first one.
        self._first = _first_name_of(module)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, each weight once, in the order of the module."""
        return iter(self._slots)

    def resolve(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the replica's own name of a weight.

        Raises:
            ValueError: the name is unknown, or the shape differs.
        """
        # A tied weight may come under any of its names.
        own_name = name if name in self._slots else self._first.get(name, name)
        if own_name not in self._slots:
            raise ValueError(
                f"the trainer sends {name!r}, which the replica ({type(self.module).__name__}) has not: it is another model, "
                "or the name is to be left out with select"
            )
        if self._slots[own_name].shape != shape:
            raise ValueError(
                f"{name}: the trainer sends {list(shape)}, and the replica has {list(self._slots[own_name].shape)}"
            )
        return own_name

    def view(self, name: str) -> Tensor:
        """Return a weight in its Hugging Face shape, as a view of the module's memory.

        A tensor on disk that is merged from several tensors of the module is a copy.
        """
        return self._slots[name].read()

    @torch.no_grad()
    def fill(self, name: str, values: Tensor) -> None:
        """Overwrite a weight with values of the same shape, from any device and in any dtype."""
        self._slots[name].fill(values)

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, complete: bool) -> None:
        """Compare names and shapes with those of the module.

        Args:
            complete: bool. If True, every weight must be present.

        Raises:
            ValueError: a weight is unknown, has another shape, comes twice or is missing; names the first one.
        """
        # Coverage also finds names that come twice.
        coverage = Coverage(self)
        for name, shape in shapes.items():
            coverage.add(name, shape)
        coverage.check(complete=complete)


class Coverage:
    """Tracks which of a replica's weights have arrived."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        # The trainer's name of each weight that has arrived, by the replica's.
        self._called: dict[str, str] = {}

    def add(self, name: str, shape: tuple[int, ...]) -> str:
        """Record a tensor, and return the replica's name of it.

        Raises:
            ValueError: the tensor is unknown, has another shape, or has arrived before.
        """
        own_name = self._replica.resolve(name, shape)
        called = self._called.get(own_name)
        if called == name:
            raise ValueError(f"{name}: it was sent twice")
        # Both names of a tied weight in one update mean that the trainer's model is not tied.
        if called is not None:
            raise ValueError(
                f"the trainer sends {called!r} and {name!r}, which are one tensor in the replica: tie_word_embeddings differs"
            )
        self._called[own_name] = name
        return own_name

    def check(self, *, complete: bool) -> None:
        """Check that no tensor is missing, if the update must be ``complete``.

        Raises:
            ValueError: a weight is missing; names the first one.
        """
        missing = [name for name in self._replica if name not in self._called]
        if complete and missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ValueError(
                f"the trainer did not send {missing[0]!r}{more}, which the replica has: it is another model, or the update was cut short"
            )

    def __len__(self) -> int:
        return len(self._called)


class Staging:
    """An update that is still arriving. The replica does not change before :meth:`commit`.

    Staging needs as much memory as the weights, in the replica's dtypes, from the first tensor to the commit.

    Args:
        complete: bool. If True, the update must contain all weights.
        device: device of the staged tensors.
    """

    def __init__(self, replica: Replica, *, complete: bool, device: torch.device) -> None:
        self._replica, self._complete, self._device = replica, complete, device
        self._coverage = Coverage(replica)
        self._staged: dict[str, Tensor] = {}

    def put(self, named: NamedTensor) -> None:
        """Store a copy of a full tensor.

        Raises:
            ValueError: the tensor does not fit the replica, or has arrived before.
        """
        name = self._coverage.add(named.name, tuple(named.tensor.shape))
        dtype = self._replica.view(name).dtype
        self._staged[name] = named.tensor.detach().to(self._device, dtype, copy=True)

    def check(self) -> None:
        """Check that the update is complete.

        Raises:
            ValueError: a weight is missing; names the first one.
        """
        self._coverage.check(complete=self._complete)

    def commit(self, version: int) -> None:
        """Write the update into the replica, after :meth:`check`."""
        # A failure midway leaves a mixture of versions: without a version until all tensors are written.
        self._replica.version = None
        # Free each staged tensor as soon as it is written.
        while self._staged:
            name, values = self._staged.popitem()
            self._replica.fill(name, values)
        self._replica.version = version


def load_named(module: nn.Module, tensors: Iterable[NamedTensor], *, complete: bool = True) -> int:
    """Copy tensors into a module as they arrive, without a second copy of the model.

    Args:
        module: as in :class:`Replica`.
        tensors: full tensors under Hugging Face names, from any device and in any dtype.
        complete: bool. If True, all weights of the module must be among them.

    Returns:
        Number of tensors.

    Raises:
        ValueError: a tensor is unknown, has another shape, comes twice or is missing; names the first one. Earlier
            tensors are already in the module.
    """
    replica = Replica(module)
    coverage = Coverage(replica)
    for name, tensor in tensors:
        replica.fill(coverage.add(name, tuple(tensor.shape)), tensor)
    coverage.check(complete=complete)
    return len(coverage)


class ModuleSource:
    """A plain module as a source of weights, e.g. for a replica or a reference model without an engine."""

    def __init__(self, module: nn.Module) -> None:
        self._replica = Replica(module)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield all weights under their Hugging Face names, see :meth:`Replica.view`."""
        for name in self._replica:
            yield NamedTensor(name, self._replica.view(name))


class StreamSource:
    """An existing stream as a source of weights, which can be read once."""

    def __init__(self, tensors: Iterator[NamedTensor]) -> None:
        self._tensors = tensors

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Return the stream."""
        return self._tensors


_FACTOR = re.compile(r"(.*\.lora_[AB])(?:\.[^.]+)?\.weight")


def _name_in_files(name: str) -> str:
    """Return the name in files of a tensor of a module with adapters: in peft's files or in the model's."""
    bare = name.removeprefix(PREFIX)
    factor = _FACTOR.fullmatch(bare)
    return f"{PREFIX}{factor[1]}.weight" if factor else bare.replace(".base_layer.", ".")


def _first_name_of(module: nn.Module) -> dict[str, str]:
    """Map each further name of a shared weight to its first name."""
    names: dict[int, str] = {}
    further: dict[str, str] = {}
    # Shared tensors are one object under several names.
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        first = names.setdefault(id(tensor), name)
        if first != name:
            further[name] = first
    return further
