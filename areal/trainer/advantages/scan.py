"""Actions of sequences of different lengths, and discounted sums over them without a loop over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Actions(NamedTuple):
    """Positions at which the policy acted: those whose mask is not 0, in order.

    Attributes:
        positions: int64 ``[A]``. Indices into ``[T]``, or into the flattened ``[B, S]``.
        sequences: int64 ``[A]``. Index of each action's sequence, ascending.
        n_sequences: number of sequences, including those without actions.
    """

    positions: Tensor
    sequences: Tensor
    n_sequences: int

    def take(self, x: Tensor) -> Tensor:
        """Return ``x`` (``[T]`` or ``[B, S]``) at the actions, as float64 ``[A]``."""
        return x.reshape(-1)[self.positions].double()

    def is_last(self) -> Tensor:
        """Return bool ``[A]``: True for the last action of each sequence."""
        # True where the next action is in another sequence, or where there is none.
        last = torch.ones_like(self.sequences, dtype=torch.bool)
        last[:-1] = self.sequences[:-1] != self.sequences[1:]
        return last

    def put(self, x: Tensor, like: Tensor) -> Tensor:
        """Invert :meth:`take`: return zeros of the shape of ``like`` with ``x`` ``[A]`` at the actions.

        The dtype is that of ``like``, but at least float32.
        """
        out = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        out.view(-1)[self.positions] = x.to(out.dtype)
        return out


def find_actions(action_mask: Tensor, cu_seqlens: Tensor | None) -> Actions:
    """Return the actions of packed or padded sequences.

    Args:
        action_mask: ``[T]``, or ``[B, S]`` with 0 at padding; not 0 at actions, such as a loss mask.
        cu_seqlens: integers ``[n + 1]``. Offsets of the sequences in ``T``; ``None`` for padded data.

    Raises:
        ValueError: shapes do not match; see :func:`check_cu_seqlens`.
    """
    flat = (action_mask != 0).reshape(-1)
    positions = flat.nonzero().squeeze(1)
    # Padded: the sequence is the row.
    if cu_seqlens is None:
        if action_mask.dim() != 2:
            raise ValueError(
                f"action_mask is {list(action_mask.shape)} and there is no cu_seqlens: padded data are [B, S]; pass "
                "cu_seqlens with packed ones"
            )
        return Actions(positions, positions // max(1, action_mask.shape[1]), len(action_mask))
    check_cu_seqlens(action_mask, cu_seqlens)
    # Packed: the sequence is the first one that ends after the position.
    ends = cu_seqlens[1:].to(device=positions.device, dtype=torch.int64)
    return Actions(positions, torch.searchsorted(ends, positions, right=True), len(ends))


def check_cu_seqlens(x: Tensor, cu_seqlens: Tensor) -> None:
    """Raise unless ``x`` is ``[T]`` and ``cu_seqlens`` rises from 0 to ``T``. One host read.

    Raises:
        ValueError: shape or offsets are wrong.
    """
    bounds = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if x.dim() != 1 or not bounds or bounds[0] != 0 or bounds[-1] != len(x) or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens {bounds[:8]} does not cut a tensor of {list(x.shape)} into sequences: it rises from 0 to T, the "
            "length of packed data [T]; leave it out for padded data [B, S]"
        )


def discounted_sums(x: Tensor, sequences: Tensor, discount: float) -> Tensor:
    """Return ``y_k = sum_i discount^i x_{k+i}`` over entry ``k`` and those after it in its sequence.

    A parallel scan by doubling (Hillis and Steele 1986): after ``j`` rounds ``y_k`` covers ``2^j`` terms. The number of rounds is ``log2``
    of the longest sequence. Terms are added in a balanced tree with factors of at most 1, so rounding errors grow with the logarithm of
    the length, for any discount.

    Args:
        x: float ``[A]``.
        sequences: integers ``[A]``, equal within a sequence, whose entries are contiguous.
        discount: from 0 to 1.

    Returns:
        ``[A]``, of the dtype of ``x``.
    """
    if not len(x):
        return x.clone()
    # One host read, which fixes the number of rounds.
    longest = int(torch.unique_consecutive(sequences, return_counts=True)[1].max())
    reach, weight = 1, discount
    while reach < longest and weight != 0.0:
        # Add the partial sum that begins where this one ends, if that is in the same sequence. Filled instead of multiplied by a mask:
        # an infinite value in one sequence must not make its neighbours NaN.
        same = sequences[:-reach] == sequences[reach:]
        x = torch.cat([x[:-reach] + weight * x[reach:].masked_fill(~same, 0), x[-reach:]])
        reach, weight = 2 * reach, weight * weight
    return x


def check_discount(name: str, value: float) -> None:
    """Raise a ``ValueError`` unless a discount is from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} = {value}: a discount is from 0 to 1")


def check_rewards(rewards: Tensor, action_mask: Tensor) -> None:
    """Raise a ``ValueError`` if a position without an action has a reward, which would be lost. One host read."""
    if rewards.shape != action_mask.shape:
        raise ValueError(
            f"rewards are {list(rewards.shape)} and action_mask is {list(action_mask.shape)}: give both one shape, [T] or [B, S]"
        )
    # Name the first position, which is enough to find the mistake.
    stray = ((rewards != 0) & (action_mask == 0)).nonzero()
    if len(stray):
        where = stray[0].tolist()
        raise ValueError(
            f"rewards{where} = {rewards[tuple(where)].item()}, where action_mask is 0: put a reward at the action that "
            "earned it; at_last_action places one for each sequence"
        )
