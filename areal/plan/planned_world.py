"""A world of one process that stands for a rank of a large world: a fake process group, and the meta device as its accelerator."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from areal.utils import platform


@contextlib.contextmanager
def planned_world(rank: int, size: int) -> Iterator[None]:
    """Context in which this process is rank ``rank`` of a world of ``size`` ranks that do not exist.

    Tensors of engines are on the meta device. Collectives on them need :class:`~areal.plan.step_recorder.StepRecorder`.

    Raises:
        RuntimeError: the process is a rank of another world.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan needs a process without a default process group: make it in another process")
    if not hasattr(torch, "meta"):
        torch._register_device_module("meta", _device_module())
        dist.Backend.register_backend(platform.PLANNED, _make_group, extended_api=True, devices=["cpu", "meta"])
    # The end of an engine collects garbage, which takes longer than a step with all of the imported modules in it.
    gc.freeze()
    dist.init_process_group(platform.PLANNED, rank=rank, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.unfreeze()


def _make_group(common: Any, options: Any) -> Any:
    """Create a group of torch whose collectives return at once."""
    # Its annotations lack the options.
    create: Any = FakeProcessGroup._create_internal
    return create(common.group_rank, common.group_size, options)


class _Event:
    """Event of a stream that has no work."""

    def record(self, stream: Any = None) -> _Event:
        return self

    def wait(self, stream: Any = None) -> None:
        return None


class _Stream:
    """Stream without work."""

    def __init__(self, priority: int = 0) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


def _device_module() -> types.ModuleType:
    """Return what FSDP and device meshes expect of the module of an accelerator, such as ``torch.cuda``."""
    module: Any = types.ModuleType("torch.meta")
    module.Stream, module.Event = _Stream, _Event
    module.stream = lambda stream: contextlib.nullcontext()
    module.current_stream = lambda device=None: _Stream()
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.is_available = module.is_initialized = lambda: True
    return module
