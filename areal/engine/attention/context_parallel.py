"""Context parallelism: how ranks share the tokens of a packed stream, and how attention reaches across them.

Works on packed ``[T, ...]`` tensors alone, so that every engine uses the same. It never enters the normalisation of a
loss: outputs are gathered with a backward that keeps the local slice, and a rank's gradients are its share of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.attention.gather_kv import gather_kv_attention, plan_keys, zigzag_places, zigzag_restore, zigzag_shard
from areal.engine.attention.kernels import Segments, packed_attention
from areal.engine.attention.token_stream import TokenStream
from areal.engine.attention.ulysses import ulysses_attention
from areal.utils.collectives import all_gather_rows

ContextParallelMode = Literal["ulysses", "gather_kv"]
"""``ulysses`` trades tokens for heads by all-to-all; ``gather_kv`` gathers keys and values, whatever the heads."""


def choose_mode(
    requested: Literal["auto", "ulysses", "gather_kv"], size: int, n_heads: int, n_kv_heads: int
) -> ContextParallelMode:
    """The mode for a model: what was asked for, or with ``"auto"`` Ulysses where the query heads divide.

    Args:
        requested: of the configuration.
        size: context-parallel ranks.
        n_heads, n_kv_heads: query and key heads of a layer on one rank, after tensor parallelism.

    Raises:
        ValueError: an unknown mode, heads that do not group, or Ulysses with heads that do not divide over the ranks.
    """
    if requested not in ("auto", *get_args(ContextParallelMode)):
        raise ValueError(f"context-parallel mode {requested!r}: choose 'auto', 'ulysses' or 'gather_kv'")
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads do not group over {n_kv_heads} key heads; no mode can split this model"
        )
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
    """The ranks that share one packed stream, and the order in which they hold it.

    Args:
        group: the context-parallel ranks, or ``None`` for one rank alone, which then takes part in no collective.
        mode: see :data:`ContextParallelMode`. ``ulysses`` slices the stream contiguously, ``gather_kv`` in zig-zag.

    Attributes:
        size, rank: of the group.
        align: a micro-batch's padded length is a multiple of this.
    """

    def __init__(self, group: dist.ProcessGroup | None, mode: ContextParallelMode = "ulysses") -> None:
        if mode not in get_args(ContextParallelMode):
            raise ValueError(f"context-parallel mode {mode!r}: choose one of {get_args(ContextParallelMode)}")
        self.group = group
        self.mode = mode
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.align = 1 if self.size == 1 else self.size if mode == "ulysses" else 2 * self.size

    def __repr__(self) -> str:
        return f"ContextParallel(size={self.size}, mode={self.mode!r})"

    def shard(self, x: Tensor) -> Tensor:
        """This rank's slice of ``[T, ...]``, ``[T / size, ...]``; ``T`` is a multiple of :attr:`align`.

        Raises:
            ValueError: ``T`` is not.
        """
        self._check_aligned(x.shape[0])
        if self.size == 1:
            return x
        return x.chunk(self.size)[self.rank] if self.mode == "ulysses" else zigzag_shard(x, self.rank, self.size)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """The whole stream on every rank, in order and without padding. Collective.

        The backward keeps the local slice of the gradient: every rank computes the same loss of the whole stream, and
        is answerable for its own tokens.

        Args:
            x: this rank's slice, ``[T / size, ...]``, of any dtype.
            length: tokens without padding, at most ``T``.

        Returns:
            ``[length, ...]``.
        """
        return x[:length] if self.size == 1 else _GatherStream.apply(x, self, length, True)

    def gather_rows(self, x: Tensor) -> Tensor:
        """The ranks' rows end to end, as many of each, ``[size * R, ...]``; the backward as of :meth:`gather`. Collective."""
        return x if self.size == 1 else _GatherStream.apply(x, self, self.size * len(x), False)

    def places(self, where: Tensor, length: int) -> Tensor:
        """Where positions ``where`` of a stream of ``length`` stand in the ranks' slices end to end."""
        return where if self.size == 1 or self.mode == "ulysses" else zigzag_places(where, length, self.size)

    def layout(self, branches: TokenStream, device: torch.device | str = "cpu") -> AttentionLayout:
        """How attention runs over a stream.

        Raises:
            ValueError: its length is not a multiple of :attr:`align`.
        """
        self._check_aligned(len(branches))
        return AttentionLayout(self, branches, branches.segments(device))

    def _check_aligned(self, length: int) -> None:
        if length % self.align:
            raise ValueError(
                f"{length} tokens do not split over {self.size} context-parallel ranks in mode {self.mode!r}: "
                f"pad them to a multiple of {self.align}"
            )


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Which tokens of one micro-batch may see each other, and where they are. Made by :meth:`ContextParallel.layout`.

    Attributes:
        cp: the ranks that hold the stream.
        branches: of the whole stream, padding included. segments: the same for attention.
    """

    cp: ContextParallel
    branches: TokenStream
    segments: Segments
    _keys: dict[int | None, Segments] = field(default_factory=dict, init=False, repr=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of this rank's tokens over their own sequences. Collective where there are several ranks.

        Args:
            q, k, v: this rank's slices, ``[T / size, Hq, D]``, ``[T / size, Hkv, D]`` and ``[T / size, Hkv, Dv]``.
            scale, window, sinks, softcap: as for :func:`~areal.engine.attention.kernels.packed_attention`.

        Returns:
            ``[T / size, Hq, Dv]``, in the dtype of ``q``.

        Raises:
            ValueError: the tensors do not fit the layout or each other.
        """
        expected = len(self.branches) // self.cp.size
        if q.shape[0] != expected:
            raise ValueError(f"attention got {q.shape[0]} tokens where this rank's share of the layout is {expected}")
        if self.cp.group is None or self.cp.size == 1:
            return packed_attention(q, k, v, self.segments, scale=scale, window=window, sinks=sinks, softcap=softcap)
        options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "softcap": softcap}
        if self.cp.mode == "ulysses":
            return ulysses_attention(q, k, v, self.segments, self.cp.group, **options)
        return gather_kv_attention(q, k, v, self._keys_for(window), self.cp.group, **options)

    def _keys_for(self, window: int | None) -> Segments:
        # Layers share a layout, and a model has one or two windows: each is planned and copied to the device once.
        if window not in self._keys:
            device = self.segments.cu_q.device
            self._keys[window] = plan_keys(self.branches, self.cp.rank, self.cp.size, window, device)
        return self._keys[window]


