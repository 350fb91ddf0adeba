"""Activation checkpointing: memory kept between forward and backward, and recomputation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from areal.engine.attention.invariant import invariant_attention
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention, varlen_attn
from areal.engine.fsdp import activation_checkpointing
from areal.engine.fsdp.activation_checkpointing import recompute_layers, saved_ops
from areal.engine.fsdp.compile import compile_layers
from areal.utils.collectives import exchange_rows

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


# ---- compiled layers


class Gated(nn.Module):
    """A layer without attention, with many cheap operations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        # The partitioner keeps the results of long chains and of sums, unless it is told to count products alone.
        for _ in range(3):
            h = torch.tanh(h) * torch.sigmoid(h)
            h = h - h.cumsum(-1)
        return x + self.down(h)


def run_compiled(selective: bool) -> Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [Gated() for _ in range(LAYERS)]
    compile_layers(layers, "aot_eager", layers if selective else [])
    kept: dict[int, Tensor] = {}
    parameters = {p.untyped_storage()._cdata for layer in layers for p in layer.parameters()}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x
        return x

    x = torch.randn(1, TOKENS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for layer in layers:
            x = layer(x)
    nbytes = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in parameters)
    with FlopCounterMode(display=False) as counter:
        x.square().sum().backward()
    gradients = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    return Run(nbytes, counter.get_total_flops(), [], gradients)


def test_compiled_layers_recompute_all_but_products() -> None:
    plain, selective = run_compiled(False), run_compiled(True)
    assert 0 < selective.kept < 0.7 * plain.kept, (plain.kept, selective.kept)
    assert selective.flops == plain.flops > 0
    assert all(map(torch.equal, selective.gradients, plain.gradients))


# ---- operations of libraries


class Counted(TorchDispatchMode):
    """Number of calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


class Packed(nn.Module):
    """Attention over packed sequences by the kernel that is used on a GPU, between cheap operations."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = torch.tanh(x).view(-1, 2, WIDTH // 2)
        out = varlen_attn(q, q, q, cu_seqlens, cu_seqlens, TOKENS, TOKENS, window_size=(-1, 0))
        return torch.tanh(out.flatten(1))


@pytest.mark.parametrize(("how", "calls"), [("selective", 1), ("full", 2)])
def test_attention_kernel_of_a_gpu_runs_once(how: Any, calls: int) -> None:
    layer = Packed()
    recompute_layers([layer], how, 1.0)
    # The kernel has no implementation for a CPU: on the meta device, the same operations are dispatched.
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Counted() as counted:
        layer(x, torch.empty(3, dtype=torch.int32, device="meta")).sum().backward()
    assert counted.calls[torch.ops.torch_attn._varlen_attn.default] == calls
    assert counted.calls[torch.ops.torch_attn._varlen_attn_backward.default] == 1
    assert counted.calls[torch.ops.aten.tanh.default] == 4


class PlainAttention(nn.Module):
    """Packed attention by plain matrix products, between two projections."""

    def __init__(self, kernel: Any, options: AttentionOptions) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self._kernel, self._options = kernel, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 6, WIDTH // 2).split(2, 1)
        return self.out(self._kernel(q, k, v, Segments.of([len(x)]), self._options).flatten(1))


PLAIN = {
    "softcap": (packed_attention, AttentionOptions(0.3, softcap=2.0)),
    "sinks": (packed_attention, AttentionOptions(0.3, sinks=torch.zeros(2))),
    "batch-invariant": (invariant_attention, AttentionOptions(0.3)),
}
"""Kernel and options."""


def run_plain(how: Any, case: str, tokens: int) -> Run:
    torch.manual_seed(0)
    layer = PlainAttention(*PLAIN[case])
    recompute_layers([layer], how, 1.0)
    x = torch.randn(tokens, WIDTH)
    with Alive(list(layer.parameters())) as alive:
        out = layer(x)
        kept = alive.nbytes
    out.square().sum().backward()
    return Run(kept, 0, [], [p.grad for p in layer.parameters() if p.grad is not None])


@pytest.mark.parametrize("case", PLAIN)
def test_logits_of_plain_attention_are_not_kept(case: str) -> None:
    """600 tokens are two blocks of queries. Their gradients are those without checkpointing."""
    none, selective = run_plain("none", case, 600), run_plain("selective", case, 600)
    assert selective.kept <= none.kept
    assert selective.kept <= 2 * run_plain("selective", case, 300).kept
    assert all(map(torch.equal, selective.gradients, none.gradients))


class Product(nn.Module):
    """A matrix product inside of an operation with a Python implementation."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self._product(torch.tanh(x)))


def multiply_gradients(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad @ x.T + x.T @ grad


@pytest.mark.parametrize(("listed", "calls"), [(True, 1), (False, 2)])
def test_operation_with_a_python_implementation_runs_once_if_listed(listed: bool, calls: int) -> None:
    runs = []

    @torch.library.custom_op("areal_tests::attention", mutates_args=())
    def product(x: Tensor) -> Tensor:
        runs.append(1)
        return x @ x

    product.register_autograd(
        multiply_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
    )
    names = (("areal_tests", "attention"), ("areal_tests", "missing")) if listed else ()
    gradients = []
    for how in ("none", "selective"):
        layer = Product(product)
        with mock.patch.object(activation_checkpointing, "_SAVED_CUSTOM_OPS", names):
            recompute_layers([layer], how, 1.0)
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        runs.clear()
        layer(x).sum().backward()
        gradients.append(x.grad)
    assert len(runs) == calls
    assert torch.equal(*gradients)


def test_saved_operations_are_those_of_imported_libraries() -> None:
    assert exchange_rows.__module__ == "areal.utils.collectives"  # which defines the operation
    saved = {op.name() for op in saved_ops()}
    assert {"torch_attn::_varlen_attn", "areal::exchange_rows", "aten::mm"} <= saved
    assert ("flash_attn", "_flash_attn_varlen_forward") in activation_checkpointing._SAVED_CUSTOM_OPS
