"""Conversion of per-sequence values to per-token values, for every form of a batch.

The value of a sequence is assigned to its actions (``loss_mask != 0``), and 0 to other positions. It is not multiplied by the mask:
the loss applies weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.trainer.advantages.scan import check_cu_seqlens, find_actions


def to_tokens(x: Tensor, action_mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Assign the value of each sequence to its actions.

    Args:
        x: float ``[n]``. One value per sequence.
        action_mask: ``[T]`` packed or ``[n, S]`` padded, not 0 at actions.
        cu_seqlens: integers ``[n + 1]`` for packed data.

    Returns:
        Of the shape of ``action_mask`` and the dtype of ``x``; 0 at positions without an action.

    Raises:
        ValueError: shapes do not match.
    """
    actions = find_actions(action_mask, cu_seqlens)
    _check_count(x, actions.n_sequences)
    # index_copy on the flattened tensor: the result keeps a gradient of x.
    out = x.new_zeros(action_mask.shape)
    return out.view(-1).index_copy(0, actions.positions, x[actions.sequences]).view(out.shape)


def at_last_action(x: Tensor, action_mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Assign the value of each sequence to its last action, such as an outcome reward.

    The value of a sequence without actions is dropped.

    Args and Raises: as :func:`to_tokens`.

    Returns:
        Of the shape of ``action_mask`` and the dtype of ``x``; 0 elsewhere.
    """
    actions = find_actions(action_mask, cu_seqlens)
    _check_count(x, actions.n_sequences)
    # Only the last action of each sequence is written; all others stay 0.
    last = actions.is_last()
    out = x.new_zeros(action_mask.shape)
    return out.view(-1).index_copy(0, actions.positions[last], x[actions.sequences[last]]).view(out.shape)


def to_samples(x: Tensor, loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """:func:`to_tokens` for a list batch: ``n`` tensors ``[S_i]``, aligned with the samples' ``loss_mask``.

    Args:
        x: float ``[n]``.
        loss_masks: ``n`` tensors ``[S_i]``.

    Raises:
        ValueError: the numbers of masks and values differ.
    """
    _check_count(x, len(loss_masks))
    return [
        torch.where(mask != 0, value.to(mask.device), value.new_zeros((), device=mask.device))
        for value, mask in zip(x, loss_masks, strict=True)
    ]


def join(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate the per-token tensors ``[S_i]`` of a list batch. Returns ``[T]`` and ``cu_seqlens``, int64 ``[n + 1]``.

    A rank without sequences gets ``[0]`` numbers, with which it takes part in a collective function.

    Raises:
        ValueError: a tensor is not one-dimensional.
    """
    if any(row.dim() != 1 for row in rows):
        raise ValueError(f"join got shapes {[list(row.shape) for row in rows][:8]}: pass tensors [S_i]")
    if not rows:
        return torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    # Offsets are the cumulative lengths, with a leading 0.
    lengths = torch.tensor([0, *(len(row) for row in rows)], device=rows[0].device)
    return torch.cat(list(rows)), lengths.cumsum(0)


def split(x: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Invert :func:`join`: return ``n`` tensors ``[S_i]``, views of ``x`` ``[T]``.

    Raises:
        ValueError: shapes do not match.
    """
    check_cu_seqlens(x, cu_seqlens)
    return list(x.split(cu_seqlens.diff().tolist()))


def _check_count(x: Tensor, n: int) -> None:
    """Raise a ``ValueError`` unless ``x`` is ``[n]``."""
    if x.shape != (n,):
        raise ValueError(f"got numbers of shape {list(x.shape)} for {n} sequences: give one for each, [{n}]")
