"""Layout of tensors on disk: which tensors of a Hugging Face file form which tensor in memory.

transformers stores some weights in another form in memory than on disk. For example, it stacks the experts of a layer. Its
table of conversions defines how. This module runs the conversion once, on tiny tensors with a distinct number in every
element, and records the result as boxes: each tensor on disk is a box of a tensor in memory. Boxes can be read and written
one slice at a time, on any layout of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    revert_weight_conversion,
)

from areal.utils.dtensor import Box


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk, as a box of a tensor in memory.

    Attributes:
        name: key on disk.
        box: box of the tensor in memory.
        squeezed: dimensions of the box, of size 1, that the tensor on disk does not have.
    """

    name: str
    box: Box
    squeezed: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return tuple(s.stop - s.start for dim, s in enumerate(self.box) if dim not in self.squeezed)

    def cut(self, full: Tensor) -> Tensor:
        """Return the tensor on disk, as a view of the full tensor in memory."""
        return full[self.box].view(self.shape)

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Return the intersection of this tensor with a box of the tensor in memory, such as a rank's shard.

        Returns:
            The intersection as indices into the tensor on disk, and as indices into ``box``. ``None`` if it is empty.
        """
        # Bounds within the full tensor in memory.
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.box, box, strict=True)]
        if any(s.stop <= s.start for s in both):
            return None
        # The same bounds relative to this tensor, and relative to the box.
        on_disk = [slice(s.start - a.start, s.stop - a.start) for s, a in zip(both, self.box, strict=True)]
        in_box = tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(both, box, strict=True))
        return tuple(s for dim, s in enumerate(on_disk) if dim not in self.squeezed), in_box


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that are saved: parameters (shared ones once, under the first name), then buffers."""
    yield from module.named_parameters()
    transient = {id(buffer) for _, buffer in transient_buffers(module)}
    yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in transient)


def transient_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and buffers that are not saved, because a module computes them from its configuration."""
    for prefix, owner in module.named_modules():
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def disk_layout(hf: PreTrainedModel) -> dict[str, tuple[DiskTensor, ...]]:
    """Return the tensors on disk that form each saved tensor of a model, by its name in memory.

    Raises:
        ValueError: transformers stores a tensor in a form that is not a box (permuted, transposed or merged with others).
    """
    tensors = dict(stored_tensors(hf))
    converters = _save_converters(hf)
    # A probe has one element for each tensor on disk that its tensor is expected to be divided into.
    probes = [_Probe.of(hf, name, tensor.shape, converters) for name, tensor in tensors.items()]

    # Number the elements of all probes consecutively.
    starts, marks, total = [], {}, 0
    for probe in probes:
        starts.append(total)
        size = math.prod(probe.shape)
        marks[probe.name] = torch.arange(total, total + size).view(probe.shape)
        total += size

    # Convert them as a save would. Each element must end up in exactly one tensor on disk, by itself.
    disk_names: dict[int, str] = {}
    for disk_name, mark in revert_weight_conversion(hf, marks).items():
        if mark.numel() != 1:
            raise ValueError(_not_a_box(hf, disk_name))
        disk_names[int(mark)] = disk_name
    if len(disk_names) != total:
        lost = [probe.name for probe, start in zip(probes, starts, strict=True) if start not in disk_names]
        raise ValueError(_not_a_box(hf, ", ".join(lost[:3]) or "a tensor"))

    # Element i of a probe is the i-th box of its tensor.
    layout = {}
    for probe, start in zip(probes, starts, strict=True):
        boxes = range(math.prod(probe.shape))
        layout[probe.name] = tuple(probe.box(i, disk_names[start + i], tensors[probe.name].shape) for i in boxes)
    return layout


@dataclass(frozen=True)
class _Probe:
    """Division of one tensor in memory into tensors on disk.

    Attributes:
        name: name in memory.
        shape: number of tensors on disk along each dimension.
        squeezed: dimensions that the tensors on disk do not have.
    """

    name: str
    shape: tuple[int, ...]
    squeezed: frozenset[int]

    @classmethod
    def of(cls, hf: PreTrainedModel, name: str, shape: torch.Size, converters: list[WeightConverter]) -> _Probe:
        counts, squeezed = [1] * len(shape), set()
        # The conversion that applies to this tensor, if any. Without one, the tensor is stored as it is.
        converter = next((c for c in converters if c.rename_source_key(name)[1] is not None), None)
        for op in converter.operations if converter is not None else ():
            # Unstack: one tensor on disk for each index of the dimension, which disappears (experts of a layer).
            if type(op) is SplitModulelist:
                counts[op.dim] = shape[op.dim]
                squeezed.add(op.dim)
            # Chunk: one tensor on disk for each name of the conversion (gate and up projections).
            elif type(op) is Chunk and converter is not None:
                counts[op.dim] = len(op.get_target_patterns(list(converter.target_patterns), config=hf.config))
            else:
                raise ValueError(_not_a_box(hf, name))
        if any(size % count for size, count in zip(shape, counts, strict=True) if count > 1):
            raise ValueError(_not_a_box(hf, name))
        return cls(name, tuple(counts), frozenset(squeezed))

    def box(self, index: int, disk_name: str, shape: torch.Size) -> DiskTensor:
        """Return the box of element ``index`` of the probe, for a tensor of the given shape."""
        box = []
        # Convert the flat index to coordinates, last dimension first.
        for size, count in zip(reversed(shape), reversed(self.shape), strict=True):
            index, position = divmod(index, count)
            box.append(slice(position * (size // count), (position + 1) * (size // count)))
        return DiskTensor(disk_name, tuple(reversed(box)), self.squeezed)


def _save_converters(hf: PreTrainedModel) -> list[WeightConverter]:
    """Return the conversions that transformers applies when it saves a model that was built from its configuration."""
    # The table contains conversions for loading. Reversed, they are those for saving.
    forward = get_model_conversion_mapping(hf, add_legacy=False)
    backward = [entry.reverse_transform() for entry in reversed(forward) if not isinstance(entry, PrefixChange)]
    return [entry for entry in backward if isinstance(entry, WeightConverter)]


def _not_a_box(hf: PreTrainedModel, name: str) -> str:
    return (
        f"model type '{hf.config.model_type}': transformers stores {name} on disk in a form that cannot be read and written in "
        "slices (permuted, transposed or merged with other tensors), so this family is not supported"
    )
