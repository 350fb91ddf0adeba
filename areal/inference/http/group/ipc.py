"""Weights through memory of the trainer's ranks, which the workers of servers on the same GPUs open by CUDA's handles."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from areal.api.control import Control
from areal.api.weights import SelectName, TensorSource, WeightUpdateMeta, stream_of
from areal.inference.http.group.chunk import CHUNK_BYTES, Chunk, ChunkMemory, cut_chunks
from areal.inference.http.group.sender import INTERRUPTED_NOTE, GroupSender, Members
from areal.inference.http.servers.group_routes import Handles, TakesHandles
from areal.weight_sync.transport import OutgoingTensors, Transport


class IPCCarrier:
    """Weights through CUDA's handles of memory, to servers whose workers run on the GPUs of the trainer's ranks.

    Every rank copies the full tensors into its own memory, a chunk at a time, and the worker on the same GPU loads them from there: no weight
    leaves its GPU. Each worker needs a rank on its GPU. Not run on GPUs yet.

    Args:
        chunk_bytes: maximum size of a chunk, unless a single tensor is larger. Each rank has two of them in memory during an update.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes = {chunk_bytes}: it must be above 0")
        self.chunk_bytes = chunk_bytes

    def memory(self) -> IPCMemory:
        """Return the memory for chunks on this rank's GPU."""
        return IPCMemory(self.chunk_bytes, torch.device("cuda"))

    def share(self, buffer: Tensor) -> Handles:
        """Return a new handle of a buffer under the id of its GPU. A worker may open each handle once."""
        _, handle = reduce_tensor(borrowed(buffer))
        return {str(torch.cuda.get_device_properties(buffer.device).uuid): handle}

    def reclaim(self) -> None:
        """Free memory that the workers have closed, and give what is free back to the GPU."""
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    # ---- there is no group

    def open(self, size: int) -> Mapping[str, Any]:
        return {}

    def join(self, seconds: float) -> None:
        return None

    def abort(self) -> None:
        return None


class IPCMemory(ChunkMemory):
    """Memory of chunks that ranks fill in step. A rank without enough goes on to the end of its chunk, where it tells the others.

    Attributes:
        error: error of an allocation.
    """

    error: Exception | None = None

    def take(self, nbytes: int) -> Tensor:
        try:
            return super().take(nbytes)
        except torch.OutOfMemoryError as error:
            self.error = error
            return torch.empty(max(nbytes, self.nbytes), dtype=torch.uint8, device="meta")

    def check(self) -> None:
        """Raise the error of an allocation."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def borrowed(buffer: Tensor) -> Tensor:
    """Return the bytes of a buffer as a tensor that does not own them.

    torch keeps the memory of a tensor that it has shared until another process has opened and closed it, which no worker does with the memory
    of a rank that has none on its GPU.
    """
    storage = torch._C._construct_storage_from_data_pointer(buffer.data_ptr(), buffer.device, buffer.nbytes)
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage, 0, buffer.shape, buffer.stride())


class IPCTransport(Transport):
    """Ranks fill their memory with the next chunk while the servers load the last one.

    Args:
        control: control plane over all ranks of the trainer.
        servers: the servers, on the rank that owns them; ``None`` on all others.
        routes: requests of the servers' kind.
        carrier: memory of this rank.
        cast: dtype in which floating-point tensors are sent.
        timeout: seconds for each request.
    """

    unsent_note = INTERRUPTED_NOTE

    def __init__(
        self,
        control: Control,
        servers: Members | None,
        routes: TakesHandles,
        carrier: IPCCarrier,
        *,
        cast: torch.dtype | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._routes, self._carrier, self._memory = routes.by_handles, carrier, carrier.memory()
        self._chunk: Chunk | None = None
        self._group: GroupSender | None = None
        if servers is not None:
            self._group = GroupSender(servers, self._routes, carrier, packed_bytes=None, timeout=timeout)
        super().__init__(control, self._group, cast=cast)

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        try:
            return super().send(source, version, select=select)
        finally:
            # GPUs that are shared with servers have no memory to spare.
            self._chunk = None
            self._memory.release()
            self._carrier.reclaim()

    def _stream(self, source: TensorSource, version: int, select: SelectName | None, note: str) -> WeightUpdateMeta:
        tensors = OutgoingTensors(stream_of(source, self._cast), version, select, self._cast)
        chunks = cut_chunks(tensors, self._memory, sys.maxsize)  # one buffer each
        with self._aborting_on_error():
            while shared := self._fill_all(chunks, note):
                # Ends the round of the last chunk, whose memory is filled next.
                self._control.attempt(partial(self._load, shared), note)
            self._control.attempt(self._end, note)
        return tensors.meta

    def _fill_all(self, chunks: Iterator[Chunk], note: str) -> Handles:
        """Fill the memory of all ranks with the next chunk. Returns the handles of all; none after the last chunk."""
        shared = self._control.attempt_and_gather(lambda: self._fill(chunks), note)
        return {gpu: handle for each in shared for gpu, handle in each.items()}

    def _fill(self, chunks: Iterator[Chunk]) -> Handles:
        """Fill the memory of this rank. Returns its handle."""
        self._chunk = next(chunks, None)
        self._memory.check()
        return {} if self._chunk is None else self._carrier.share(self._chunk.buffers[0])

    def _load(self, handles: Handles) -> None:
        """Let the servers load the chunk."""
        if self._group is not None and self._chunk is not None:
            call = self._routes.load(self._chunk.specs, handles)
            self._group.start_round(f"{self._chunk.names} did not reach every server", call, lambda: None)

    def _end(self) -> None:
        if self._group is not None:
            self._group.end_round()
