"""Which tensors of a Hugging Face file make up which tensor in memory.

transformers keeps some weights in memory in another form than on disk: it stacks the experts of a layer, for one. Its own
table of conversions says how. Here that table is asked once, with tiny marked tensors, and the answer is kept as boxes: this disk
tensor is that box of that tensor in memory. Boxes can be read and written one slice at a time, on any layout.
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
        name: its key on disk.
        box: where it lies in the tensor in memory.
        squeezed: dimensions of the box, of size 1, that the tensor on disk has not.
    """

    name: str
    box: Box
    squeezed: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return tuple(s.stop - s.start for dim, s in enumerate(self.box) if dim not in self.squeezed)

    def cut(self, full: Tensor) -> Tensor:
        """The tensor on disk, as a view of the full tensor in memory."""
        return full[self.box].view(self.shape)

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """What this tensor and a box of the tensor in memory share.

        Returns:
            The shared part as indices into the tensor on disk and as indices into ``box``; ``None`` where it is empty.
        """
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.box, box, strict=True)]
        if any(s.stop <= s.start for s in both):
            return None
        on_disk = [slice(s.start - a.start, s.stop - a.start) for s, a in zip(both, self.box, strict=True)]
        in_box = tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(both, box, strict=True))
        return tuple(s for dim, s in enumerate(on_disk) if dim not in self.squeezed), in_box


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (a shared one once, under its first name), then buffers that are saved, by name."""
    yield from module.named_parameters()
    transient = {id(buffer) for _, buffer in transient_buffers(module)}
    yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in transient)


def transient_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that no file holds, because a module computes them from its configuration."""
    for prefix, owner in module.named_modules():
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def disk_layout(hf: PreTrainedModel) -> dict[str, tuple[DiskTensor, ...]]:
    """For each tensor of the model that is stored, by its name in memory and in order, the tensors on disk that make it up.

    Raises:
        ValueError: transformers stores some tensor in a form that is no box (permuted, transposed or merged with others).
    """
    tensors = dict(stored_tensors(hf))
    converters = _save_converters(hf)
    probes = [_Probe.of(hf, name, tensor.shape, converters) for name, tensor in tensors.items()]
    starts, marks, total = [], {}, 0
    for probe in probes:
        starts.append(total)
        size = math.prod(probe.shape)
        marks[probe.name] = torch.arange(total, total + size).view(probe.shape)
        total += size
    found: dict[int, str] = {}
    for disk_name, mark in revert_weight_conversion(hf, marks).items():
        if mark.numel() != 1:
            raise ValueError(_not_a_box(hf, disk_name))
        found[int(mark)] = disk_name
    if len(found) != total:
        lost = [probe.name for probe, start in zip(probes, starts, strict=True) if start not in found]
        raise ValueError(_not_a_box(hf, ", ".join(lost[:3]) or "a tensor"))
    layout = {}
    for probe, start in zip(probes, starts, strict=True):
        pieces = range(math.prod(probe.shape))
        layout[probe.name] = tuple(probe.piece(i, found[start + i], tensors[probe.name].shape) for i in pieces)
    return layout


@dataclass(frozen=True)
class _Probe:
    """How many pieces a tensor falls into along each dimension, and which dimensions its pieces lose."""

    name: str
    shape: tuple[int, ...]
    squeezed: frozenset[int]

    @classmethod
    def of(cls, hf: PreTrainedModel, name: str, shape: torch.Size, converters: list[WeightConverter]) -> _Probe:
        counts, squeezed = [1] * len(shape), set()
        converter = next((c for c in converters if c.rename_source_key(name)[1] is not None), None)
        for op in converter.operations if converter is not None else ():
            if type(op) is SplitModulelist:
                counts[op.dim] = shape[op.dim]
                squeezed.add(op.dim)
            elif type(op) is Chunk and converter is not None:
                counts[op.dim] = len(op.get_target_patterns(list(converter.target_patterns), config=hf.config))
            else:
                raise ValueError(_not_a_box(hf, name))
        if any(size % count for size, count in zip(shape, counts, strict=True) if count > 1):
            raise ValueError(_not_a_box(hf, name))
        return cls(name, tuple(counts), frozenset(squeezed))

    def piece(self, index: int, disk_name: str, shape: torch.Size) -> DiskTensor:
        box = []
        for size, count in zip(reversed(shape), reversed(self.shape), strict=True):
            index, place = divmod(index, count)
            box.append(slice(place * (size // count), (place + 1) * (size // count)))
        return DiskTensor(disk_name, tuple(reversed(box)), self.squeezed)


def _save_converters(hf: PreTrainedModel) -> list[WeightConverter]:
    """What transformers does to tensors when it saves a model that was made from its configuration."""
    forward = get_model_conversion_mapping(hf, add_legacy=False)
    backward = [entry.reverse_transform() for entry in reversed(forward) if not isinstance(entry, PrefixChange)]
    return [entry for entry in backward if isinstance(entry, WeightConverter)]


def _not_a_box(hf: PreTrainedModel, name: str) -> str:
    return (
        f"model type '{hf.config.model_type}': transformers stores {name} on disk in a form that cannot be read and written in "
        "slices (permuted, transposed or merged with other tensors), so this family is not supported"
    )
