"""Tensor parallelism: modules split over ranks. The tables of :mod:`~areal.engine.fsdp.tensor_plans` name those of each model family.

Linear layers are split by columns and then by rows (Shoeybi et al., 2019). Between them, ranks divide the tokens
(sequence parallelism, Korthikanti et al., 2022): a block gathers the tokens at its input and reduce-scatters its
output. Every parameter becomes a DTensor over the ranks, so that FSDP, checkpoints and norms see the full shape.
Layers compute with the local tensor, without DTensor overhead.

A vocabulary does not have to divide by the ranks: the last rank then has fewer rows. Key-value heads may be fewer than the
ranks: every rank then keeps all of them, and computes the one that its query heads use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.fsdp.gathered_tokens import GatheredTokens
from areal.utils.collectives import ReduceScatterRows
from areal.utils.dtensor import local_part, local_shard, take_rows
from areal.utils.functional.product import linear_product


class TensorParallel:
    """Splits modules over the ranks of one mesh axis, in place.

    Gathered tokens are ``[1, T, ...]``, divided ones ``[1, T / size, ...]``.

    Args:
        mesh: one-dimensional mesh.
        kv_heads: number of key-value heads of an attention layer.
    """

    def __init__(self, mesh: DeviceMesh, kv_heads: int) -> None:
        self.mesh, self.kv_heads = mesh, kv_heads
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._stream = ContextParallel(self.group)
        self._distributed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._tokens: dict[int, GatheredTokens] = {}  # of the block around a module

    # ---- kinds of modules, as the tables name them

    def block(self, module: Any) -> None:
        """Gather the tokens at the input of a block."""
        tokens = module.gathered_tokens = GatheredTokens(self.group)
        self._tokens |= {id(inside): tokens for inside in module.modules()}
        module.forward = tokens.within(module.forward)

    def columns(self, module: Any) -> None:
        """Split a linear layer of a block by columns: each rank computes some outputs of all tokens."""
        self._distribute(module, weight=Shard(0), bias=Shard(0))
        module.input_tokens = self._tokens[id(module)]
        linear = module.input_tokens.linear
        module.forward = lambda x: linear(x, local_part(module.weight), local_part(module.bias))

    def key_heads(self, module: Any) -> None:
        """Split a key or value projection by heads.

        With fewer heads than ranks, several ranks compute the same head, each for its query heads. The weight is replicated,
        and its gradient is a partial sum over ranks.
        """
        if self.kv_heads % self.size == 0:
            self.columns(module)
            return
        # Ranks with neighbouring query heads use the same key head.
        width, head = len(module.weight) // self.kv_heads, self.rank * self.kv_heads // self.size
        self._compute_rows(module, [slice(head * width, (head + 1) * width)])

    def rows(self, module: Any) -> None:
        """Split a linear layer by rows: each rank has some inputs. Outputs are reduce-scattered over tokens."""
        self._distribute(module, weight=Shard(1), bias=Replicate())

        def forward(x: Tensor) -> Tensor:
            # The bias is added after the sum, on this rank's tokens: its gradient is a partial sum.
            out = ReduceScatterRows.apply(linear_product(x, local_part(module.weight))[0], self.group)[None]
            return out if module.bias is None else out + local_part(module.bias, Partial())

        module.forward = forward

    def norm(self, module: Any) -> None:
        """Apply an elementwise layer to this rank's tokens or heads. Its gradient is a partial sum over ranks."""
        self.with_local(module, {module: self.replicate(module)})

    def tower(self, module: Any) -> None:
        """Encode all images on every rank. The gradient of a rank is that of the tokens it has: a partial sum over ranks."""
        if any(parameter is not None for parameter in module._parameters.values()):
            self.norm(module)

    def last_norm(self, module: Any) -> None:
        """Apply the norm before the head and gather its output: every rank then computes the same head input."""
        self.norm(module)
        inner = module.forward
        module.forward = lambda x: self._stream.gather(inner(x)[0], self.size * x.shape[1])[None]

    def embedding(self, module: Any) -> None:
        """Split an embedding by rows: each rank looks up the ids in its range."""
        self._distribute(module, weight=Shard(0))
        # The last rank may have fewer rows than the others.
        _, (local_rows, _) = local_shard(module.weight)
        start, stop = local_rows.start, local_rows.stop
        # The padding row does not get a gradient, as in torch's embedding.
        padding = module.padding_idx
        padding = padding - start if padding is not None and start <= padding < stop else None
        # Gemma multiplies by a constant.
        scale = getattr(module, "embed_scale", None)

        def forward(ids: Tensor) -> Tensor:
            # Ids of other ranks give zeros, so that the sum over ranks is the embedding.
            is_local = (ids >= start) & (ids < stop)
            rows = F.embedding((ids - start).masked_fill(~is_local, 0), local_part(module.weight), padding).masked_fill(
                ~is_local[..., None], 0
            )
            rows = rows if scale is None else rows * module.embed_scale.to(rows.dtype)
            return ReduceScatterRows.apply(rows[0], self.group)[None]

        module.forward = forward

    def head(self, module: Any) -> None:
        """Split the output head. The model reads its weight directly."""
        self._distribute(module, weight=Shard(0), bias=Shard(0))

    def replicated(self, module: Any) -> None:
        """Keep a linear layer on every rank, with the same input and output."""
        self._distribute(module, weight=Replicate(), bias=Replicate())
        module.forward = lambda x: linear_product(x, local_part(module.weight), local_part(module.bias))

    # ---- parts of other kinds

    def stacked_columns(self, module: Any, sizes: Sequence[int]) -> None:
        """Split a linear layer of a block whose weight is several matrices, one below the other, into columns of each.

        Every rank keeps the whole weight, of which it computes its rows of each matrix: the gradient is a partial sum over ranks.

        Args:
            module: the layer.
            sizes: rows of the matrices.
        """
        self._compute_rows(module, self.rows_of_each(sizes))

    def rows_of_each(self, sizes: Sequence[int]) -> list[slice]:
        """Return this rank's rows of matrices that lie one below the other."""
        starts = [end - n for end, n in zip(itertools.accumulate(sizes), sizes, strict=True)]
        parts = [n // self.size for n in sizes]
        return [slice(a + self.rank * n, a + (self.rank + 1) * n) for a, n in zip(starts, parts, strict=True)]

    def replicate(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Keep the parameters of a module on every rank. Returns what its forward computes with; its gradient is a partial sum."""
        self._distribute(module, **{name: Replicate() for name in module._parameters})
        return lambda parameter: local_part(parameter, Partial())

    def divide(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Divide the first dimension of a module's own parameters. Returns what its forward computes with: this rank's part."""
        self._distribute(module, **{name: Shard(0) for name in module._parameters})
        return local_part

    def with_local(self, module: Any, local: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> None:
        """Let the forward of a module compute with local tensors.

        Args:
            module: the module.
            local: for itself and for modules whose parameters it reads, a function from a parameter to what takes its place.
        """
        inner = module.forward

        def forward(*args: Any, **options: Any) -> Any:
            kept = [(each._parameters, dict(each._parameters)) for each in local]
            for (parameters, before), of in zip(kept, local.values(), strict=True):
                parameters.update({name: of(p) for name, p in before.items() if p is not None})  # type: ignore[misc]
            try:
                return inner(*args, **options)
            finally:
                for parameters, before in kept:
                    parameters.update(before)

        module.forward = forward

    def _compute_rows(self, module: Any, rows: list[slice]) -> None:
        """Replicate a linear layer of a block, and compute some of its rows. Its gradient is a partial sum over ranks."""
        self._distribute(module, weight=Replicate(), bias=Replicate())
        module.computed_rows = rows
        module.input_tokens = self._tokens[id(module)]
        linear = module.input_tokens.linear

        def forward(x: Tensor) -> Tensor:
            weight, bias = (local_part(each, Partial()) for each in (module.weight, module.bias))
            return linear(x, take_rows(weight, rows), None if bias is None else take_rows(bias, rows))

        module.forward = forward

    def _distribute(self, module: nn.Module, **placements: Placement) -> None:
        """Replace parameters by DTensors with these placements."""
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in self._distributed:  # a tied weight stays shared
                placed = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
                self._distributed[id(parameter)] = (
                    parameter,
                    nn.Parameter(placed, requires_grad=parameter.requires_grad),
                )
            module._parameters[name] = self._distributed[id(parameter)][1]


ParallelStyle = Callable[[TensorParallel, Any], None]
"""Splits a module in place."""
