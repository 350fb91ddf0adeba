"""From numbers about sequences to numbers about tokens, in every form of a batch.

A number for each sequence goes to the positions where the policy acted (``loss_mask != 0``), and 0 to the others. It is
not multiplied by the mask: what a token weighs is for the loss to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.trainer.advantages.scan import check_cu_seqlens, find_actions


def to_tokens(x: Tensor, action_mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Give each action the number of its sequence.

    Args:
        x: floating ``[n]``, one for each sequence.
        action_mask: ``[T]`` packed or ``[n, S]`` padded, not 0 at actions.
        cu_seqlens: integers ``[n + 1]`` for packed data.

    Returns:
        Of the shape of ``action_mask`` and the dtype of ``x``; 0 where there is no action.

    Raises:
        ValueError: shapes do not agree.
    """
    actions = find_actions(action_mask, cu_seqlens)
    _check_count(x, actions.n_sequences)
    out = x.new_zeros(action_mask.shape)
    return out.view(-1).index_copy(0, actions.positions, x[actions.sequences]).view(out.shape)


def at_last_action(x: Tensor, action_mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Give the last action of each sequence the sequence's number: an outcome's reward, token by token.

    A sequence without actions has nowhere to put it.

    Args and Raises: as :func:`to_tokens`.

    Returns:
        Of the shape of ``action_mask`` and the dtype of ``x``; 0 elsewhere.
    """
    actions = find_actions(action_mask, cu_seqlens)
    _check_count(x, actions.n_sequences)
    last = actions.is_last()
    out = x.new_zeros(action_mask.shape)
    return out.view(-1).index_copy(0, actions.positions[last], x[actions.sequences[last]]).view(out.shape)


def to_samples(x: Tensor, loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """:func:`to_tokens` for a list batch: ``n`` tensors ``[S_i]`` that align with the samples' ``loss_mask``.

    Args:
        x: floating ``[n]``.
        loss_masks: ``n`` tensors ``[S_i]``.

    Raises:
        ValueError: there are not as many masks as numbers.
    """
    _check_count(x, len(loss_masks))
    return [
        torch.where(mask != 0, value.to(mask.device), value.new_zeros((), device=mask.device))
        for value, mask in zip(x, loss_masks, strict=True)
    ]


def join(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Lay the per-token tensors ``[S_i]`` of a list batch end to end: ``[T]`` and ``cu_seqlens``, int64 ``[n + 1]``.

    Raises:
        ValueError: there are none, or one is not ``[S_i]``.
    """
    if not rows or any(row.dim() != 1 for row in rows):
        raise ValueError(
            f"join got shapes {[list(row.shape) for row in rows][:8]}: pass at least one tensor, each [S_i]"
        )
    lengths = torch.tensor([0, *(len(row) for row in rows)], device=rows[0].device)
    return torch.cat(list(rows)), lengths.cumsum(0)


def split(x: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Undo :func:`join`: ``n`` tensors ``[S_i]`` (views) of ``x`` ``[T]``.

    Raises:
        ValueError: shapes do not agree.
    """
    check_cu_seqlens(x, cu_seqlens)
    return list(x.split(cu_seqlens.diff().tolist()))


def _check_count(x: Tensor, n: int) -> None:
    if x.shape != (n,):
        raise ValueError(f"got numbers of shape {list(x.shape)} for {n} sequences: give one for each, [{n}]")
