"""Backends of vLLM's weight transfer on a CPU: ``gloo`` is its NCCL backend, ``files`` its ``ipc``, and ``shards`` its ``nccl_m2n``.

Cutting, loading and life cycle are vLLM's own.

Loaded by vLLM (plugin group ``vllm.general_plugins``), in an environment without areal.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import areal_fake_m2n
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import m2n_engine, packed_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers import utils

SECONDS = 60.0


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Fields of ``init_info``: those of the NCCL backend with a store."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = packed_tensor.DEFAULT_PACKED_NUM_BUFFERS


class Group:
    """The members of ``PyNcclCommunicator`` that the NCCL backend calls."""

    def __init__(self, info: GlooInitInfo, rank: int) -> None:
        timeout = timedelta(seconds=SECONDS)
        store = dist.TCPStore(info.master_address, info.master_port, is_master=False, timeout=timeout)
        self._group: Any = dist.ProcessGroupGloo(store, rank, info.world_size, timeout)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        # Tests make a worker slow, or let it die, in the middle of an update.
        time.sleep(float(os.environ.get("AREAL_TEST_RECEIVE_SECONDS", "0")))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group.abort()


class NoStream:
    """A stream of a CPU, where work ends before the call returns."""

    def synchronize(self) -> None:
        pass


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """The NCCL backend with another group. Its methods call CUDA for streams and synchronization only."""

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        config = self.parallel_config
        worker = config.data_parallel_index * config.world_size + config.rank
        self.model_update_group = Group(init_info, worker + init_info.rank_offset)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        streams = tuple(NoStream() for _ in range(self.packed_num_buffers))
        with (
            mock.patch.object(packed_tensor, "_get_streams", return_value=streams),
            mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
            mock.patch.object(torch.accelerator, "synchronize"),
            mock.patch.object(torch.cuda, "current_stream", return_value=NoStream()),
            mock.patch.object(torch.cuda, "stream", new=mock.MagicMock()),
        ):
            super().update_weights(update_info)


class FilesWeightTransferEngine(IPCWeightTransferEngine):
    """The backend ``ipc`` with files in place of CUDA's handles. The worker's GPU is named by a variable."""

    def receive_weights(self, update_info: Any) -> None:
        gpu = SimpleNamespace(uuid=os.environ["AREAL_TEST_GPU"])
        with (
            mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
            mock.patch.object(reductions, "rebuild_cuda_tensor", opened),
        ):
            super().receive_weights(update_info)


def opened(
    kind: type, size: Any, stride: Any, offset: int, storage: type, dtype: Any, device: Any, file: str, nbytes: int
) -> torch.Tensor:
    """Open a file as ``rebuild_cuda_tensor`` opens memory, whose first arguments it has."""
    return torch.from_file(file, shared=True, size=nbytes, dtype=dtype)


class ShardsWeightTransferEngine(M2NWeightTransferEngine):
    """The backend ``nccl_m2n`` over gloo. vLLM plans what each worker takes."""

    def init_transfer_engine(self, init_info: Any) -> None:
        def join(info: Any, config: Any) -> Any:
            rank = config.data_parallel_index * config.world_size + config.rank + info.rank_offset
            return areal_fake_m2n.Comm(info.nccl_unique_id_bytes, rank, info.world_size)

        with (
            mock.patch.object(m2n_engine, "import_m2n", return_value=areal_fake_m2n),
            mock.patch.object(m2n_engine, "worker_init_process_group", join),
        ):
            super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        with (
            mock.patch.object(m2n_engine, "comm_ptr", lambda comm: comm),
            mock.patch.object(torch.cuda, "current_stream", return_value=NoStream()),
        ):
            super().receive_weights(update_info)

    def shutdown(self) -> None:
        with mock.patch.object(torch.accelerator, "synchronize"):
            super().shutdown()


ENGINES = {
    "gloo": GlooWeightTransferEngine,
    "files": FilesWeightTransferEngine,
    "shards": ShardsWeightTransferEngine,
}


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Leave a layer's weights as they are on a GPU, where ``nccl_m2n`` writes into them. vLLM packs them on a CPU."""
    layer.cpu_linear = torch.nn.functional.linear


def register() -> None:
    """Register the backends. vLLM calls it in each of its processes."""
    if os.environ.get("AREAL_TEST_PLAIN_WEIGHTS"):
        utils.dispatch_cpu_unquantized_gemm = keep_weights
    for name, engine in ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
