"""Weights to vLLM servers over a process group, by handles of memory on the same GPUs, or as shards."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.inference.http.servers.dialect import expect
from areal.inference.http.servers.group_routes import INTERRUPTED, Handles, SentShards
from areal.inference.http.servers.http_call import Anything, Empty, HTTPCall, LabelReply, ReplyBody, RequestBody

# Read and run against vLLM 0.32.0: ``entrypoints/rl/online/api_router.py`` (routes), in ``distributed/weight_transfer`` ``nccl_common.py``,
# ``nccl_engine.py``, ``ipc_engine.py``, ``m2n_engine.py`` and ``packed_tensor.py`` (fields, and the order of the broadcasts),
# ``v1/worker/gpu_worker.py`` and ``model_executor/model_loader/reload/layerwise.py`` (state of an interrupted update).


class VLLMWorldSize(ReplyBody):
    """Reply of ``GET /get_world_size``."""

    world_size: int = Field(ge=1)


class VLLMInitTransfer(RequestBody):
    """``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class VLLMUpdateInfo(RequestBody):
    """``update_info`` of ``POST /update_weights``."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class VLLMHandleInfo(VLLMUpdateInfo):
    """``update_info`` of the backend ``ipc``."""

    tensor_sizes: list[int]
    ipc_handles_pickled: str


class VLLMShardInfo(RequestBody):
    """``update_info`` of the backend ``nccl_m2n``."""

    names: list[str]


class VLLMUpdateWeights(RequestBody):
    """``POST /update_weights``."""

    update_info: VLLMHandleInfo | VLLMUpdateInfo | VLLMShardInfo


class VLLMFinishUpdate(RequestBody):
    """``POST /finish_weight_update``."""

    weight_version: str


class VLLMGroupRoutes:
    """Routes of vLLM. The servers need ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "nccl"}'``, or
    ``"nccl_m2n"`` for shards.

    Tensors are loaded as they come: an interrupted server has lost its weights. Its layers stay prepared for the rest of the
    update, and would take tensors of the next update for the missing ones. ``/finish_weight_update`` ends that state, but is refused
    outside an update, and so :attr:`recover` starts one first.
    """

    packs = True

    @property
    def by_handles(self) -> VLLMHandleGroupRoutes:
        return VLLMHandleGroupRoutes()

    workers = HTTPCall.get("/get_world_size", VLLMWorldSize)
    workers_of_replica = HTTPCall.get("/get_world_size", VLLMWorldSize, {"include_dp": "false"})
    label = HTTPCall.get("/weight_info", LabelReply)
    leave = (HTTPCall("/shutdown_weight_transfer_engine", Empty(), Anything),)
    start = (HTTPCall("/start_weight_update", Empty(), Anything),)

    def read_workers(self, reply: ReplyBody) -> int:
        return expect(VLLMWorldSize, reply).world_size

    def join(self, where: Mapping[str, Any], offset: int, size: int, packed_bytes: int | None) -> HTTPCall[Anything]:
        info: dict[str, Any] = {**where, "rank_offset": offset, "world_size": size}
        if packed_bytes is not None:
            info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes}
        return HTTPCall("/init_weight_transfer_engine", VLLMInitTransfer(init_info=info), Anything)

    def update(self, specs: Sequence[TensorSpec]) -> HTTPCall[Anything]:
        return _update(VLLMUpdateInfo(**_columns(specs)))

    def join_shards(self, where: Mapping[str, Any], offset: int, size: int, plan: SentShards) -> HTTPCall[Anything]:
        meshes = {"src_mesh_dims": plan.mesh, "dst_mesh_dims": plan.workers, "src_placements": plan.placements}
        return self.join({**where, **meshes, **_columns(plan.specs)}, offset, size, None)

    def receive(self, names: Sequence[str]) -> HTTPCall[Anything]:
        return _update(VLLMShardInfo(names=list(names)))

    def finish(self, label: str) -> Sequence[HTTPCall[Anything]]:
        return (HTTPCall("/finish_weight_update", VLLMFinishUpdate(weight_version=label), Anything),)

    @property
    def recover(self) -> Sequence[HTTPCall[Anything]]:
        # The start fails if the update is still active. The label keeps others from taking these weights for complete ones.
        return (*self.start, *self.finish(INTERRUPTED))


class VLLMHandleGroupRoutes(VLLMGroupRoutes):
    """Routes of vLLM with ``--weight-transfer-config '{"backend": "ipc"}'``, on servers with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``."""

    def join(self, where: Mapping[str, Any], offset: int, size: int, packed_bytes: int | None) -> HTTPCall[Anything]:
        return HTTPCall("/init_weight_transfer_engine", VLLMInitTransfer(init_info={"packed": True}), Anything)

    def load(self, specs: Sequence[TensorSpec], handles: Handles) -> HTTPCall[Anything]:
        # The standard alphabet, as for ``nccl_unique_id_b64``.
        pickled = base64.b64encode(pickle.dumps(dict(handles))).decode()
        sizes = [spec.nbytes for spec in specs]
        return _update(VLLMHandleInfo(**_columns(specs), tensor_sizes=sizes, ipc_handles_pickled=pickled))


def _columns(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def _update(info: VLLMUpdateInfo | VLLMShardInfo) -> HTTPCall[Anything]:
    return HTTPCall("/update_weights", VLLMUpdateWeights(update_info=info), Anything)
