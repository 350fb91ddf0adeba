"""The only place that knows a GPU from a CPU."""

from __future__ import annotations

import os
from typing import Literal

import torch


def accelerator() -> str:
    """``"cuda"`` where there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """The device of this process: the GPU of its local rank (several processes may share one), or the CPU."""
    if accelerator() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def collective_backend() -> str:
    """Backend of the default process group: gloo, and NCCL for tensors on GPUs where each local rank has one of its own."""
    if accelerator() == "cpu":
        return "gloo"
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if shared else "cpu:gloo,cuda:nccl"


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """The dtype in which this machine multiplies matrices fastest: bfloat16 on GPUs and on processors that have instructions for it, and
    float32 elsewhere, where bfloat16 is several times slower.
    """
    if accelerator() != "cpu":
        return "bfloat16"
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if any(known.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "float32"


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one, where devices have an index."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty_cache(device: torch.device) -> None:
    """Return freed memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
