"""Context parallelism: split the tokens of a packed stream over ranks, and run attention across them.

Only packed ``[T, ...]`` tensors are involved, so that all engines use this module. Context parallelism never enters the
normalisation of a loss: outputs are gathered with a backward that keeps the local slice, and the gradients of a rank are
summands of the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.attention.gather_kv import gather_kv_attention, plan_keys, zigzag_index, zigzag_restore, zigzag_shard
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.engine.attention.token_stream import TokenStream
from areal.engine.attention.ulysses import ulysses_attention
from areal.engine.recurrence.chunks import ChunkSizes, RunChunks
from areal.utils.collectives import all_gather_rows

ContextParallelMode = Literal["ulysses", "gather_kv"]
"""``ulysses`` exchanges tokens for heads by all-to-all; ``gather_kv`` all-gathers keys and values, for any number of heads."""


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, AttentionOptions], Tensor]
"""Attention on one rank, as :func:`~areal.engine.attention.kernels.packed_attention`."""


def choose_mode(
    requested: Literal["auto", "ulysses", "gather_kv"], size: int, n_heads: int, n_kv_heads: int
) -> ContextParallelMode:
    """Return the requested mode; with ``"auto"``, Ulysses if the query heads divide over the ranks, else ``gather_kv``.

    Args:
        requested: mode from the configuration.
        size: number of context-parallel ranks.
        n_heads, n_kv_heads: query and key heads of a layer on one rank, after tensor parallelism.

    Raises:
        ValueError: the mode is unknown, query heads do not group over key heads, or Ulysses cannot divide the heads over the ranks.
    """
    if requested not in ("auto", *get_args(ContextParallelMode)):
        raise ValueError(f"context-parallel mode {requested!r}: choose 'auto', 'ulysses' or 'gather_kv'")
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads do not group over {n_kv_heads} key heads; no mode can split this model"
        )
    # Each rank needs the same number of query heads; key heads can be repeated.
    divides = n_heads % size == 0
    if requested == "ulysses" and not divides:
        raise ValueError(
            f"'ulysses' cannot split {n_heads} query heads over {size} context-parallel ranks: "
            f"choose 'gather_kv', or a number of ranks that divides {n_heads}"
        )
    if requested == "auto":
        return "ulysses" if divides else "gather_kv"
    return requested


class ContextParallel:
    """The ranks that one packed stream is split over, and how it is split.

    Args:
        group: the context-parallel ranks. ``None`` for a single rank, which then calls no collective.
        mode: see :data:`ContextParallelMode`. ``ulysses`` slices the stream contiguously, ``gather_kv`` in zig-zag.
        recurrence: what recurrent layers need of a stream; ``None`` for a model without them.

    Attributes:
        size, rank: size of the group, and rank in it.
        align: the padded length of a micro-batch must be a multiple of this.
        windows: windows of the layers that have run so far, in the mode ``gather_kv``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        mode: ContextParallelMode = "ulysses",
        recurrence: ChunkSizes | None = None,
    ) -> None:
        if mode not in get_args(ContextParallelMode):
            raise ValueError(f"context-parallel mode {mode!r}: choose one of {get_args(ContextParallelMode)}")
        self.group = group
        self.mode = mode
        self.recurrence = recurrence
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        # Each rank has one contiguous slice in Ulysses, and two chunks of equal size in zig-zag order.
        self.align = 1 if self.size == 1 else self.size if mode == "ulysses" else 2 * self.size
        self.windows: set[int | None] = set()

    def __repr__(self) -> str:
        return f"ContextParallel(size={self.size}, mode={self.mode!r})"

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's slice of ``[T, ...]``, as ``[T / size, ...]``.

        Raises:
            ValueError: ``T`` is not a multiple of :attr:`align`.
        """
        self._check_aligned(x.shape[0])
        if self.size == 1:
            return x
        return x.chunk(self.size)[self.rank] if self.mode == "ulysses" else zigzag_shard(x, self.rank, self.size)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Gather the full stream on every rank, in stream order and without padding. Collective.

        The backward keeps the local slice of the gradient: every rank computes the same loss over the full stream and keeps
        the gradient of its slice only.

        Args:
            x: ``[T / size, ...]`` of any dtype. This rank's slice.
            length: number of tokens without padding, at most ``T``.

        Returns:
            ``[length, ...]``.
        """
        return x[:length] if self.size == 1 else _GatherStream.apply(x, self, length, True)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gather ``R`` rows of each rank end to end, ``[size * R, ...]``, with the backward of :meth:`gather`. Collective."""
        return x if self.size == 1 else _GatherStream.apply(x, self, self.size * len(x), False)

    def gathered_index(self, positions: Tensor, length: int) -> Tensor:
        """Map positions in a stream of ``length`` tokens to indices into the ranks' slices end to end."""
        return positions if self.size == 1 or self.mode == "ulysses" else zigzag_index(positions, length, self.size)

    def layout(self, stream: TokenStream, device: torch.device | str = "cpu") -> AttentionLayout:
        """Return the layout of attention over a stream.

        Raises:
            ValueError: the length of the stream is not a multiple of :attr:`align`.
        """
        self._check_aligned(len(stream))
        # Keys for the windows that layers have asked for before.
        keys = {window: plan_keys(stream, self.rank, self.size, window, device) for window in self.windows}
        chunks = None if self.recurrence is None else RunChunks.of(stream, self.recurrence).map(lambda x: x.to(device))
        return AttentionLayout(self, stream, stream.segments(device), keys, chunks)

    def _check_aligned(self, length: int) -> None:
        if length % self.align:
            raise ValueError(
                f"{length} tokens do not split over {self.size} context-parallel ranks in mode {self.mode!r}: "
                f"pad them to a multiple of {self.align}"
            )


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The tokens of one micro-batch for attention: who attends to whom, and on which rank. Made by :meth:`ContextParallel.layout`.

    Attributes:
        cp: the ranks that the stream is split over.
        stream: the full stream, padding included.
        segments: attention segments of the full stream.
        keys: window -> attention segments of this rank's queries, for the mode ``gather_kv``.
        chunks: chunks of the full stream for recurrent layers; ``None`` for a model without them.
    """

    cp: ContextParallel
    stream: TokenStream
    segments: Segments
    keys: dict[int | None, Segments] = field(default_factory=dict, repr=False)
    chunks: RunChunks | None = field(default=None, repr=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, kernel: Kernel = packed_attention
    ) -> Tensor:
        """Compute causal attention of this rank's tokens within their sequences. Collective with several ranks.

        Args:
            q, k, v: ``[T / size, Hq, D]``, ``[T / size, Hkv, D]`` and ``[T / size, Hkv, Dv]``. This rank's slices.
            kernel: attention of one rank that has all tokens.

        Returns:
            ``[T / size, Hq, Dv]``, in the dtype of ``q``.

        Raises:
            ValueError: the tensors do not match the layout or each other.
        """
        expected = len(self.stream) // self.cp.size
        if q.shape[0] != expected:
            raise ValueError(f"attention got {q.shape[0]} tokens where this rank's share of the layout is {expected}")
        if self.cp.group is None or self.cp.size == 1:
            return kernel(q, k, v, self.segments, options)
        if self.cp.mode == "ulysses":
            return ulysses_attention(q, k, v, self.segments, self.cp.group, options)
        return gather_kv_attention(q, k, v, self._keys_for(options.window), self.cp.group, options)

    def _keys_for(self, window: int | None) -> Segments:
        # All layers use the same layout, and a model has one or two windows. Later layouts are planned with this one.
        if window not in self.keys:
            device = self.segments.cu_q.device
            self.keys[window] = plan_keys(self.stream, self.cp.rank, self.cp.size, window, device)
            self.cp.windows.add(window)
        return self.keys[window]


class _GatherStream(torch.autograd.Function):
    """All-gather of slices whose backward keeps the local slice.

    The gradient is not reduced over ranks: every rank computes the same loss from the same gathered tensor, so that its
    local gradient of the slice is complete.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel, length: int, in_order: bool) -> Tensor:
        ctx.cp, ctx.padding, ctx.in_order = cp, cp.size * x.shape[0] - length, in_order
        stream = all_gather_rows(x, cp.group)  # type: ignore[arg-type]  # more than one rank, hence a group
        if in_order and cp.mode == "gather_kv":
            stream = zigzag_restore(stream, cp.size)
        # A copy, so that the result does not keep the padded buffer alive as its base.
        return stream[:length].clone() if ctx.padding else stream

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        # Padding got no gradient. It is appended again so that the slices have their forward sizes.
        if ctx.padding:
            grad = torch.cat([grad, grad.new_zeros((ctx.padding, *grad.shape[1:]))])
        local = ctx.cp.shard(grad) if ctx.in_order else grad.chunk(ctx.cp.size)[ctx.cp.rank]
        return local, None, None, None


def context_parallel_of(
    config: PretrainedConfig,
    dims: ParallelDims,
    requested: Literal["auto", "ulysses", "gather_kv"],
    ranks: DeviceMesh,
    recurrence: ChunkSizes | None = None,
) -> ContextParallel:
    """Return the context parallelism of a layout of ranks for a model.

    Args:
        config: configuration of the model.
        dims: sizes of the layout.
        requested: mode from the engine's configuration.
        ranks: the axis ``cp`` of the device mesh.
        recurrence: what recurrent layers of the model need of a stream.

    Raises:
        ValueError: see :func:`choose_mode`.
    """
    if dims.cp == 1:
        return ContextParallel(None, recurrence=recurrence)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    # Without attention, recurrent layers check that their own heads or channels divide.
    if heads is None:
        return ContextParallel(ranks.get_group(), "ulysses" if requested == "auto" else requested, recurrence)
    # Ulysses splits the heads that tensor parallelism leaves on a rank: at least one key head.
    kv_heads = max(1, (getattr(text, "num_key_value_heads", None) or heads) // dims.tp)
    heads //= dims.tp
    mode = choose_mode(requested, dims.cp, heads, kv_heads)
    return ContextParallel(ranks.get_group(), mode, recurrence)
