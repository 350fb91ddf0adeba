"""Layout of tensors on disk: which tensors of a Hugging Face file form which tensor in memory.

transformers stores some weights in another form in memory than on disk. For example, it stacks the experts of a layer, merges
projections, or interleaves their rows. Its table of conversions defines how. This module runs the conversion once, on tiny
tensors with a distinct number in every element, and records the result as boxes: each box of a tensor in memory is a tensor on
disk, or a slice of one. Boxes can be read and written one slice at a time, on any layout of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    revert_weight_conversion,
)

from areal.api.weights import NamedTensor
from areal.utils.dtensor import Box

_INTERLEAVE: Any = getattr(core_model_loading, "Interleave", None)
"""The conversion that interleaves rows; ``None`` before transformers 5.14, where no model has it."""


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk, or a slice of one, as a box of a tensor in memory.

    Attributes:
        name: key on disk.
        box: box of the tensor in memory.
        squeezed: dimensions of the box, of size 1, that the tensor on disk does not have.
        index: slice of the tensor on disk, possibly with steps; ``None`` for all of it.
        full_shape: shape of the tensor on disk; ``None`` if the box is all of it.
    """

    name: str
    box: Box
    squeezed: frozenset[int] = frozenset()
    index: Box | None = None
    full_shape: tuple[int, ...] | None = None

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box, in the dimensions of the tensor on disk."""
        return tuple(s.stop - s.start for dim, s in enumerate(self.box) if dim not in self.squeezed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return self.box_shape if self.full_shape is None else self.full_shape

    def cut(self, full: Tensor) -> Tensor:
        """Return the box of the full tensor in memory, as a view in the dimensions of the tensor on disk."""
        return full[self.box].view(self.box_shape)

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Return the intersection of this tensor with a box of the tensor in memory, such as a rank's shard.

        Returns:
            The intersection as indices into the tensor on disk, and as indices into ``box``. ``None`` if it is empty.
        """
        # Bounds within the full tensor in memory.
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.box, box, strict=True)]
        if any(s.stop <= s.start for s in both):
            return None
        # The same bounds relative to this box, and relative to the other one.
        relative = [slice(s.start - a.start, s.stop - a.start) for s, a in zip(both, self.box, strict=True)]
        in_box = tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(both, box, strict=True))
        on_disk = tuple(s for dim, s in enumerate(relative) if dim not in self.squeezed)
        if self.index is None:
            return on_disk, in_box
        # Within a slice of the tensor on disk.
        return tuple(_subslice(outer, s) for outer, s in zip(self.index, on_disk, strict=True)), in_box


def _subslice(outer: slice, inner: slice) -> slice:
    """Return the slice that selects ``inner`` of the elements that ``outer`` selects."""
    step = outer.step or 1
    return slice(outer.start + inner.start * step, outer.start + (inner.stop - 1) * step + 1, outer.step)


