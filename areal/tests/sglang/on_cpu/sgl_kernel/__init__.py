"""Stub of SGLang's compiled kernels, whose wheel needs CUDA: the only one that a text model in float32 calls on a CPU.

Everything else that runs is SGLang's own code, with attention and matrix products by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

_WORD = 0xFFFFFFFF


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function for the name of any other kernel, since modules import what only other models call."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this module is a stub, and has the kernels of text models in float32 only"
        )

    return missing


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Add a 32-bit word to the state of MurmurHash3."""
    word = (word * 0xCC9E2D51) & _WORD
    word = ((word << 15) | (word >> 17)) & _WORD
    state = state ^ ((word * 0x1B873593) & _WORD)
    state = ((state << 13) | (state >> 19)) & _WORD
    return (state * 5 + 0xE6546B64) & _WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the hash of seed, position and column, as the kernel of the GPU computes it (``kernels/ops/sampling/murmur_hash.py``).

    Args:
        seed: ``[B]`` uint64.
        positions: ``[B]`` integers.
        columns: ``[V]`` integers.

    Returns:
        ``[B, V]`` uint32.
    """
    seed, positions, columns = (each.to(torch.int64) for each in (seed, positions, columns))
    rows = _mix(torch.zeros_like(seed), seed & _WORD)
    rows = _mix(_mix(rows, (seed >> 32) & _WORD), positions & _WORD)
    state = _mix(rows[:, None], columns[None, :] & _WORD) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
