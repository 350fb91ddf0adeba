"""Checksums of tensors, to detect ranks that have different data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1 << 17
"""Number of words that are mixed at once. Bounds the temporary memory for a large tensor."""

# Odd 64-bit constants without a pattern (fractions of the golden ratio and of pi), as signed integers.
_GOLDEN = -7046029254386353131
_PI = 2611923443488327891


def checksum(tensors: Sequence[tuple[str, Tensor]], extra: object = "") -> int:
    """Return a 63-bit checksum of names, dtypes, shapes, bits and order of tensors, and of ``repr(extra)``.

    Two different inputs have the same checksum with a probability of about ``2**-40`` or less. Not a protection against an
    adversary.
    """
    # On the device of each tensor: a weighted sum of its words, with a weight for each position.
    flat = [(name, _words(x)) for name, x in tensors]
    longest = max((min(len(words), _CHUNK) for _, words in flat), default=0)
    weights: dict[torch.device, Tensor] = {}
    sums: list[Tensor] = []
    for _, words in flat:
        if words.device not in weights:
            weights[words.device] = _weights(longest, words.device)
        sums.append(_weighted_sum(words, weights[words.device]))
    # Read all sums at once, and hash them on the host together with the descriptions of the tensors.
    values = torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []
    heads = [(name, str(x.dtype), tuple(x.shape)) for name, x in tensors]
    digest = hashlib.blake2b(repr((heads, values, extra)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _words(x: Tensor) -> Tensor:
    """Return the bits of a tensor as int64 words, padded with zeros. Does not copy a tensor of aligned, complete words."""
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(raw) % 8 or raw.storage_offset() % 8:
        raw = F.pad(raw, (0, -len(raw) % 8))
    return raw.view(torch.int64)


def _weights(n: int, device: torch.device) -> Tensor:
    """Return ``n`` pseudo-random odd weights, int64."""
    w = torch.arange(1, n + 1, device=device) * _GOLDEN
    w ^= w >> 29
    w *= _PI
    # An odd weight is invertible modulo 2**64: no change of a single word goes unnoticed.
    return (w ^ (w >> 32)) | 1


def _weighted_sum(words: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of words, modulo ``2**64``, chunk by chunk."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        # Floats with short mantissas differ only in the high bits of a word, which a product never moves to the low bits.
        mixed = chunk >> 32
        mixed ^= chunk
        mixed *= weights[: len(mixed)]
        total = total * _PI + mixed.sum()
    return total
