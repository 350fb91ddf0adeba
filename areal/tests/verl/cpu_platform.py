"""verl on a CPU, which it has no platform for. Processes load this module by ``VERL_USE_EXTERNAL_MODULES``, with ``VERL_PLATFORM=cpu``."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


DEVICE = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    | dict.fromkeys(
        (
            "max_memory_allocated",
            "max_memory_reserved",
            "memory_allocated",
            "memory_reserved",
            "set_device",
            "empty_cache",
            "reset_peak_memory_stats",
            "manual_seed",
            "manual_seed_all",
            "ipc_collect",
        ),
        _nothing,
    ),
    get_device_name=lambda *_: "CPU",
    mem_get_info=lambda *_: (0, 0),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """A machine without an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing


def _with_one_backend(init: Any) -> Any:
    """Return ``init_process_group`` for a backend that verl names twice, ``"cpu:gloo,cpu:gloo"``."""

    @functools.wraps(init)
    def wrapped(backend: str | None = None, **kwargs: Any) -> Any:
        return init("gloo" if backend and "cpu:gloo" in backend else backend, **kwargs)

    return wrapped


dist.init_process_group = _with_one_backend(dist.init_process_group)


def _with_attention_of_a_cpu(load: Any) -> Any:
    """Return ``from_pretrained`` without FlashAttention, which verl asks for in its critics."""

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "attn_implementation": "sdpa"})

    return wrapped


AutoModelForTokenClassification.from_pretrained = _with_attention_of_a_cpu(
    AutoModelForTokenClassification.from_pretrained
)
