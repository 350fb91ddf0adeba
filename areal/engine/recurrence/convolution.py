"""Short causal convolutions over packed sequences."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from areal.engine.recurrence.chunks import RunChunks, with_context


def causal_convolution(
    chunks: RunChunks, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve each channel of a stream with its own kernel, which begins anew with each sequence.

    Args:
        chunks: runs of the stream.
        x: ``[1, channels, T]``.
        weight: ``[channels, K]``; the last entry is the factor of the token itself.
        bias: ``[channels]``.
        activation: name of a function of transformers that is applied to the result.

    Returns:
        ``[1, channels, T]``, in the dtype of ``x``.

    Raises:
        ValueError: the kernel sees more tokens than the layout was made for.
    """
    taps = weight.shape[-1]
    if taps > chunks.sizes.context + 1:
        raise ValueError(f"a convolution over {taps} tokens, where the layout holds {chunks.sizes.context + 1}")
    out = F.conv1d(with_context(x.to(weight.dtype), chunks), weight.unsqueeze(1), bias, groups=len(weight))
    # The result is shorter by the tokens that the kernel sees before the first one.
    out = out.index_select(-1, chunks.after_context - (taps - 1))
    return (ACT2FN[activation](out) if activation else out).to(x.dtype)
