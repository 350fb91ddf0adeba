"""Micro-batches: values that carry the layout of packed sequences, and the way back to the caller's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import Batch


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """What the sequences of a micro-batch have in common at their beginnings, each token of which a model computes once.

    The model's stream is made of branches, end to end: of each sequence, in the order of its tokens, what does not stand in the stream
    already. Sequences that have nothing of their own have no branch. All tensors are on the host.

    Attributes:
        own: tokens of each branch, at least 1. They sum to ``S``, the length of the stream.
        whole: tokens from the beginning of its sequence to the end of each branch.
        paths: int64 ``[sum(whole)]``, for each branch where all these tokens stand in the stream.
        tokens: int64 ``[S]``, the packed token that each token of the stream is taken from.
        places: int64 ``[T]``, where each packed token stands in the stream.
        scored: int64 ``[R]``, packed tokens that differ in where they stand, or in what is asked of them there: their outputs are computed.
        answers: int64 ``[T]``, which of the ``R`` has the outputs of each packed token.
    """

    own: tuple[int, ...]
    whole: tuple[int, ...]
    paths: Tensor
    tokens: Tensor
    places: Tensor
    scored: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Some whole sequences, packed end to end. Frozen: nothing is ever written into it.

    Attributes:
        index: position in the step, by which results are keyed.
        data: the packed :class:`Batch` that a loss sees, on the engine's device.
        seqlens: tokens of each sequence.
        cu_seqlens: int32 ``[n + 1]``, where each sequence starts; the same tensor as ``data.cu_seqlens``.
        sample_ids: position of each sequence in the caller's batch.
        padded_length: tokens that the model sees: ``sum(seqlens)``, or the length of ``tree``, rounded up to what the layout needs.
        filler: True for a dummy of one token, which keeps ranks in step and reaches neither loss nor results.
        tree: what sequences share, where that is computed once.
        wanted: bool ``[T]``, the key ``output_mask`` on the host; ``None`` without it.
    """

    index: int
    data: Batch
    seqlens: tuple[int, ...]
    cu_seqlens: Tensor
    sample_ids: tuple[int, ...]
    padded_length: int
    filler: bool = False
    tree: PrefixTree | None = None
    wanted: Tensor | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequences, unpadded: the ``T`` that a loss sees."""
        return sum(self.seqlens)


@dataclass(frozen=True)
class BatchForm:
    """How the caller's batch looked: what :meth:`MicroBatchList.restore` goes back to.

    Attributes:
        kind: ``"padded"`` for a dict of ``[B, S]`` tensors, ``"list"`` for a list of per-sample dicts.
        seqlens: tokens of each sample, in the caller's order.
        width: ``S`` of a padded batch.
        device: of the caller's tensors.
    """

    kind: Literal["padded", "list"]
    seqlens: tuple[int, ...]
    width: int
    device: torch.device


@dataclass(frozen=True)
class MicroBatchList:
    """The micro-batches of one call on one rank. A value: it may be iterated again and again.

    Attributes:
        mbs: all micro-batches, the fillers last; as many as on every other rank.
        form: of the caller's batch.
        dropped: samples left out for their length (``overlong="drop"``), as positions in the caller's batch.
    """

    mbs: tuple[MicroBatch, ...]
    form: BatchForm
    dropped: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.mbs)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.mbs)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.mbs[index]

    @property
    def real(self) -> tuple[MicroBatch, ...]:
        """The micro-batches that hold the caller's samples."""
        return tuple(mb for mb in self.mbs if not mb.filler)

    @property
    def n_tokens(self) -> int:
        """Tokens of this rank's samples, unpadded."""
        return sum(mb.n_tokens for mb in self.real)

    def restore(self, per_mb: Sequence[Any]) -> Any:
        """Bring per-micro-batch results back to the caller's order and form.

        Args:
            per_mb: one pytree of tensors for each of :attr:`real`, in order, as ``forward_backward_batch`` returns them. A leaf is
                ``[T, ...]`` (per token) or ``[n, ...]`` (per sequence); which one is told by the shapes over all micro-batches,
                and is per token where both fit.

        Returns:
            The same pytree. Each leaf is ``[B, S, ...]`` (per token, right-padded with zeros) or ``[B, ...]`` (per sequence) for
            a padded batch, and a list of ``B`` tensors for a list; on the caller's device. Dropped samples are zeros.

        Raises:
            ValueError: a leaf fits neither, there is not one result for each micro-batch, or every sample was dropped.
        """
        mbs = self.real
        if len(per_mb) != len(mbs):
            raise ValueError(
                f"restore got {len(per_mb)} results for {len(mbs)} micro-batches; pass one for each, in order"
            )
        if not mbs:
            raise ValueError("restore has nothing to go by: every sample of this rank was dropped for its length")
        flat = [pytree.tree_flatten(result) for result in per_mb]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError("restore got results of different structure from different micro-batches")
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._restore_leaf(list(column)) for column in columns], spec)

    def _restore_leaf(self, leaves: list[Tensor]) -> Tensor | list[Tensor]:
        mbs = self.real
        per_token = all(leaf.shape[:1] == (mb.n_tokens,) for leaf, mb in zip(leaves, mbs, strict=True))
        if not per_token and any(leaf.shape[:1] != (len(mb.seqlens),) for leaf, mb in zip(leaves, mbs, strict=True)):
            shapes = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(
                f"restore got shapes {shapes}: the first dimension is neither the tokens {[mb.n_tokens for mb in mbs]} "
                f"nor the sequences {[len(mb.seqlens) for mb in mbs]} of the micro-batches"
            )
        rows: dict[int, Tensor] = {}
        for leaf, mb in zip(leaves, mbs, strict=True):
            pieces = leaf.split(list(mb.seqlens)) if per_token else leaf.unbind()
            rows.update(zip(mb.sample_ids, pieces, strict=True))
        like = leaves[0]
        for i in self.dropped:
            rows[i] = like.new_zeros((self.form.seqlens[i], *like.shape[1:]) if per_token else like.shape[1:])
        ordered = [rows[i].to(self.form.device) for i in range(len(self.form.seqlens))]
        if self.form.kind == "list":
            return ordered
        if not per_token:
            return torch.stack(ordered)
        out = torch.zeros((len(ordered), self.form.width, *like.shape[1:]), dtype=like.dtype, device=self.form.device)
        for row, piece in zip(out, ordered, strict=True):
            row[: len(piece)] = piece
        return out