class _GatherStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel, length: int, in_order: bool) -> Tensor:
        ctx.cp, ctx.padding, ctx.in_order = cp, cp.size * x.shape[0] - length, in_order
        stream = all_gather_rows(x, cp.group)  # type: ignore[arg-type]  # more than one rank, hence a group
        if in_order and cp.mode == "gather_kv":
            stream = zigzag_restore(stream, cp.size)
        return stream[:length].clone() if ctx.padding else stream

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if ctx.padding:
            grad = torch.cat([grad, grad.new_zeros((ctx.padding, *grad.shape[1:]))])
        mine = ctx.cp.shard(grad) if ctx.in_order else grad.chunk(ctx.cp.size)[ctx.cp.rank]
        return mine, None, None, None


def context_parallel_of(
    config: PretrainedConfig, dims: ParallelDims, requested: Literal["auto", "ulysses", "gather_kv"], ranks: DeviceMesh
) -> ContextParallel:
    """How the ranks of a layout share the tokens of a model.

    Args:
        requested: of the engine's configuration. ranks: the axis ``cp``.

    Raises:
        ValueError: as :func:`choose_mode`.
    """
    if dims.cp == 1:
        return ContextParallel(None)
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = (getattr(text, "num_key_value_heads", None) or heads) // dims.tp
    heads //= dims.tp
    mode = choose_mode(requested, dims.cp, heads, kv_heads)
    return ContextParallel(ranks.get_group(), mode)
