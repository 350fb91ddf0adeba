"""Groups of sequences that are compared with each other, with exact means and deviations over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over data-parallel ranks, bitwise equal on all; ``engine.global_sum`` is one. Collective."""

_NO_SPREAD = 1e-12
"""A standard deviation below this fraction of the mean is rounding of a sum: float32 rewards differ by 1e-7 or not at all."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each group, over all ranks.

    With episodes, an entry has the weight ``1 / number of entries of its episode`` in sum, mean and squares.

    Attributes:
        count: float64 ``[n_groups]``. Number of entries, or of episodes.
        mean: float64 ``[n_groups]``; 0 for an empty group.
        squares: float64 ``[n_groups]``. Sum of squared deviations from the mean; exactly 0 if all values are equal.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def std(self, ddof: int = 1) -> Tensor:
        """Return ``sqrt(squares / (count - ddof))`` ``[n_groups]``; 0 for groups of at most ``ddof`` members.

        Args:
            ddof: 1 for the sample estimate (as ``torch.std``), 0 for the population.
        """
        check_ddof(ddof)
        return torch.where(self.count > ddof, self.squares / (self.count - ddof).clamp(min=1), 0).sqrt()


@dataclass(frozen=True)
class Groups:
    """Partition of this rank's sequences (or tokens) into groups, which may have members on other ranks.

    Created by :meth:`local`, :meth:`over_ranks` or :meth:`whole_batch`. Entries with the same id are a group, in any order and of any size.

    Attributes:
        ids: int64 ``[m]``, from 0 to ``n_groups - 1``.
        n_groups: number of ids, including groups without members on this rank.
        sum_over_ranks: sum over data-parallel ranks; ``None`` if every group is on one rank.
        episodes: int64 ``[m]``, from 0. Entries with the same number are one member of their group, however many they are. ``None`` if every
            entry is one member.
    """

    ids: Tensor
    n_groups: int
    sum_over_ranks: SumOverRanks | None = None
    episodes: Tensor | None = None

    @classmethod
    def local(cls, group_ids: Tensor, episode_ids: Tensor | None = None) -> Groups:
        """Return groups whose members are all on this rank. Not collective.

        The same key on two ranks means two groups. If the responses to a prompt may be on several ranks, use :meth:`over_ranks`.

        Args:
            group_ids: int64 ``[n]``. Any keys.
            episode_ids: int64 ``[n]``. Any keys; sequences of a group with the same key are from one episode, and count as one member.

        Raises:
            ValueError: the ids are not integers ``[n]``.
        """
        _check_ids(group_ids)
        # Keys may be any integers; ids count them from 0.
        keys, ids = torch.unique(group_ids, return_inverse=True)
        return cls(ids, len(keys), episodes=_number_episodes(group_ids, episode_ids))

    @classmethod
    def over_ranks(
        cls, group_ids: Tensor, n_groups: int, sum_over_ranks: SumOverRanks, episode_ids: Tensor | None = None
    ) -> Groups:
        """Return groups whose members may be on several data-parallel ranks, with the results of a single rank.

        All ranks use these groups together, including ranks without members. Each use is one or two collectives of ``n_groups``
        numbers.

        Args:
            group_ids: int64 ``[n]``, from 0 to ``n_groups - 1``, with the same meaning on all ranks, such as the index of the prompt in
                the global batch.
            n_groups: number of groups, equal on all ranks.
            sum_over_ranks: ``engine.global_sum``.
            episode_ids: as in :meth:`local`. All sequences of an episode are on one rank.

        Raises:
            ValueError: the ids are not integers ``[n]`` or out of range. Raised on this rank only.
        """
        _check_ids(group_ids)
        if len(group_ids) and not 0 <= int(group_ids.min()) <= int(group_ids.max()) < n_groups:
            raise ValueError(
                f"group_ids go from {int(group_ids.min())} to {int(group_ids.max())} with n_groups = {n_groups}: number the "
                "groups of the global batch from 0 to n_groups - 1"
            )
        return cls(group_ids.long(), n_groups, sum_over_ranks, _number_episodes(group_ids, episode_ids))

    @classmethod
    def whole_batch(cls, x: Tensor, sum_over_ranks: SumOverRanks | None = None) -> Groups:
        """Return one group of all entries of ``x`` (of any shape), over all ranks if ``sum_over_ranks`` is given."""
        return cls(torch.zeros(x.numel(), dtype=torch.int64, device=x.device), 1, sum_over_ranks)

    def of_tokens(self, cu_seqlens: Tensor) -> Groups:
        """Return the same groups over tokens ``[T]``, for sequences with offsets ``cu_seqlens`` ``[n + 1]``. Each token is a member."""
        lengths = cu_seqlens.diff().to(self.ids.device)
        if len(lengths) != len(self.ids):
            raise ValueError(
                f"cu_seqlens has {len(lengths)} sequences and the groups have {len(self.ids)}: pass one for each"
            )
        return Groups(self.ids.repeat_interleave(lengths), self.n_groups, self.sum_over_ranks)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum of each group over all ranks: from ``[m, k]`` to float64 ``[n_groups, k]``. One collective."""
        # float64, and the same table on all ranks: groups without members here stay 0.
        local = torch.zeros(self.n_groups, x.shape[1], dtype=torch.float64, device=x.device)
        local.index_add_(0, self.ids, x.double())
        return local if self.sum_over_ranks is None else self.sum_over_ranks(local)

    def moments(self, x: Tensor, mask: Tensor | None = None) -> Moments:
        """Return mean and squared deviations of each group. Two collectives.

        Computed in float64 and two passes, so that a large mean does not reduce the accuracy of the deviations. The second pass corrects
        the rounding of the first pass's mean (Chan, Golub and LeVeque 1983).

        Args:
            x: ``[m]``, or any shape with ``m`` entries.
            mask: of the shape of ``x``. Entries with 0 are excluded and may be NaN; all others count once, and with
                episodes for their part of an episode.

        Raises:
            ValueError: shapes do not match, or an entry that counts is not finite (raised on all ranks).
        """
        # First pass: counts and means. The weights of an episode add up to 1 but for rounding.
        x, kept = self._flat_values(x, mask)
        weights = self._weights(kept)
        count, total = self.sums(torch.stack([weights, weights * x], 1)).unbind(1)
        count = count.round()
        _check_finite(total)
        present = count.clamp(min=1)
        mean = total / present
        # Second pass: deviations from that mean, whose own sum (0 up to rounding) corrects it.
        deviation = (x - mean[self.ids]).masked_fill(~kept, 0)
        residual, squares = self.sums(torch.stack([weights * deviation, weights * deviation.square()], 1)).unbind(1)
        mean = mean + residual / present
        squares = (squares - residual.square() / present).clamp(min=0)
        # Equal values must have deviation 0, not the rounding of their mean, which grpo would divide by.
        equal = squares <= count * (_NO_SPREAD * mean).square()
        return Moments(count, mean, squares.masked_fill(equal, 0))

    def deviations(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Moments]:
        """Return each entry minus the mean of its group, float64 of the shape of ``x``, and the moments.

        Deviations are exactly 0 in groups whose values are all equal or that have one member, and where ``mask`` is 0. Collectives and
        errors as for :meth:`moments`.
        """
        moments = self.moments(x, mask)
        flat, kept = self._flat_values(x, mask)
        zero = ~kept | ((moments.squares == 0) | (moments.count <= 1))[self.ids]
        return (flat - moments.mean[self.ids]).masked_fill(zero, 0).view(x.shape), moments

    def episode_means(self, x: Tensor) -> Tensor:
        """Return for each entry of ``x`` ``[m]`` the mean over the entries of its episode; ``x`` without episodes. Not collective."""
        if self.episodes is None:
            return x
        weights = self._weights(torch.ones_like(x, dtype=torch.bool))
        means = x.new_zeros(len(x)).index_add_(0, self.episodes, (weights * x).to(x.dtype))
        return means[self.episodes]

    def _weights(self, kept: Tensor) -> Tensor:
        """Return the weight of each entry in its group, float64 ``[m]``: 1, or one over the kept entries of its episode; 0 if not kept."""
        weights = kept.double()
        if self.episodes is None:
            return weights
        entries = torch.zeros_like(weights).index_add_(0, self.episodes, weights)
        return weights / entries.clamp(min=1)[self.episodes]

    def pick(self, table: Tensor, like: Tensor) -> Tensor:
        """Return the value of each entry's group, from ``table`` ``[n_groups]``, in the shape of ``like``."""
        return table[self.ids].view(like.shape)

    def _flat_values(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x`` as float64 ``[m]`` with 0 at excluded entries, and bool ``[m]`` of the entries that count."""
        if x.numel() != len(self.ids) or (mask is not None and mask.shape != x.shape):
            raise ValueError(
                f"got numbers of shape {list(x.shape)} and a mask of {None if mask is None else list(mask.shape)} for groups of "
                f"{len(self.ids)}: give one number, and one mask entry, for each"
            )
        # Filled before any arithmetic: excluded entries may be NaN.
        kept = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
        return x.detach().double().masked_fill(~kept, 0).reshape(-1), kept.reshape(-1)


def result_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of results computed from ``x``: that of ``x``, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def check_ddof(ddof: int) -> None:
    """Raise a ``ValueError`` unless ``ddof`` is 0 or 1."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof = {ddof}: 1 for the estimate from a sample, 0 for the spread of the numbers themselves")


def _number_episodes(group_ids: Tensor, episode_ids: Tensor | None) -> Tensor | None:
    """Number the pairs of group and episode from 0: int64 ``[n]``, or ``None`` without episodes."""
    if episode_ids is None:
        return None
    _check_ids(episode_ids, "episode_ids")
    if episode_ids.shape != group_ids.shape:
        raise ValueError(
            f"episode_ids are {list(episode_ids.shape)} for {len(group_ids)} sequences: give one for each sequence"
        )
    return torch.unique(torch.stack([group_ids, episode_ids.to(group_ids)], 1), dim=0, return_inverse=True)[1]


def _check_ids(ids: Tensor, name: str = "group_ids") -> None:
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} are {ids.dtype} {list(ids.shape)}: give one integer for each sequence, int64 [n]")


def _check_finite(total: Tensor) -> None:
    # Checked after the collective, so that all ranks raise and none waits.
    wrong = (~total.isfinite()).nonzero()
    if len(wrong):
        raise ValueError(
            f"group {int(wrong[0])} has numbers that are not finite (their sum over all ranks is {total[wrong[0]].item()}): leave "
            "such sequences out, or give them a reward"
        )
