"""What the last stage of a pipeline found, on all of its stages."""

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
    """Any picklable value, with the tensors in it apart."""

    content: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any) -> PackedResults:
        """Pack a value.

        Raises:
            ValueError: it holds something that cannot be sent to another process.
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
        """What was packed."""
        return _Unpacker(io.BytesIO(self.content), self.tensors).load()


@dataclass(frozen=True)
class Stages:
    """The ranks of a pipeline.

    Attributes:
        last: the one with the last stage.
    """

    mesh: DeviceMesh
    last: int


def pack_results(results: dict[int, Any], stages: Stages, faults: Faults) -> PackedResults | None:
    """The results of a call, on the last of several pipeline stages; what cannot be packed is one of the ``faults``."""
    # A model that failed may have taken the groups of its ranks with it: ask them nothing then.
    if faults.broken or stages.mesh.size() == 1 or stages.mesh.get_local_rank() != stages.last:
        return None
    with faults.deferred():
        return PackedResults.of(results)
    return None


def broadcast_results(
    results: dict[int, Any], parcel: PackedResults | None, stages: Stages, device: torch.device
) -> dict[int, Any]:
    """The results of the last stage on every stage. Collective over ``stages``.

    Args:
        parcel: from :func:`pack_results`.
        device: where tensors go that are not on the CPU.
    """
    if stages.mesh.size() == 1:
        return results
    group, source = stages.mesh.get_group(), stages.last
    header: list[Any] = [None]
    if parcel is not None:
        header = [(parcel.content, [(x.shape, x.dtype, x.device.type) for x in parcel.tensors])]
    dist.broadcast_object_list(header, group=group, group_src=source, device=torch.device("cpu"))
    content, likes = header[0]
    if parcel is None:
        empty = [torch.empty(s, dtype=t, device="cpu" if kind == "cpu" else device) for s, t, kind in likes]
        parcel = PackedResults(content, empty)
    for tensor in parcel.tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    return parcel.value()


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        self._tensors.append(thing.detach().contiguous())
        return len(self._tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]
