"""Carrier of shards from the ranks of a trainer to the workers of servers, by NCCL's resharding (package ``nccl-extensions``)."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from areal.inference.http.group.carrier import join_workers
from areal.inference.http.group.reshard_plan import REPLICATE, Mesh, Placements
from areal.weight_sync.nccl import NCCLError, NCCLLibrary

_MODULE = "nccl.m2n"
_SETTLE_SECONDS = 5.0
"""Maximum seconds for stopped work to end."""


class Side(NamedTuple):
    """Layout of a tensor over the ranks of one side.

    Attributes:
        mesh: sizes of the axes.
        first: first rank.
        placements: for each axis the dimension that it divides, or :data:`~areal.inference.http.group.reshard_plan.REPLICATE`.
    """

    mesh: Mesh
    first: int
    placements: tuple[int, int]


def side(mesh: Mesh, first: int, placements: Placements) -> Side:
    """Return the layout as NCCL's resharding takes it. What every rank has whole is divided by an axis of one rank, as vLLM does."""
    if placements is None:
        return Side((mesh[0] * mesh[1], 1), first, (REPLICATE, 0))
    return Side(mesh, first, placements)


class Link(Protocol):
    """This rank's end of a group with the workers of one server."""

    def receive(self, root: int, rows: int, seconds: float) -> list[list[int]]:
        """Return a table of small numbers, int8 ``[rows, 2]``, that rank ``root`` broadcasts.

        Raises:
            RuntimeError, TimeoutError: a member is lost. The link must be left.
        """
        ...

    def reshard(self, shard: Tensor, source: Side, target: Side) -> None:
        """Send this rank's contiguous shard. Does not wait: the shard must stay unchanged until :meth:`wait` has returned."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until all shards are sent.

        Raises:
            RuntimeError, TimeoutError: a member is lost. The link must be left.
        """
        ...

    def revoke(self) -> None:
        """Stop what is under way, also during a call in another thread. Must not raise. The link must be left."""
        ...

    def finalize(self) -> None:
        """Give back what the resharding has on the group. Must not raise. Called once, before :meth:`abort` of any link."""
        ...

    def abort(self) -> None:
        """Leave the group. Must not raise."""
        ...


def leave(links: Sequence[Link], *, busy: bool) -> None:
    """Leave groups.

    The resharding keeps memory of all groups until its last user has ended: none may be left before.

    Args:
        links: ends of the groups.
        busy: something may be under way.
    """
    if busy:
        for link in links:
            link.revoke()
    for link in links:
        link.finalize()
    for link in links:
        link.abort()


class ReshardCarrier:
    """Sends the shard of each rank over NCCL to vLLM's engine ``nccl_m2n``. No rank has full tensors, as far as they are divided evenly.

    Pass it on all ranks. It needs the package ``nccl-extensions`` and NCCL 2.30.5, here and at the servers. Not run on GPUs yet.

    Args:
        device: GPU of this rank, by default the current one.
        library: functions of NCCL. By default those of the library that PyTorch uses.
    """

    def __init__(self, device: torch.device | str = "cuda", *, library: NCCLLibrary | None = None) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ValueError(f"device = {str(device)!r}: NCCL needs a GPU; choose 'cuda'")
        self._library = library
        self._checked = False

    @property
    def device(self) -> torch.device:
        """GPU of this rank. Threads have a current device of their own: call this from that of the engine first."""
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device

    def check(self) -> None:
        """Load the libraries, before anything waits for this rank.

        Raises:
            RuntimeError: one is missing, or older than the other needs.
        """
        self._require_library()
        if not self._checked:
            m2n = _import_m2n()
            m2n.Handle.create(m2n.Config(max_cta=None)).destroy()
            self._checked = True

    def new_key(self) -> str:
        """Return a new key with which the members of a group find each other. vLLM decodes the standard alphabet only."""
        return base64.b64encode(self._require_library().unique_id()).decode()

    def join(self, key: str, rank: int, size: int, seconds: float) -> Link:
        """Join a group.

        Raises:
            RuntimeError, TimeoutError: a member is missing.
        """
        return NCCLLink(self._require_library(), base64.b64decode(key), rank, size, self.device, seconds)

    def _require_library(self) -> NCCLLibrary:
        if self._library is None:
            self._library = NCCLLibrary()
        return self._library


def _import_m2n() -> Any:
    try:
        return import_module(_MODULE)
    except ImportError as error:
        raise RuntimeError(f"{_MODULE} is missing ({error}): install nccl-extensions[cu13] (cu12)") from error


class NCCLLink:
    """Implements :class:`Link`."""

    def __init__(
        self, library: NCCLLibrary, key: bytes, rank: int, size: int, device: torch.device, seconds: float
    ) -> None:
        self._m2n = _import_m2n()
        self._device = device
        self._comm, self._stream = join_workers(library, key, rank, size, device, seconds)
        try:
            with torch.cuda.device(device):
                self._handle = self._m2n.Handle.create(self._m2n.Config(max_cta=None))
        except Exception:
            self._comm.abort()
            raise

    def receive(self, root: int, rows: int, seconds: float) -> list[list[int]]:
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self._stream):
                table = torch.empty((rows, 2), dtype=torch.int8, device=self._device)
            self._comm.broadcast(table, root, seconds)
            return table.tolist()

    def reshard(self, shard: Tensor, source: Side, target: Side) -> None:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            layouts = self._layouts(source, target)
            self._m2n.reshard(shard, None, self._comm.pointer, self._stream, handle=self._handle, **layouts)

    def wait(self, seconds: float) -> None:
        self._comm.wait(seconds)

    def revoke(self) -> None:
        with contextlib.suppress(NCCLError):
            self._comm.revoke()

    def finalize(self) -> None:
        # A communicator that has failed has nothing under way.
        with contextlib.suppress(NCCLError):
            self._comm.settle(_SETTLE_SECONDS)
        # After an error nobody can help a handle that does not end.
        with contextlib.suppress(Exception), torch.cuda.device(self._device):
            self._handle.destroy()

    def abort(self) -> None:
        # A communicator that failed is unusable anyway.
        with contextlib.suppress(NCCLError):
            self._comm.abort()

    def _layouts(self, source: Side, target: Side) -> dict[str, Any]:
        """Return the arguments that describe both sides."""
        return {
            "src_mesh": self._m2n.Mesh(source.mesh, start_rank=source.first),
            "src_placements": self._placements(source),
            "dst_mesh": self._m2n.Mesh(target.mesh, start_rank=target.first),
            "dst_placements": self._placements(target),
        }

    def _placements(self, layout: Side) -> list[Any]:
        m2n = self._m2n
        return [m2n.Replicate() if each == REPLICATE else m2n.Shard(each) for each in layout.placements]