def joined(slices: Iterable[tuple[DiskTensor, Tensor]]) -> Iterator[NamedTensor]:
    """Yield tensors on disk, in full, as soon as all their slices have arrived.

    Args:
        slices: pairs of a slice and its values, see :meth:`DiskTensor.cut`. The slices of one tensor should be neighbours:
            an incomplete tensor needs memory.
    """
    incomplete: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for part, values in slices:
        if part.index is None:
            yield NamedTensor(part.name, values)
            continue
        if part.name not in incomplete:
            incomplete[part.name] = values.new_empty(part.shape)
            missing[part.name] = math.prod(part.shape)
        incomplete[part.name][part.index] = values
        missing[part.name] -= values.numel()
        if missing[part.name] == 0:
            yield NamedTensor(part.name, incomplete.pop(part.name))


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that are saved: parameters (shared ones once, under the first name), then buffers."""
    yield from module.named_parameters()
    transient = {id(buffer) for _, buffer in transient_buffers(module)}
    yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in transient)


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter with several names to the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


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
        ValueError: transformers stores a tensor in a form that does not consist of boxes, such as a transposed one.
    """
    tensors = dict(stored_tensors(hf))
    converters = _save_converters(hf)
    # A probe has one element for each box that its tensor is expected to be divided into.
    probes = [_Probe.of(hf, name, tensor.shape, converters) for name, tensor in tensors.items()]

    # Number the elements of all probes consecutively.
    owners: list[tuple[_Probe, int]] = []
    marks = {}
    for probe in probes:
        size = math.prod(probe.counts)
        marks[probe.name] = torch.arange(len(owners), len(owners) + size).view(probe.counts)
        owners += [(probe, i) for i in range(size)]

    # Convert them as a save would. Each element must end up in exactly one tensor on disk.
    layout: dict[str, list[tuple[int, DiskTensor]]] = {name: [] for name in tensors}
    for disk_name, mark in revert_weight_conversion(hf, marks).items():
        for (probe, i), piece in _pieces(hf, disk_name, mark, owners):
            layout[probe.name].append((i, piece))
    lost = [probe.name for probe in probes if len(layout[probe.name]) != math.prod(probe.counts)]
    if lost:
        raise ValueError(_not_boxes(hf, ", ".join(lost[:3])))
    return {name: tuple(piece for _, piece in sorted(pieces, key=lambda it: it[0])) for name, pieces in layout.items()}


def divided_as(
    pieces: tuple[DiskTensor, ...], shape_of: Callable[[str], tuple[int, ...] | None]
) -> tuple[DiskTensor, ...]:
    """Return the tensors on disk that form a tensor in memory, with their sizes in given files.

    A tensor in memory may be a concatenation of tensors of any sizes, such as the convolutions of queries, keys and values.
    transformers writes them in equal sizes, but reads any.

    Args:
        pieces: tensors on disk, see :func:`disk_layout`.
        shape_of: function that returns the shape of a tensor in the files by its key; ``None`` for a missing one.

    Returns:
        ``pieces`` if they are not a concatenation, or if the sizes in the files do not fit.
    """
    dims = {dim for dim in range(len(pieces[0].box)) if len({(p.box[dim].start, p.box[dim].stop) for p in pieces}) > 1}
    if len(dims) != 1 or any(piece.squeezed or piece.index for piece in pieces):
        return pieces
    shapes, dim = [shape_of(piece.name) for piece in pieces], dims.pop()
    stops = list(itertools.accumulate(shape[dim] if shape and len(shape) > dim else 0 for shape in shapes))
    if stops[-1] != pieces[-1].box[dim].stop:
        return pieces
    starts = [0, *stops[:-1]]
    return tuple(
        replace(piece, box=(*piece.box[:dim], slice(start, stop), *piece.box[dim + 1 :]))
        for piece, start, stop in zip(pieces, starts, stops, strict=True)
    )


