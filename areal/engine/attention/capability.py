"""Choice of attention kernels by what a GPU supports: compute capability, dtype, head dim, soft caps and sinks."""

from __future__ import annotations

import functools
import inspect
import logging

import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from areal.utils.distributed import rank_in_world

logger = logging.getLogger(__name__)

VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
FLASH_HEAD_DIM = 256  # largest head dim of the variable-length kernels
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_2 = (8, 0)  # Ampere
_HOPPER = 9  # major compute capability of the GPUs that FlashAttention 3 has kernels for


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; ``None`` for other GPUs, whose numbers mean something else."""
    return None if torch.version.hip else torch.cuda.get_device_capability(device)


def runs_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a variable-length kernel supports these tensors. Logs once why a GPU's kernels do not."""
    if device.type == "meta":
        # In a plan, shapes and costs are those of a GPU, whose kernels for float32 have linear memory, too.
        return dtype in (*_FLASH_DTYPES, torch.float32) and head_dim <= FLASH_HEAD_DIM
    if device.type != "cuda":
        return False
    reason = _missing(device, dtype, head_dim)
    if reason is not None:
        _warn_once(reason)
    return reason is None


def runs_options(device: torch.device, *, softcap: bool, sinks: bool, flash_attn: bool, sink_kernel: bool) -> bool:
    """Return whether a variable-length kernel supports the options of a layer. Logs once why a GPU's kernels do not.

    Args:
        softcap, sinks: options of the layer.
        flash_attn: whether the package is installed. Only its kernel has soft caps.
        sink_kernel: whether torch's kernel returns what sinks need.
    """
    instead = "plain operations in blocks run instead, which are far slower"
    if softcap and sinks:
        reason = f"soft cap of the attention logits with attention sinks: no kernel has both; {instead}"
    elif softcap and not flash_attn:
        reason = f"soft cap of the attention logits without the package flash_attn: {instead}; pip install flash-attn"
    elif sinks and not sink_kernel:
        reason = f"attention sinks with torch {torch.__version__}: {instead}; install torch 2.13 or later"
    else:
        return True
    if device.type == "cuda":
        _warn_once(reason)
    return False


@functools.cache
def activate_flash_attention_3(device: torch.device) -> bool:
    """Let torch's attention call FlashAttention 3 if the GPU and the installed packages have it. Tried once per device.

    By torch's own switch, ``torch.nn.attention.activate_flash_attention_impl``, which holds for the whole process. An
    implementation that the caller activated before stays.
    """
    capability = compute_capability(device) if device.type == "cuda" else None
    if capability is None or capability[0] != _HOPPER:
        return False
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if current is not None:
        return bool(current == "FA3")
    try:
        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        _warn_once(
            f"FlashAttention 3 cannot be activated ({error}): install flash_attn_interface to speed up attention"
        )
        return False
    return True


@functools.cache
def _missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why no variable-length kernel of a GPU supports these tensors, or ``None``."""
    instead = "packed sequences of equal length run together in scaled_dot_product_attention instead"
    if dtype not in _FLASH_DTYPES:
        return f"dtype = {dtype}: flash attention needs float16 or bfloat16; {instead}"
    if head_dim > FLASH_HEAD_DIM:
        return f"head dim = {head_dim}: flash attention supports at most {FLASH_HEAD_DIM}; {instead}"
    capability = compute_capability(device)
    if capability is not None and capability < _FLASH_2:
        return f"compute capability {capability[0]}.{capability[1]}: flash attention needs at least 8.0; {instead}"
    return None


@functools.cache
def _warn_once(text: str) -> None:
    if rank_in_world() == 0:
        logger.warning("%s", text)
