"""Activation checkpointing: memory kept between forward and backward, and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from areal.engine.fsdp.activation_checkpointing import recompute_layers

TOKENS, WIDTH, LAYERS = 64, 16, 4


class Layer(nn.Module):
    """Attention and an MLP with many cheap operations."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        normed = self.norm(x)
        heads = [each(normed).view(1, TOKENS, 2, WIDTH // 2).transpose(1, 2) for each in (self.q, self.k, self.v)]
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        h = self.up(self.norm(x))
        for _ in range(6):
            h = torch.tanh(h) * torch.sigmoid(h)
        return x + self.down(h)


class Alive(TorchDispatchMode):
    """Bytes of operation results that are still alive, excluding views of ``weights``."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._weights:
                    self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def nbytes(self) -> int:
        return sum(size for reference, size in self._found.values() if not reference.expired())


@dataclass
class Run:
    """Bytes kept for the backward, its floating-point operations, forward calls per layer, and gradients."""

    kept: int
    flops: int
    calls: list[int]
    gradients: list[Tensor]


def run(how: Any, fraction: float = 1.0) -> Run:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    recompute_layers(layers, how, fraction)
    x = torch.randn(1, TOKENS, WIDTH)
    with Alive([p for layer in layers for p in layer.parameters()]) as alive:
        for layer in layers:
            x = layer(x)
        total = x.square().sum()
        kept = alive.nbytes
    with FlopCounterMode(display=False) as counter:
        total.backward()
    gradients = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    return Run(kept, counter.get_total_flops(), [layer.calls for layer in layers], gradients)


def test_checkpointing_modes_save_memory_and_recompute_as_documented() -> None:
    none, selective, full = run("none"), run("selective"), run("full")
    state = TOKENS * WIDTH * 4  # bytes of a hidden state in float32
    assert full.kept <= LAYERS * state + 4  # a hidden state for each layer, and the loss
    assert selective.kept < 0.25 * none.kept
    assert none.calls == [1] * LAYERS
    assert selective.calls == full.calls == [2] * LAYERS
    assert selective.flops == none.flops  # no additional matrix product
    assert full.flops > 1.3 * none.flops  # all tensors except those that no backward needs
    for other in (selective, full):
        assert all(map(torch.equal, other.gradients, none.gradients))


@pytest.mark.parametrize(
    ("fraction", "calls"), [(0.5, [1, 2, 1, 2]), (0.25, [1, 1, 1, 2]), (0.75, [1, 2, 2, 2]), (1.0, [2, 2, 2, 2])]
)
def test_fraction_of_checkpointed_layers_is_spread_evenly(fraction: float, calls: list[int]) -> None:
    assert run("full", fraction).calls == calls
