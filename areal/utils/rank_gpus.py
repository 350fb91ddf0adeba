"""Placement: the GPU of each rank, and the backend that follows from it.

NCCL needs a separate GPU for each rank. Launchers differ in what a rank sees: all GPUs of its host and ``LOCAL_RANK`` (torchrun), one
GPU (Ray, ``srun --gpus-per-task``), or all GPUs without ``LOCAL_RANK``. The number of visible GPUs therefore does not determine whether ranks
share one. Ranks compare the UUIDs of their GPUs through the store of the rendezvous, before the default process group exists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from areal.utils import platform


@dataclass(frozen=True)
class VisibleGPUs:
    """GPUs that a rank can see.

    Attributes:
        uuids: tuple of str. UUIDs of the GPUs, by index.
        local_rank: index of the rank on its host, or ``None`` if the launcher does not set it.
    """

    uuids: tuple[str, ...]
    local_rank: int | None

    @classmethod
    def of_this_process(cls) -> VisibleGPUs:
        """Return the GPUs of this process."""
        return cls(platform.gpu_uuids(), platform.local_rank())


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank, and the backend of the default process group.

    Attributes:
        device: device of this rank.
        backend: backend of the default process group.
        shared: one tuple for each GPU that several ranks use: those ranks.
    """

    device: torch.device
    backend: str
    shared: tuple[tuple[int, ...], ...] = ()


def exchange(store: dist.Store, rank: int, size: int, visible: VisibleGPUs) -> list[VisibleGPUs]:
    """Return the GPUs that each rank sees, by rank. Collective over the processes of a store.

    Args:
        store: store of the rendezvous.
        rank, size: rank of this process, and number of ranks.
        visible: GPUs of this rank.
    """
    keys = [f"areal/visible_gpus/{number}" for number in range(size)]
    store.set(keys[rank], json.dumps(asdict(visible)))
    store.wait(keys)
    values = [json.loads(value) for value in store.multi_get(keys)]
    return [VisibleGPUs(tuple(value["uuids"]), value["local_rank"]) for value in values]


def place(ranks: Sequence[VisibleGPUs], rank: int) -> RankDevice:
    """Return the device of a rank. All ranks compute it from the same values.

    A rank with ``LOCAL_RANK`` uses the GPU of that index, modulo the number of visible ones. The others, in the order of ranks, use the
    first of the GPUs that the fewest ranks use. Ranks that share a GPU communicate over gloo, others over NCCL.

    Args:
        ranks: GPUs that each rank sees, by rank.
        rank: rank of this process.

    Raises:
        ValueError: only some ranks see a GPU, or ranks share a GPU while another one that they see is not used.
    """
    blind = [number for number, visible in enumerate(ranks) if not visible.uuids]
    if blind and len(blind) < len(ranks):
        raise ValueError(
            f"rank {_names(blind)} of {len(ranks)} sees no GPU, but the others do: check CUDA_VISIBLE_DEVICES and the driver there, or "
            "set CUDA_VISIBLE_DEVICES= on all ranks to compute on CPUs"
        )
    if blind:
        return RankDevice(torch.device("cpu"), platform.GLOO)
    indices = choose_gpus(ranks)
    # Ranks by GPU: several ranks with one UUID share it, however each of them numbers it.
    users: dict[str, list[int]] = {}
    for number, (visible, index) in enumerate(zip(ranks, indices, strict=True)):
        users.setdefault(visible.uuids[index], []).append(number)
    shared = tuple(tuple(numbers) for numbers in users.values() if len(numbers) > 1)
    for number in (number for numbers in shared for number in numbers):
        free = [index for index, uuid in enumerate(ranks[number].uuids) if uuid not in users]
        if free:
            others = next(numbers for numbers in shared if number in numbers)
            raise ValueError(
                f"ranks {_names(others)} use the same GPU because of LOCAL_RANK = {ranks[number].local_rank}, while no rank uses cuda:"
                f"{free[0]}: number the ranks of a host in LOCAL_RANK, leave LOCAL_RANK out, or set CUDA_VISIBLE_DEVICES for each rank"
            )
    return RankDevice(torch.device("cuda", indices[rank]), platform.GLOO if shared else platform.WORLD, shared)


def check_separate(uuids: Sequence[str | None], backend: str) -> None:
    """Check that a default process group of another program fits the devices of its ranks.

    Args:
        uuids: UUID of each rank's GPU, by rank; ``None`` for a CPU.
        backend: backend of the engine's process groups.

    Raises:
        ValueError: ranks share a GPU, and the backend is NCCL.
    """
    counts = Counter(uuid for uuid in uuids if uuid is not None)
    for uuid, count in counts.items():
        if count > 1 and backend == platform.NCCL:
            sharing = [rank for rank, other in enumerate(uuids) if other == uuid]
            raise ValueError(
                f"ranks {_names(sharing)} use the same GPU, which NCCL does not support: call torch.cuda.set_device on each rank or set "
                "LOCAL_RANK before the engine starts; to share the GPU, start the default process group with backend='gloo'"
            )


def choose_gpus(ranks: Sequence[VisibleGPUs]) -> list[int]:
    """Return the index of each rank's GPU among those that it sees."""
    indices = [
        None if visible.local_rank is None else visible.local_rank % len(visible.uuids)  # several ranks may share
        for visible in ranks
    ]
    users = Counter(visible.uuids[index] for visible, index in zip(ranks, indices, strict=True) if index is not None)
    chosen: list[int] = []
    for visible, index in zip(ranks, indices, strict=True):
        if index is None:
            index = min(range(len(visible.uuids)), key=lambda i: users[visible.uuids[i]])
            users[visible.uuids[index]] += 1
        chosen.append(index)
    return chosen


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
