"""What must be the same on all ranks: settings of the engine, and descriptions of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.utils import platform
from areal.utils.distributed import ControlPlane
from areal.utils.rank_gpus import check_separate

_OF_A_HOST = frozenset({"path", "offload_dir", "memory_limit_mb"})
"""Options that may differ between ranks: where a host has its files, and what it can spare."""


def check_ranks(control: ControlPlane, config: TrainEngineConfig, spec: FinetuneSpec, device: torch.device) -> None:
    """Check that the ranks have one configuration, and devices of their own. Collective.

    Args:
        control: control plane over all ranks.
        config, spec: of this rank.
        device: device of this rank.

    Raises:
        ValueError: a setting differs between ranks, or ranks share a device over which they cannot communicate.
    """
    settings = dict(_settings("TrainEngineConfig", config.model_dump(exclude=set(_OF_A_HOST), warnings=False)))
    settings |= _settings("FinetuneSpec", spec.model_dump())
    uuids, of_all = zip(*control.gather((platform.gpu_uuid(device), settings)), strict=True)
    check_equal(of_all, "start all ranks with the same settings; 'auto' may mean another value on another host")
    check_separate(uuids, platform.collective_backend())


def check_equal(of_all: Sequence[Mapping[str, Any]], way_out: str) -> None:
    """Raise if a value of some rank differs from that of the first.

    Args:
        of_all: values of all ranks by name.
        way_out: what to do.

    Raises:
        ValueError: names the value and both ranks.
    """
    first = of_all[0]
    for rank, other in enumerate(of_all):
        for name in [*first, *(name for name in other if name not in first)]:
            here, there = first.get(name, "missing"), other.get(name, "missing")
            if here != there:
                raise ValueError(f"{name} = {here!r} on rank 0, and {there!r} on rank {rank}: {way_out}")


def _settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of settings. Objects of other packages are left out: they may not be comparable."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _settings(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _settings(f"{name}[{index}]", inner)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
