"""Micro-batches: frozen values with the layout of packed sequences, and the conversion of results to the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import Batch


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The common prefixes of the sequences of a micro-batch, so that a model computes each of their tokens once.

    The model's token stream consists of branches, end to end. The branch of a sequence holds its tokens after the prefix that
    is already in the stream. Sequences that add no tokens to the stream are without a branch. All tensors are
    on the host.

    Attributes:
        lengths: number of tokens of each branch, at least 1. They sum to ``S``, the length of the stream.
        context_lengths: number of tokens from the beginning of the sequence to the end of each branch.
        context_index: int64 ``[sum(context_lengths)]``. Stream indices of these tokens, for one branch after the other.
        tokens: int64 ``[S]``. Index of the packed token that each token of the stream is a copy of.
        stream_index: int64 ``[T]``. Stream index of each packed token. Shared tokens have the same one.
        output_tokens: int64 ``[R]``. Packed tokens whose outputs are computed: one for each distinct combination of a stream
            index and the keys that outputs depend on there (target, output mask, temperature).
        output_index: int64 ``[T]``. Index into ``output_tokens`` of the entry with the outputs of each packed token.
    """

    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    context_index: Tensor
    tokens: Tensor
    stream_index: Tensor
    output_tokens: Tensor
    output_index: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


Grid = tuple[int, int, int]
"""Patches of an image in time, height and width."""


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The distinct images of a micro-batch, and the tokens that stand for them.

    Attributes:
        pixel_values: float. Images in the form that the model takes, end to end: patches ``[P, C]``, or images ``[n, C, H, W]`` of one
            size. A micro-batch without images has a black one, for which no token stands.
        rows: int64 ``[T]``. For each packed token its row among the tokens of all images, end to end; -1 for a token of text.
        grids: int64 ``[n, 3]``, on the host. Patches of each image in time, height and width; ``None`` for images of one size.
        positions: int64 ``[T, 3]``. Position of each packed token in its sequence, in time, height and width; ``None`` if each token is
            one position after the one before it.
        bidirectional: bool ``[T]``, on the host. Tokens of images, if those of an image see each other in both directions; ``None`` if
            all tokens see earlier ones only.
        tower: index tensors that the vision tower would derive from the grids, by their names in its forward. Offsets of sequences, whose
            names begin with ``cu_``, stay on the host.
    """

    pixel_values: Tensor
    rows: Tensor
    grids: Tensor | None = None
    positions: Tensor | None = None
    bidirectional: Tensor | None = None
    tower: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, fn: Callable[[Tensor], Tensor]) -> ImageInputs:
        """Apply ``fn`` to every tensor that the device needs, and return the result."""
        positions = None if self.positions is None else fn(self.positions)
        tower = {name: x if name.startswith("cu_") else fn(x) for name, x in self.tower.items()}
        return ImageInputs(fn(self.pixel_values), fn(self.rows), self.grids, positions, self.bidirectional, tower)


class MicroBatchLayout(Protocol):
    """Index tensors of a micro-batch."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> MicroBatchLayout:
        """Apply ``fn`` to every tensor, and return the result."""


@dataclass(frozen=True)
class MicroBatch:
    """Complete sequences, packed end to end. Frozen: nothing is written into a micro-batch after it was built.

    Attributes:
        index: position in the step. Results are keyed by this number.
        data: the packed :class:`Batch` that a loss receives, on the engine's device.
        seqlens: number of tokens of each sequence.
        cu_seqlens: int32 ``[n + 1]``. Start of each sequence; the same tensor as ``data.cu_seqlens``.
        sample_ids: index of each sequence in the caller's batch.
        padded_length: number of tokens that the model computes: ``sum(seqlens)``, or the length of ``tree``, rounded up to a
            multiple that the layout needs.
        filler: True for a dummy of one token, which keeps ranks in step and enters neither loss nor results.
        tree: common prefixes of the sequences, if they are computed once.
        wanted: bool ``[T]``, on the host. The key ``output_mask``; ``None`` without that key.
        layout: index tensors of the engine's model for this micro-batch, on the engine's device; ``None`` without an engine.
        adapters: name of the adapter of each sequence, equal names next to each other within a stream; ``None`` for the selected one.
        streams: the streams of a micro-batch that several devices of one process compute, end to end: each is a micro-batch with
            some of the sequences. Empty for one stream.
        images: images of the sequences, on the engine's device; ``None`` for a model of text.
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
    layout: MicroBatchLayout | None = None
    adapters: tuple[str, ...] | None = None
    streams: tuple[MicroBatch, ...] = ()
    images: ImageInputs | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens without padding: the ``T`` of the tensors that a loss receives."""
        return sum(self.seqlens)


@dataclass(frozen=True)
class BatchForm:
    """The form of the caller's batch, which :meth:`MicroBatchList.restore` gives to results.

    Attributes:
        kind: ``"padded"`` for a dict of ``[B, S]`` tensors, ``"list"`` for a list of per-sample dicts.
        seqlens: number of tokens of each sample, in the caller's order.
        width: ``S`` of a padded batch.
        device: device of the caller's tensors.
    """

    kind: Literal["padded", "list"]
    seqlens: tuple[int, ...]
    width: int
    device: torch.device


