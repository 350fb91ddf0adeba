"""Broadcast of results from the last stage of a pipeline to all of its stages."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from areal.engine.faults import Faults


@dataclass(frozen=True)
class PackedResults:
    """A pickled value and its tensors, which are sent apart from it.

    Attributes:
        content: pickle with an index in place of each tensor.
        tensors: tensors by index.
    """

    content: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any) -> PackedResults:
        """Pack a value.

        Raises:
            ValueError: an object in the value cannot be sent to another process.
        """
        stream, tensors = io.BytesIO(), list[Tensor]()
        try:
            _Packer(stream, tensors).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the process function returned what cannot be sent to the other pipeline stages: {error}; return tensors, numbers, "
                "text and containers of them"
            ) from error
        return cls(stream.getvalue(), tensors)

    def value(self) -> Any:
        """Return the value that was packed."""
        return _Unpacker(io.BytesIO(self.content), self.tensors).load()


@dataclass(frozen=True)
class Stages:
    """The ranks of a pipeline.

    Attributes:
        mesh: one-dimensional mesh of the ranks.
        last: pipeline rank of the last stage.
    """

    mesh: DeviceMesh
    last: int


def pack_results(results: dict[int, Any], stages: Stages, faults: Faults) -> PackedResults | None:
    """Pack the results of a call on the last pipeline stage. Adds results that cannot be packed to ``faults``.

    Returns:
        ``None`` on other stages, and after a fault of the model.
    """
    # A model that failed may have closed the groups of its ranks: do not use the mesh then.
    if faults.broken or stages.mesh.get_local_rank() != stages.last:
        return None
    with faults.deferred():
        return PackedResults.of(results)
    return None


def broadcast_results(packed: PackedResults | None, stages: Stages, device: torch.device) -> dict[int, Any]:
    """Return the results of the last stage on every stage. Collective over ``stages``.

    Args:
        packed: from :func:`pack_results`.
        device: device of the received tensors, except for those that were on the CPU.
    """
    group, source = stages.mesh.get_group(), stages.last
    # First the pickle, with the shape, dtype and kind of device of each tensor.
    header: list[Any] = [None]
    if packed is not None:
        header = [(packed.content, [(x.shape, x.dtype, x.device.type) for x in packed.tensors])]
    dist.broadcast_object_list(header, group=group, group_src=source, device=torch.device("cpu"))
    content, layouts = header[0]
    # Then the tensors, into buffers on the other stages.
    if packed is None:
        buffers = [torch.empty(s, dtype=t, device="cpu" if kind == "cpu" else device) for s, t, kind in layouts]
        packed = PackedResults(content, buffers)
    for tensor in packed.tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    return packed.value()


class _Packer(pickle.Pickler):
    """Moves tensors out of the pickle, into ``tensors``."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self._tensors.append(value.detach().contiguous())
        return len(self._tensors) - 1


class _Unpacker(pickle.Unpickler):
    """Puts ``tensors`` back in the place of their indices."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, index: Any) -> Tensor:
        return self._tensors[index]
