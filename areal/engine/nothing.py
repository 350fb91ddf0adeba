"""The loss that takes part in every collective and adds exactly nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api.batch import TokenOutputs


def add_nothing(outputs: TokenOutputs) -> Tensor:
    """A loss of 0 whose backward reaches every output with a gradient of exactly 0, whatever the outputs' values are."""
    tensors = [x for x in _leaves(outputs) if x.requires_grad]
    if not tensors:
        raise ValueError("no output of the model depends on a parameter that is trained")
    return _Nothing.apply(*tensors)


def pytree_map(fn: Any, outputs: TokenOutputs) -> TokenOutputs:
    """``outputs`` with ``fn`` applied to every tensor."""
    values = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    return TokenOutputs(**{k: v if v is None else pytree.tree_map(fn, v) for k, v in values.items()})


def _leaves(outputs: TokenOutputs) -> list[Tensor]:
    return [
        x for f in dataclasses.fields(outputs) for x in pytree.tree_leaves(getattr(outputs, f.name)) if x is not None
    ]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