@dataclass(frozen=True)
class _Probe:
    """Division of one tensor in memory into boxes.

    Attributes:
        name: name in memory.
        shape: shape in memory.
        counts: number of boxes along each dimension.
        squeezed: dimensions that the tensors on disk do not have.
        interleaved: dimension along which the boxes alternate on disk, element by element; ``None`` if they follow each other.
    """

    name: str
    shape: torch.Size
    counts: tuple[int, ...]
    squeezed: frozenset[int]
    interleaved: int | None

    @classmethod
    def of(cls, hf: PreTrainedModel, name: str, shape: torch.Size, converters: list[WeightConverter]) -> _Probe:
        counts, squeezed, interleaved = [1] * len(shape), set(), None
        # The conversion that applies to this tensor, if any. Without one, the tensor is stored as it is.
        converter = next((c for c in converters if c.rename_source_key(name)[1] is not None), None)
        operations: list[Any] = converter.operations if converter is not None else []
        for op in operations:
            # Unstack: one tensor on disk for each index of the dimension, which disappears (experts of a layer).
            if type(op) is SplitModulelist:
                counts[op.dim] = shape[op.dim]
                squeezed.add(op.dim)
            # Chunk: one tensor on disk for each name of the conversion (gate and up projections).
            elif type(op) is Chunk and converter is not None:
                counts[op.dim] = _chunk_count(op, list(converter.target_patterns), hf)
            # Interleave: rows of the first and the second half alternate. Each half may be a tensor in memory.
            elif type(op) is _INTERLEAVE and op.inverse and interleaved is None:
                interleaved = op.dim
                counts[op.dim] = 2 if converter is not None and len(converter.source_patterns) == 1 else 1
            # Concatenate: several tensors in memory are one tensor on disk.
            elif type(op) is not Concatenate:
                raise ValueError(_not_boxes(hf, name))
        if interleaved is not None and shape[interleaved] % counts[interleaved]:
            raise ValueError(_not_boxes(hf, name))
        return cls(name, shape, tuple(counts), frozenset(squeezed), interleaved)

    def box(self, index: int) -> Box:
        """Return the box of an element of the probe."""
        box = []
        # Convert the flat index to coordinates, last dimension first. Boxes are divided as by torch.chunk().
        for size, count in zip(reversed(self.shape), reversed(self.counts), strict=True):
            index, position = divmod(index, count)
            extent = -(-size // count)
            box.append(slice(min(position * extent, size), min((position + 1) * extent, size)))
        return tuple(reversed(box))


def _chunk_count(op: Chunk, targets: list[str], hf: PreTrainedModel) -> int:
    """Return the number of tensors on disk that a tensor is cut into."""
    # Before transformers 5.16 the configuration of a model never decides.
    if getattr(op, "num_shards_attribute", None) is None:
        return len(targets)
    return len(op.get_target_patterns(targets, config=hf.config))


def _pieces(
    hf: PreTrainedModel, disk_name: str, mark: Tensor, owners: list[tuple[_Probe, int]]
) -> Iterator[tuple[tuple[_Probe, int], DiskTensor]]:
    """Yield the slices of a tensor on disk, and the elements of probes that they come from.

    Args:
        mark: converted probe of the tensor: one element for each slice.
        owners: probe and index of each element, by its number.
    """
    grid = [owners[i] for i in mark.flatten().tolist()]
    parts = [DiskTensor(disk_name, probe.box(i), probe.squeezed) for probe, i in grid]
    if len(parts) == 1:
        yield grid[0], parts[0]
        return
    # Only one dimension is divided: slices follow each other along it, or alternate.
    dims = [dim for dim, n in enumerate(mark.shape) if n > 1]
    extents = [part.box_shape for part in parts]
    dim = dims[0]
    others = {extent[:dim] + extent[dim + 1 :] for extent in extents}
    alternate = {probe.interleaved for probe, _ in grid}
    if len(dims) != 1 or len(others) != 1 or alternate not in ({None}, {dim}) or any(part.squeezed for part in parts):
        raise ValueError(_not_boxes(hf, disk_name))
    if alternate == {dim} and len({extent[dim] for extent in extents}) != 1:
        raise ValueError(_not_boxes(hf, disk_name))
    shape = list(extents[0])
    shape[dim] = total = sum(extent[dim] for extent in extents)
    start = 0
    for number, (owner, part, extent) in enumerate(zip(grid, parts, extents, strict=True)):
        index = [slice(0, size) for size in shape]
        index[dim] = slice(number, total, len(parts)) if alternate == {dim} else slice(start, start + extent[dim])
        start += extent[dim]
        yield owner, replace(part, index=tuple(index), full_shape=tuple(shape))


def _save_converters(hf: PreTrainedModel) -> list[WeightConverter]:
    """Return the conversions that transformers applies when it saves a model that was built from its configuration."""
    # The table contains conversions for loading. Reversed, they are those for saving.
    forward = get_model_conversion_mapping(hf, add_legacy=False)
    backward = [entry.reverse_transform() for entry in reversed(forward) if not isinstance(entry, PrefixChange)]
    return [entry for entry in backward if isinstance(entry, WeightConverter)]


def _not_boxes(hf: PreTrainedModel, name: str) -> str:
    return (
        f"model type '{hf.config.model_type}': transformers stores {name} on disk in a form that cannot be read and written in "
        "slices (transposed or rearranged), so this family is not supported"
    )