@dataclass(frozen=True)
class MicroBatchList:
    """The micro-batches of one call on one rank. Immutable, so that it can be iterated repeatedly.

    Attributes:
        mbs: all micro-batches, fillers last. Every rank has the same number.
        form: form of the caller's batch.
        dropped: indices in the caller's batch of samples that were dropped for their length (``overlong="drop"``).
        idle_ranks: some rank has fillers only.
        adapters: names of the adapters that samples of any rank name; ``None`` if the batch does not name adapters.
    """

    mbs: tuple[MicroBatch, ...]
    form: BatchForm
    dropped: tuple[int, ...] = ()
    idle_ranks: bool = False
    adapters: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.mbs)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.mbs)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.mbs[index]

    @property
    def real(self) -> tuple[MicroBatch, ...]:
        """The micro-batches with the caller's samples, without fillers."""
        return tuple(mb for mb in self.mbs if not mb.filler)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of this rank's samples, without padding."""
        return sum(mb.n_tokens for mb in self.real)

    def restore(self, per_mb: Sequence[Any], *, like: Any = None) -> Any:
        """Convert per-micro-batch results to the caller's order and form.

        Args:
            per_mb: one pytree of tensors for each of :attr:`real`, in order, as ``forward_backward_batch`` returns them. A leaf is
                ``[T, ...]`` (per token) or ``[n, ...]`` (per sequence). The shapes over all micro-batches decide between
                both; if both match, the leaf is per token.
            like: result of another rank, for a rank with fillers only: a pytree of per-token tensors. Only structure, trailing shapes
                and dtypes are used. Without it, a rank without samples gets one leaf of float32.

        Returns:
            The same pytree, on the caller's device. For a padded batch each leaf is ``[B, S, ...]`` (per token, right-padded with
            zeros) or ``[B, ...]`` (per sequence); for a list, each leaf is a list of ``B`` tensors. Dropped samples are zeros.
            Without samples: ``[]``, or ``[0, S, ...]`` for a padded batch.

        Raises:
            ValueError: a leaf matches neither shape, the number of results is not that of the micro-batches, or every sample
                was dropped and there is no ``like``.
        """
        mbs = self.real
        if len(per_mb) != len(mbs):
            raise ValueError(
                f"restore got {len(per_mb)} results for {len(mbs)} micro-batches; pass one for each, in order"
            )
        # A rank with fillers only takes the shapes from another rank's result.
        if not mbs and like is None:
            if self.dropped:
                raise ValueError(
                    "restore got no result to take shapes from, because every sample of this rank was dropped for its length: "
                    "pass like=, the result of another rank"
                )
            like = torch.zeros(0)
        # Transpose a pytree for each micro-batch into a list over micro-batches for each leaf.
        flat = [pytree.tree_flatten(result) for result in per_mb or [like]]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError("restore got results of different structure from different micro-batches")
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._restore_leaf(list(column)) for column in columns], spec)

    def _restore_leaf(self, leaves: list[Tensor]) -> Tensor | list[Tensor]:
        mbs = self.real
        # Without micro-batches, the only leaf is of another rank, and per token.
        like, leaves = leaves[0], leaves[: len(mbs)]
        # Per token or per sequence? All micro-batches decide together: in a single one, T may equal n.
        per_token = all(leaf.shape[:1] == (mb.n_tokens,) for leaf, mb in zip(leaves, mbs, strict=True))
        if not per_token and any(leaf.shape[:1] != (len(mb.seqlens),) for leaf, mb in zip(leaves, mbs, strict=True)):
            shapes = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(
                f"restore got shapes {shapes}: the first dimension is neither the tokens {[mb.n_tokens for mb in mbs]} "
                f"nor the sequences {[len(mb.seqlens) for mb in mbs]} of the micro-batches"
            )
        # Unpack: the result of each sample, by its index in the caller's batch.
        by_sample: dict[int, Tensor] = {}
        for leaf, mb in zip(leaves, mbs, strict=True):
            values = leaf.split(list(mb.seqlens)) if per_token else leaf.unbind()
            by_sample.update(zip(mb.sample_ids, values, strict=True))
        # Dropped samples were never computed: their results are zeros of the right shape.
        for i in self.dropped:
            by_sample[i] = like.new_zeros((self.form.seqlens[i], *like.shape[1:]) if per_token else like.shape[1:])
        ordered = [by_sample[i].to(self.form.device) for i in range(len(self.form.seqlens))]
        if self.form.kind == "list":
            return ordered
        if not per_token:
            return torch.stack(ordered)
        # A padded batch: right-pad each sample to the caller's width.
        out = torch.zeros((len(ordered), self.form.width, *like.shape[1:]), dtype=like.dtype, device=self.form.device)
        for row, values in zip(out, ordered, strict=True):
            row[: len(values)] = values
        return out
