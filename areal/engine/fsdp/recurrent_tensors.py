"""Tensor parallelism of recurrent layers: each rank computes some heads, or channels, of all tokens.

No state passes between ranks. Weights that consist of several matrices, and kernels of convolutions over their outputs, are kept on every
rank, which computes its rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from areal.engine.fsdp.tensor_parallel import TensorParallel
from areal.utils.dtensor import take_rows


def delta_rule(parallel: TensorParallel, module: Any) -> None:
    """Split a layer of the gated delta rule of Qwen3.5 by heads."""
    parallel.block(module)
    mixed = [module.key_dim, module.key_dim, module.value_dim]
    parallel.stacked_columns(module.in_proj_qkv, mixed)
    for linear in (module.in_proj_z, module.in_proj_b, module.in_proj_a):
        parallel.columns(linear)
    parallel.norm(module.norm)
    _divide(parallel, module, module.conv1d, mixed, ("key_dim", "value_dim", "num_k_heads", "num_v_heads"))


def mamba2(parallel: TensorParallel, module: Any) -> None:
    """Split a layer of Mamba-2 of Nemotron-H by heads and their groups; its norm is over the channels of a group."""
    parallel.block(module)
    inner, states = module.intermediate_size, module.n_groups * module.ssm_state_size
    mixed = [inner, states, states]
    parallel.stacked_columns(module.in_proj, [inner, *mixed, module.num_heads])
    parallel.with_local(module.norm, {module.norm: parallel.divide(module.norm)})
    _divide(parallel, module, module.conv1d, mixed, ("intermediate_size", "conv_dim", "num_heads", "n_groups"))


def short_convolution(parallel: TensorParallel, module: Any) -> None:
    """Split a gated convolution of LFM2 by channels."""
    parallel.block(module)
    channels = module.conv.out_channels
    parallel.stacked_columns(module.in_proj, [channels] * 3)
    _divide(parallel, module, module.conv, [channels], ())


def _divide(
    parallel: TensorParallel, module: Any, convolution: nn.Module, mixed: Sequence[int], sizes: Sequence[str]
) -> None:
    """Split what a recurrent layer reads itself, and its output projection.

    Args:
        parallel: the ranks.
        module: the layer.
        convolution: over the channels of several matrices.
        mixed: channels of each.
        sizes: attributes of the layer that its forward divides tensors by: of this rank's heads from now on.
    """
    parallel.rows(module.out_proj)
    own, kernel = parallel.divide(module), parallel.replicate(convolution)
    rows = parallel.rows_of_each(mixed)

    def channels(parameter: Tensor) -> Tensor:
        return take_rows(kernel(parameter), rows)

    parallel.with_local(module, {module: own, convolution: channels})
    for name in sizes:
        setattr(module, name, getattr(module, name) // parallel.size)
