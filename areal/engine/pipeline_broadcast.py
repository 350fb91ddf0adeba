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
from areal.utils.distributed import ControlPlane


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


def broadcast_results(
    packed: PackedResults | None, stages: Stages, control: ControlPlane, device: torch.device
) -> dict[int, Any]:
    """Return the results of the last stage on every stage. Collective over ``stages``.

    Args:
        packed: from :func:`pack_results`.
        control: control plane over all ranks of the engine, which carries what is on the host.
        device: device of the received tensors, except for those that were on the CPU.
    """
    group = stages.mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    # First the pickle, with the shape, dtype and kind of device of each tensor: the group of the stages carries tensors of its device only.
    if packed is not None:
        header = pickle.dumps((packed.content, [(x.shape, x.dtype, x.device.type) for x in packed.tensors]))
        _send(header, [rank for rank in ranks if rank != ranks[stages.last]], control)
        tensors = [x.to(device) for x in packed.tensors]
    else:
        content, layouts = pickle.loads(_receive(ranks[stages.last], control))
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in layouts]
    # Then the tensors, into buffers on the other stages.
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=stages.last)
    if packed is None:
        kinds = (kind for _, _, kind in layouts)
        packed = PackedResults(
            content, [x if x.device.type == kind else x.to(kind) for x, kind in zip(tensors, kinds, strict=True)]
        )
    return packed.value()


def _send(content: bytes, ranks: list[int], control: ControlPlane) -> None:
    """Send bytes to other ranks, after their number."""
    for part in (torch.tensor([len(content)]), torch.frombuffer(bytearray(content), dtype=torch.uint8)):
        control.exchange([(part, rank) for rank in ranks], [])


def _receive(rank: int, control: ControlPlane) -> bytes:
    """Return the bytes that a rank sends."""
    size = torch.zeros(1, dtype=torch.int64)
    control.exchange([], [(size, rank)])
    content = torch.empty(int(size), dtype=torch.uint8)
    control.exchange([], [(content, rank)])
    return content.numpy().tobytes()


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
