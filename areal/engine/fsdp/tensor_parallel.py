"""Tensor parallelism: which weights of a model are split over ranks, as a short table for each model family.

Linear layers are split by columns and then by rows (Shoeybi et al., 2019), and between them ranks share the tokens (sequence parallelism,
Korthikanti et al., 2022): a block gathers the tokens, and gives back its rank's share of the sum. Every parameter becomes a DTensor over the
ranks, so that FSDP, checkpoints and norms know the full shape; layers compute with the local part, which costs nothing more than on one rank.
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

from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.fsdp.pipeline.split import PassThrough
from areal.engine.model.packed_lm import PackedCausalLM
from areal.utils.collectives import GatherRows, ReduceScatterRows
from areal.utils.dtensor import local_part


class TensorParallel:
    """Splits modules over the ranks of one axis, in place. Tokens are ``[1, T, ...]`` where they are gathered, ``[1, T / size, ...]`` else.

    Args:
        mesh: one-dimensional.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._stream = ContextParallel(self.group)
        self._distributed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    # ---- kinds of modules, as the tables name them

    def block(self, module: Any) -> None:
        """Takes this rank's tokens, and works on all."""
        inner = module.forward

        def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            return inner(GatherRows.apply(hidden_states[0], self.group)[None], *args, **options)

        module.forward = forward

    def columns(self, module: Any) -> None:
        """A linear layer of which each rank computes some outputs, of all tokens."""
        self._distribute(module, weight=Shard(0), bias=Shard(0))
        module.forward = lambda x: F.linear(x, local_part(module.weight), local_part(module.bias))

    def rows(self, module: Any) -> None:
        """A linear layer of which each rank has some inputs. Ranks sum what they found, and keep their own tokens of it."""
        self._distribute(module, weight=Shard(1), bias=Replicate())

        def forward(x: Tensor) -> Tensor:
            out = ReduceScatterRows.apply(F.linear(x, local_part(module.weight))[0], self.group)[None]
            return out if module.bias is None else out + local_part(module.bias, Partial())

        module.forward = forward

    def norm(self, module: Any) -> None:
        """A layer without products over tokens or heads, on this rank's tokens, or heads, alone: its gradient is a sum over ranks."""
        self._distribute(module, **{name: Replicate() for name in module._parameters})
        inner = module.forward

        def forward(x: Tensor) -> Tensor:
            dtensors = dict(module._parameters)
            module._parameters.update({name: local_part(p, Partial()) for name, p in dtensors.items()})  # type: ignore[misc]
            try:
                return inner(x)
            finally:
                module._parameters.update(dtensors)

        module.forward = forward

    def last_norm(self, module: Any) -> None:
        """The one before the head: every rank then has all tokens, and computes the same of them."""
        self.norm(module)
        inner = module.forward
        module.forward = lambda x: self._stream.gather(inner(x)[0], self.size * x.shape[1])[None]

    def embedding(self, module: Any) -> None:
        """Each rank looks up some tokens' rows."""
        self._distribute(module, weight=Shard(0))

        def forward(ids: Tensor) -> Tensor:
            weight = local_part(module.weight)
            local_ids = ids - self.rank * len(weight)
            is_local = (local_ids >= 0) & (local_ids < len(weight))
            # The row of the padding token gets no gradient, as in torch's own.
            padding = None if module.padding_idx is None else module.padding_idx - self.rank * len(weight)
            padding = padding if padding is not None and 0 <= padding < len(weight) else None
            rows = F.embedding(local_ids.masked_fill(~is_local, 0), weight, padding).masked_fill(
                ~is_local[..., None], 0
            )
            return ReduceScatterRows.apply(rows[0], self.group)[None]

        module.forward = forward

    def head(self, module: Any) -> None:
        """The output head, whose weight the model reads itself."""
        self._distribute(module, weight=Shard(0), bias=Shard(0))

    def replicated(self, module: Any) -> None:
        """A linear layer that every rank computes alike."""
        self._distribute(module, weight=Replicate(), bias=Replicate())
        module.forward = lambda x: F.linear(x, local_part(module.weight), local_part(module.bias))

    def _distribute(self, module: nn.Module, **placements: Placement) -> None:
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in self._distributed:  # a tied weight stays one
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
    "model.layers.*.self_attn.[qkv]_proj": TensorParallel.columns,
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
"""Pre-norm decoders with gated MLPs and any number of key heads."""

PLANS: Mapping[str, Mapping[str, ParallelStyle]] = dict.fromkeys(("llama", "qwen2", "qwen3"), DENSE)
"""By model type. A plan names every module that has parameters of its own, and the blocks around them."""


def check_plan(config: PretrainedConfig, size: int, *, packed: bool) -> None:
    """Refuse a model that cannot be split over ``size`` ranks.

    Raises:
        ValueError: there is no plan for its family, or a number of its configuration does not divide; says which.
    """
    if size == 1:
        return
    if config.model_type not in PLANS:
        raise ValueError(
            f"model type {config.model_type!r} has no tensor-parallel plan on the fsdp engine, which has some for "
            f"{', '.join(sorted(PLANS))}: leave t out, use the megatron engine, or add a plan to areal.engine.fsdp.tensor_parallel"
        )
    if not packed:
        raise ValueError(
            "fsdp.attention = 'rows' with t: tensor parallelism needs packed attention; leave one of the two out"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        number = getattr(config, name)
        if number % size:
            raise ValueError(
                f"{name} = {number} does not divide over {size} tensor-parallel ranks: choose a t that divides it"
            )


def split_tensors(model: PackedCausalLM, mesh: DeviceMesh) -> None:
    """Split a model that :func:`check_plan` accepts, in place. It may be on the meta device.

    Args:
        mesh: the axis ``tp``.

    Raises:
        ValueError: the family's plan leaves a parameter out.
    """
    parallel, plan = TensorParallel(mesh), PLANS[model.hf.config.model_type]
    for name, module in model.hf.named_modules():
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name, pattern) and not isinstance(module, PassThrough):
                style(parallel, module)
    if model.value_head is not None:
        parallel.replicated(model.value_head)
    model.vocab_group = parallel.group
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(
            f"the tensor-parallel plan of {model.hf.config.model_type!r} leaves out {missing[0]}: add it to the plan"
        )
