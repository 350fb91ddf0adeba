"""Which numbers are compared with each other, and their exact mean and spread, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""The sum of a tensor over data-parallel ranks, the same bits on each; ``engine.global_sum`` is one. Collective."""

_NO_SPREAD = 1e-12
"""A standard deviation below this share of the mean is rounding of a sum: rewards in float32 differ by 1e-7 or not at all."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and spread of each group, over all ranks.

    Attributes:
        count, mean: float64 ``[n_groups]``; the mean of an empty group is 0.
        squares: float64 ``[n_groups]``, squared deviations from the mean, summed. Exactly 0 for numbers that are all equal.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def std(self, ddof: int = 1) -> Tensor:
        """``sqrt(squares / (count - ddof))``; 0 for a group of no more than ``ddof``.

        Args:
            ddof: 1 for the estimate from a sample (what ``torch.std`` gives), 0 for the spread of the numbers themselves.
        """
        check_ddof(ddof)
        return torch.where(self.count > ddof, self.squares / (self.count - ddof).clamp(min=1), 0).sqrt()


@dataclass(frozen=True)
class Groups:
    """A partition of this rank's sequences (or tokens) into groups, which may go on on other ranks.

    Made by :meth:`local`, :meth:`over_ranks` or :meth:`whole_batch`. Order and sizes are free: what has the same id is a
    group.

    Attributes:
        ids: int64 ``[m]``, from 0 to ``n_groups - 1``.
        n_groups: how many ids there are, those without members here included.
        sum_over_ranks: adds up what ranks have; ``None`` where groups are this rank's own.
    """

    ids: Tensor
    n_groups: int
    sum_over_ranks: SumOverRanks | None = None

    @classmethod
    def local(cls, group_ids: Tensor) -> Groups:
        """Groups that lie wholly on this rank: any int64 keys ``[n]``. No collective.

        The same key on two ranks is two groups. Where a prompt's responses may be apart, use :meth:`over_ranks`.

        Raises:
            ValueError: ``group_ids`` are not integers ``[n]``.
        """
        _check_ids(group_ids)
        keys, ids = torch.unique(group_ids, return_inverse=True)
        return cls(ids, len(keys))

    @classmethod
    def over_ranks(cls, group_ids: Tensor, n_groups: int, sum_over_ranks: SumOverRanks) -> Groups:
        """Groups whose members may lie on several data-parallel ranks, exactly as if they lay on one.

        All ranks use these groups together, a rank without members as well: each use is one or two collectives over
        tables of ``n_groups`` numbers.

        Args:
            group_ids: int64 ``[n]``, from 0 to ``n_groups - 1``, of one meaning on all ranks, such as the index of the
                prompt in the global batch.
            n_groups: the same on all ranks.
            sum_over_ranks: ``engine.global_sum``.

        Raises:
            ValueError: ``group_ids`` are not integers ``[n]`` or out of range; on this rank alone.
        """
        _check_ids(group_ids)
        if len(group_ids) and not 0 <= int(group_ids.min()) <= int(group_ids.max()) < n_groups:
            raise ValueError(
                f"group_ids go from {int(group_ids.min())} to {int(group_ids.max())} with n_groups = {n_groups}: number the "
                "groups of the global batch from 0 to n_groups - 1"
            )
        return cls(group_ids.long(), n_groups, sum_over_ranks)

    @classmethod
    def whole_batch(cls, x: Tensor, sum_over_ranks: SumOverRanks | None = None) -> Groups:
        """One group of everything in ``x`` (of any shape), on all ranks if there is a ``sum_over_ranks``."""
        return cls(torch.zeros(x.numel(), dtype=torch.int64, device=x.device), 1, sum_over_ranks)

    def of_tokens(self, cu_seqlens: Tensor) -> Groups:
        """The same groups over the tokens ``[T]`` of the sequences that ``cu_seqlens`` ``[n + 1]`` cuts."""
        lengths = cu_seqlens.diff().to(self.ids.device)
        if len(lengths) != len(self.ids):
            raise ValueError(
                f"cu_seqlens has {len(lengths)} sequences and the groups have {len(self.ids)}: pass one for each"
            )
        return Groups(self.ids.repeat_interleave(lengths), self.n_groups, self.sum_over_ranks)

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each group, over all ranks: float64 ``[n_groups, k]`` of ``x`` ``[m, k]``. One collective."""
        local = torch.zeros(self.n_groups, x.shape[1], dtype=torch.float64, device=x.device)
        local.index_add_(0, self.ids, x.double())
        return local if self.sum_over_ranks is None else self.sum_over_ranks(local)

    def moments(self, x: Tensor, mask: Tensor | None = None) -> Moments:
        """Mean and spread of each group, in float64 and two passes, so that a large mean takes nothing from the spread.

        The second pass corrects for the rounding of the first one's mean (Chan, Golub and LeVeque 1983). Two collectives.

        Args:
            x: ``[m]``, or of any shape that has ``m`` entries.
            mask: of the shape of ``x``; where it is 0, ``x`` is left out, whatever it is. Each other entry counts once.

        Raises:
            ValueError: shapes do not agree; or a number that counts is not finite, on every rank.
        """
        x, kept = self._checked(x, mask)
        count, total = self.sums(torch.stack([kept.double(), x], 1)).unbind(1)
        _check_finite(total)
        present = count.clamp(min=1)
        mean = total / present
        deviation = (x - mean[self.ids]).masked_fill(~kept, 0)
        rest, squares = self.sums(torch.stack([deviation, deviation.square()], 1)).unbind(1)
        mean = mean + rest / present
        squares = (squares - rest.square() / present).clamp(min=0)
        equal = squares <= count * (_NO_SPREAD * mean).square()
        return Moments(count, mean, squares.masked_fill(equal, 0))

    def deviations(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Moments]:
        """Each entry less the mean of its group, float64 of the shape of ``x``, and the moments.

        Exactly 0 where all numbers of a group are equal, and where ``mask`` is 0. Collective and errors as
        :meth:`moments`.
        """
        moments = self.moments(x, mask)
        flat, kept = self._checked(x, mask)
        nothing = ~kept | (moments.squares == 0)[self.ids]
        return (flat - moments.mean[self.ids]).masked_fill(nothing, 0).view(x.shape), moments

    def pick(self, table: Tensor, like: Tensor) -> Tensor:
        """The entry of a table ``[n_groups]`` that each of the ``m`` belongs to, in the shape of ``like``."""
        return table[self.ids].view(like.shape)

    def _checked(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.numel() != len(self.ids) or (mask is not None and mask.shape != x.shape):
            raise ValueError(
                f"got numbers of shape {list(x.shape)} and a mask of {None if mask is None else list(mask.shape)} for groups of "
                f"{len(self.ids)}: give one number, and one mask entry, for each"
            )
        kept = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
        return x.detach().double().masked_fill(~kept, 0).reshape(-1), kept.reshape(-1)


def result_dtype(x: Tensor) -> torch.dtype:
    """Of what is made of ``x``: its own, but no narrower than float32."""
    return torch.promote_types(x.dtype, torch.float32)


def check_ddof(ddof: int) -> None:
    """Raise a ValueError for a ``ddof`` other than 0 and 1."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof = {ddof}: 1 for the estimate from a sample, 0 for the spread of the numbers themselves")


def _check_ids(group_ids: Tensor) -> None:
    if group_ids.dim() != 1 or group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(
            f"group_ids are {group_ids.dtype} {list(group_ids.shape)}: give one integer for each sequence, int64 [n]"
        )


def _check_finite(total: Tensor) -> None:
    # After the collective, so that all ranks raise, and none is left waiting.
    wrong = (~total.isfinite()).nonzero()
    if len(wrong):
        raise ValueError(
            f"group {int(wrong[0])} has numbers that are not finite (their sum over all ranks is {total[wrong[0]].item()}): leave "
            "such sequences out, or give them a reward"
        )
