"""Layers with a hand-written backward compared with transformers' own modules, and the number of operations of a layer."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as stock_interleaved
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as stock_half_angles
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as stock_rotation

from areal.engine.attention import kernels
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.huggingface import PACKED_ATTENTION
from areal.engine.attention.token_stream import TokenStream
from areal.engine.model import fused_layers
from areal.engine.model.forward_plan import TESTED_FAMILIES
from areal.engine.model.fused_layers import (
    FUSED,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    fuse_layers,
    rms_norm,
    silu_product,
)
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import FAMILIES, tiny_model
from areal.tests.unit.engine.layers.fused_models import CONFIGS, REPLACED, results


def test_every_tested_family_without_recurrent_layers_has_fused_layers() -> None:
    assert set(FUSED) == TESTED_FAMILIES - {"qwen3_5", "qwen3_5_moe"} == set(CONFIGS)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_fused_models_agree_with_transformers_in_float64(family: str) -> None:
    with float64_everywhere():
        config = CONFIGS[family]()
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        stock = tiny_model(config, seed=0).double()
        fused = copy.deepcopy(stock)
        assert fuse_layers(fused, config.model_type) == REPLACED[family]
        ids = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))
        expected, actual = results(stock, ids), results(fused, ids)
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        scale = right.abs().max().clamp_min(1e-3)
        assert ((actual[name] - right).abs().max() / scale).item() < 1e-12, name


def test_other_models_are_left_as_they_are() -> None:
    model = tiny_model(FAMILIES["llama"](), seed=0)
    assert fuse_layers(model, "mistral") == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_copy_of_a_model_reads_its_own_parameters() -> None:
    model = tiny_model(FAMILIES["llama"](), seed=0)
    fuse_layers(model, "llama")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert copied(input_ids=torch.arange(5)[None]).logits.abs().max() > 0.1


def test_other_activations_keep_their_forward() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=8, hidden_act="gelu"))
    assert fuse_layers(mlp, "llama") == 0


# ---- the functions

gradcheck = functools.partial(torch.autograd.gradcheck, raise_exception=False)


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True, seed: int = 0) -> Tensor:
    """Return normal numbers; equal arguments give equal numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("weights", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("options", [{}, {"wide_weight": True}, {"wide_weight": True, "offset": 1.0}], ids=str)
def test_gradient_of_the_norm(options: dict[str, Any], weights: bool) -> None:
    # A large eps, so that its place matters, and rows of different sizes.
    x = (random(2, 3, 8, grad=False) * torch.tensor([0.1, 1.0, 3.0]).view(3, 1)).requires_grad_()
    weight = random(8, grad=weights, seed=1)
    assert gradcheck(lambda *xs: rms_norm(*xs, 0.3, **options), (x, weight))
    expected = x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt() * (options.get("offset", 0.0) + weight)
    torch.testing.assert_close(rms_norm(x, weight, 0.3, **options), expected, rtol=1e-13, atol=1e-13)


def test_gradient_of_the_weight_alone() -> None:
    x, weight = random(5, 8, grad=False), random(8)
    assert gradcheck(lambda w: rms_norm(x, w, 0.3), (weight,))


def test_gradient_of_the_gate() -> None:
    gate, up = random(3, 8), random(3, 8, seed=1)
    assert gradcheck(silu_product, (gate, up))
    torch.testing.assert_close(silu_product(gate, up), F.silu(gate) * up)


ROTATIONS = {
    "halves": (apply_rotary_pos_emb, stock_rotation, 2),
    "half_angles": (apply_rotary_pos_emb, stock_half_angles, 1),
    "interleaved": (apply_rotary_pos_emb_interleave, stock_interleaved, 2),
}
"""Ours, transformers', and how often the angles of a half are repeated."""


@pytest.mark.parametrize(("ours", "stock", "repeats"), ROTATIONS.values(), ids=ROTATIONS)
def test_gradient_of_the_rotation(ours: Any, stock: Any, repeats: int) -> None:
    angles = random(1, 5, 4, grad=False, seed=2).repeat(1, 1, repeats)
    inputs = (random(1, 3, 5, 8), random(1, 2, 5, 8, seed=1), 1.5 * angles.cos(), 1.5 * angles.sin())
    assert gradcheck(ours, inputs)
    for actual, expected in zip(ours(*inputs), stock(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


# ---- rounding in bfloat16


def gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Return the results of a function, and its gradients for random gradients of the results."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outs = function(*leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    grads = [random(*out.shape, dtype=out.dtype, grad=False, seed=7 + i) for i, out in enumerate(outs)]
    torch.autograd.backward(outs, grads)
    return [*outs, *(x.grad for x in leaves if x.grad is not None)]


def test_gate_rounds_as_transformers() -> None:
    gate, up = random(33, 64, dtype=torch.bfloat16), random(33, 64, dtype=torch.bfloat16, seed=1)
    for actual, expected in zip(
        gradients(silu_product, gate, up), gradients(lambda a, b: F.silu(a) * b, gate, up), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("ours", "stock", "repeats"), ROTATIONS.values(), ids=ROTATIONS)
def test_rotation_rounds_as_transformers(ours: Any, stock: Any, repeats: int) -> None:
    bf16 = torch.bfloat16
    angles = random(1, 33, 8, grad=False).repeat(1, 1, repeats)
    inputs = (random(1, 4, 33, 16, dtype=bf16), random(1, 2, 33, 16, dtype=bf16), angles.cos(), angles.sin())
    inputs = tuple(x.to(bf16) for x in inputs)
    for actual, expected in zip(gradients(ours, *inputs), gradients(stock, *inputs), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("module", [LlamaRMSNorm, GptOssRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["same", "wider"])
def test_norm_rounds_as_transformers(module: Any, weight_dtype: torch.dtype) -> None:
    stock = module(64, 1e-5).to(weight_dtype)
    with torch.no_grad():
        stock.weight.add_(0.3 * random(64, dtype=weight_dtype, grad=False))
    fused = copy.deepcopy(stock)
    family = {LlamaRMSNorm: "llama", GptOssRMSNorm: "gpt_oss", Gemma3RMSNorm: "gemma3_text"}[module]
    assert fuse_layers(fused, family) == 1
    x = random(50, 64, dtype=torch.bfloat16)
    expected, actual = gradients(stock, x), gradients(fused, x)
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    # The mean of squares is summed in another order, which rounds a few results to the other side. Without the first of two
    # roundings, a fourth of the results differs.
    for a, e in zip(actual, expected, strict=True):
        assert (a != e).double().mean().item() < 0.02 or a.dtype == torch.float32
        torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)
    ones = (stock.weight.grad, fused.weight.grad)
    torch.testing.assert_close(*ones, rtol=1e-2, atol=1e-2)


# ---- the norm of a GPU: F.rms_norm, which a CPU composes of small operations

NORM_FAMILIES = {"llama": LlamaRMSNorm, "gpt_oss": GptOssRMSNorm, "gemma3_text": Gemma3RMSNorm}


def norms(family: str, eps: float, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a norm of transformers and its fused copy, with weights that differ from their initial values."""
    stock = NORM_FAMILIES[family](64, eps).to(dtype)
    with torch.no_grad():
        stock.weight.add_(0.3 * random(64, dtype=dtype, grad=False))
    fused = copy.deepcopy(stock)
    assert fuse_layers(fused, family) == 1
    return stock, fused


@pytest.mark.parametrize("family", NORM_FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
def test_norm_of_a_gpu_agrees_with_transformers(family: str, dtype: torch.dtype, bound: float) -> None:
    # Inputs of the size of sqrt(eps): another eps changes results by tens of per cent.
    eps = 0.01
    calls = mock.Mock(side_effect=F.rms_norm)
    with (
        float64_everywhere() if dtype == torch.float64 else nullcontext(),
        mock.patch.object(fused_layers, "_has_kernel", lambda x, weight: x.dtype == weight.dtype),
        mock.patch.object(F, "rms_norm", calls),
    ):
        stock, fused = norms(family, eps, dtype)
        x = (eps**0.5 * random(50, 64, grad=False)).to(dtype).requires_grad_()
        expected, actual = gradients(stock, x), gradients(fused, x)
    assert calls.call_count == 1
    for a, e in zip((*actual, fused.weight.grad), (*expected, stock.weight.grad), strict=True):
        assert a.dtype == e.dtype == dtype
        assert ((a - e).abs().max() / e.abs().max()).item() < bound
        # The modules of Gemma and GPT-OSS round once, too: after the weight.
        assert family == "llama" or dtype != torch.bfloat16 or (a != e).double().mean().item() < 0.02


# ---- what is saved, and how many operations run


def test_functions_save_their_inputs_only() -> None:
    saved: list[Tensor] = []
    x, weight, up = random(20, 64), random(64), random(20, 64)
    cos = random(1, 20, 64, grad=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
        silu_product(x, up)
        apply_rotary_pos_emb(x.view(1, 1, 20, 64), up.view(1, 1, 20, 64), cos, cos)
    inputs = {each.untyped_storage().data_ptr() for each in (x, weight, up, cos)}
    assert sum(t.numel() for t in saved if t.untyped_storage().data_ptr() not in inputs) == 20


VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select", "split"),
        *("split_with_sizes", "detach", "permute", "alias", "unfold", "reshape", "as_strided", "chunk"),
        *("empty", "empty_like", "new_empty", "lift_fresh", "promote_types"),
    )
)
"""Operations that run nothing on a device."""


class Operations(TorchDispatchMode):
    """Counts operations, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in VIEWS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("areal_tests::rms_norm", mutates_args=())
def norm_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """Stand in for PyTorch's kernel of a GPU, which is composed of small operations on other devices."""
    return torch.empty_like(x)


@torch.library.custom_op("areal_tests::rms_norm_backward", mutates_args=())
def norm_kernel_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for the backward of the kernel."""
    return torch.empty_like(x), torch.empty_like(weight)


norm_kernel.register_fake(lambda x, weight: torch.empty_like(x))
norm_kernel_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
norm_kernel.register_autograd(
    lambda ctx, grad: norm_kernel_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def operations(family: str, layers: int, fused: bool) -> tuple[Counter[str], Counter[str]]:
    """Return the operations of a decoder in bfloat16 on a meta device, in a forward and in a backward."""
    whole = CONFIGS[family]()
    config = whole.get_text_config()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
        ids = torch.zeros(1, 32, dtype=torch.long)
    if fused:
        fuse_layers(model, whole.model_type)
    layout = ContextParallel(None).layout(TokenStream.of((20, 12), 32), "meta")
    with (
        mock.patch.object(kernels, "_runs_varlen", return_value=True),
        mock.patch.object(fused_layers, "_has_kernel", lambda x, weight: x.dtype == weight.dtype),
        mock.patch.object(F, "rms_norm", lambda x, shape, weight, eps: norm_kernel(x, weight)),
    ):
        with Operations() as forward:
            out = model(input_ids=ids, position_ids=ids, use_cache=False, packed=layout).last_hidden_state
        with Operations() as backward:
            out.sum().backward()
    return forward.count, backward.count


BOUNDS = {
    **{"deepseek_v3": (75, 102), "gemma3": (54, 66), "gemma3_text": (54, 66), "gpt_oss": (55, 91), "llama": (26, 47)},
    **{"qwen2": (26, 50), "qwen2_5_vl": (26, 50), "qwen2_vl": (26, 50), "qwen3": (28, 47), "qwen3_moe": (47, 69)},
    **{"qwen3_vl": (28, 47)},
}
"""Most operations of a layer, forward and backward: 2 and 3 more than were counted with torch 2.13."""


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_layer_runs_few_operations_on_a_gpu(family: str) -> None:
    counts = []
    for fused in (False, True):
        two, three = operations(family, 2, fused), operations(family, 3, fused)
        counts.append(tuple((more - less).total() for less, more in zip(two, three, strict=True)))
    stock, ours = counts
    assert ours[0] <= BOUNDS[family][0] < stock[0]
    assert ours[1] <= BOUNDS[family][1] < stock[1]
    # 54 and 110 operations of transformers' own layers of Qwen3 were counted with torch 2.9 (GPU audit, C5).
    if family == "qwen3":
        assert 50 <= stock[0] <= 54
        assert 100 <= stock[1] <= 110
        assert ours[0] <= 0.6 * 54
        assert ours[1] <= 0.6 * 110
