"""Tensor parallelism: a table for each model family that says which weights are split over ranks.

Linear layers are split by columns and then by rows (Shoeybi et al., 2019). Between them, ranks divide the tokens
(sequence parallelism, Korthikanti et al., 2022): a block gathers the tokens at its input and reduce-scatters its
output. Every parameter becomes a DTensor over the ranks, so that FSDP, checkpoints and norms see the full shape.
Layers compute with the local tensor, without DTensor overhead.

A vocabulary does not have to divide by the ranks: the last rank then has fewer rows. Key-value heads may be fewer than the
ranks: every rank then keeps all of them, and computes the one that its query heads use.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.fsdp.gathered_tokens import GatheredTokens
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.torch.pipeline_split import PassThrough
from areal.utils.collectives import ReduceScatterRows
from areal.utils.dtensor import local_part, local_shard
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
        linear = self._tokens[id(module)].linear
        module.forward = lambda x: linear(x, local_part(module.weight), local_part(module.bias))

    def key_heads(self, module: Any) -> None:
        """Split a key or value projection by heads.

        With fewer heads than ranks, several ranks compute the same head, each for its query heads. The weight is replicated,
        and its gradient is a partial sum over ranks.
        """
        if self.kv_heads % self.size == 0:
            self.columns(module)
            return
        self._distribute(module, weight=Replicate(), bias=Replicate())
        # Ranks with neighbouring query heads use the same key head.
        width, head = len(module.weight) // self.kv_heads, self.rank * self.kv_heads // self.size
        rows = module.computed_rows = slice(head * width, (head + 1) * width)
        linear = self._tokens[id(module)].linear

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else local_part(module.bias, Partial())[rows]
            return linear(x, local_part(module.weight, Partial())[rows], bias)

        module.forward = forward

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
        self._distribute(module, **{name: Replicate() for name in module._parameters})
        inner = module.forward

        def forward(x: Tensor) -> Any:
            # The layer's own forward computes with local tensors: swap them in for the call.
            dtensors = dict(module._parameters)
            module._parameters.update({name: local_part(p, Partial()) for name, p in dtensors.items()})  # type: ignore[misc]
            try:
                return inner(x)
            finally:
                module._parameters.update(dtensors)

        module.forward = forward

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

        def forward(ids: Tensor) -> Tensor:
            # Ids of other ranks give zeros, so that the sum over ranks is the embedding.
            is_local = (ids >= start) & (ids < stop)
            rows = F.embedding((ids - start).masked_fill(~is_local, 0), local_part(module.weight), padding).masked_fill(
                ~is_local[..., None], 0
            )
            return ReduceScatterRows.apply(rows[0], self.group)[None]

        module.forward = forward

    def head(self, module: Any) -> None:
        """Split the output head. The model reads its weight directly."""
        self._distribute(module, weight=Shard(0), bias=Shard(0))

    def replicated(self, module: Any) -> None:
        """Keep a linear layer on every rank, with the same input and output."""
        self._distribute(module, weight=Replicate(), bias=Replicate())
        module.forward = lambda x: linear_product(x, local_part(module.weight), local_part(module.bias))

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

DENSE: Mapping[str, ParallelStyle] = {
    "model.embed_tokens": TensorParallel.embedding,
    "model.layers.*.input_layernorm": TensorParallel.norm,
    "model.layers.*.self_attn": TensorParallel.block,
    "model.layers.*.self_attn.q_proj": TensorParallel.columns,
    "model.layers.*.self_attn.[kv]_proj": TensorParallel.key_heads,
    "model.layers.*.self_attn.[qk]_norm": TensorParallel.norm,
    "model.layers.*.self_attn.o_proj": TensorParallel.rows,
    "model.layers.*.post_attention_layernorm": TensorParallel.norm,
    "model.layers.*.mlp": TensorParallel.block,
    "model.layers.*.mlp.gate_proj": TensorParallel.columns,
    "model.layers.*.mlp.up_proj": TensorParallel.columns,
    "model.layers.*.mlp.down_proj": TensorParallel.rows,
    "model.norm": TensorParallel.last_norm,
    "lm_head": TensorParallel.head,
}
"""Pre-norm decoders with gated MLPs and any number of key-value heads."""

WITH_IMAGES: Mapping[str, ParallelStyle] = {
    **{name.replace("model.", "model.language_model.", 1): style for name, style in DENSE.items()},
    "model.visual.*": TensorParallel.tower,
}
"""The same decoders behind a vision tower."""

PLANS: Mapping[str, Mapping[str, ParallelStyle]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), DENSE),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_vl"), WITH_IMAGES),
}
"""Plan by model type. A plan lists every module with parameters, and the blocks around them."""


def check_plan(config: PretrainedConfig, dims: ParallelDims, *, packed: bool) -> None:
    """Check that a model can be split over the tensor-parallel ranks of a layout.

    Raises:
        ValueError: the family does not have a plan, or a number of its configuration does not fit the layout.
    """
    size = dims.tp
    if size == 1:
        return
    if config.model_type not in PLANS:
        raise ValueError(
            f"model type {config.model_type!r} has no tensor-parallel plan on the fsdp engine, which has some for "
            f"{', '.join(sorted(PLANS))}: leave t out, use the megatron engine, or add a plan to areal.engine.fsdp.tensor_parallel"
        )
    # Divided tokens need a stream without rows.
    if not packed:
        raise ValueError(
            "fsdp.attention = 'rows' with t: tensor parallelism needs packed attention; leave one of the two out"
        )
    config = config.get_text_config()
    # Heads and columns are split evenly. Key-value heads may also be fewer than the ranks, if these divide by them.
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name)
        if number % size and not (name == "num_key_value_heads" and size % number == 0):
            raise ValueError(
                f"{name} = {number} does not divide over {size} tensor-parallel ranks: choose a t that divides it"
                + (", or a multiple of it" if name == "num_key_value_heads" else "")
            )
    _check_vocabulary(config, dims)


def _check_vocabulary(config: PretrainedConfig, dims: ParallelDims) -> None:
    """Check the split of the vocabulary, which may be uneven.

    Raises:
        ValueError: a rank would not have any row, or the columns of uneven rows cannot be sharded.
    """
    vocabulary, size = config.vocab_size, dims.tp
    if vocabulary % size == 0:
        return
    # All ranks but the last few have equally many rows.
    rows = -(-vocabulary // size)
    if (size - 1) * rows >= vocabulary:
        raise ValueError(
            f"vocab_size = {vocabulary} leaves a rank of {size} tensor-parallel ranks without rows: choose a smaller t"
        )
    # FSDP shards the columns of unevenly split rows, see parallelize().
    shards = dims.dp_shard * dims.cp
    if config.hidden_size % shards:
        raise ValueError(
            f"backend = '{dims}': vocab_size = {vocabulary} does not divide over {size} tensor-parallel ranks, and "
            f"hidden_size = {config.hidden_size} not over the {shards} ranks that shard each of its slices; "
            "choose a t that divides the first, or d * c that divides the second"
        )


def split_tensors(model: PackedCausalLM, mesh: DeviceMesh) -> None:
    """Split a model that :func:`check_plan` accepts, in place. The model may be on the meta device.

    Args:
        model: full model or one pipeline stage.
        mesh: mesh axis ``tp``.

    Raises:
        ValueError: the family's plan does not cover a parameter.
    """
    config = model.hf.config
    parallel, plan = TensorParallel(mesh, config.get_text_config().num_key_value_heads), PLANS[config.model_type]
    for name, module in model.hf.named_modules():
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name, pattern) and not isinstance(module, PassThrough):
                style(parallel, module)
    # The value head is small: every rank computes it on all tokens.
    if model.value_head is not None:
        parallel.replicated(model.value_head)
    model.vocab_group = parallel.group
    # A parameter outside the plan would be wrong silently.
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(
            f"the tensor-parallel plan of {config.model_type!r} leaves out {missing[0]}: add it to the plan"
        )
