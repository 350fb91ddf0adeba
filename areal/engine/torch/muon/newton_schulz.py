"""Orthogonalisation of matrices by a Newton-Schulz iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from areal.api.config import torch_dtype
from areal.api.sections.optimizer import MuonConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
"""A matrix is divided by its norm, or by this."""


def orthogonalised(x: Tensor, config: MuonConfig) -> Tensor:
    """Return matrices whose singular vectors are those of ``x``, and whose singular values are about 1.

    Five or so steps of ``X = a X + (b A + c A^2) X`` with ``A = X X^T`` (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), in
    ``config.dtype``. Singular values end between 0.7 and 1.2.

    Args:
        x: ``[..., rows, columns]``.
        config: dtype and number of steps.

    Returns:
        In the dtype of ``x``.
    """
    a, b, c = COEFFICIENTS
    y = x.to(torch_dtype(config.dtype))
    # Products of the smaller side.
    tall = x.shape[-2] > x.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(config.steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def update_scale(shape: Sequence[int], config: MuonConfig) -> float:
    """Return the factor of the updates of matrices in the shape ``[..., rows, columns]``.

    ``"match_rms_adamw"`` gives updates the size of those of AdamW, so that its learning rate and weight decay can stay (Liu et al., 2025,
    arXiv:2502.16982): ``0.2 sqrt(max(rows, columns))``. ``"original"`` (Jordan et al., 2024): ``sqrt(max(1, rows / columns))``.
    """
    rows, columns = shape[-2:]
    if config.scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
