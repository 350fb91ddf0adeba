"""Layers of transformers with a hand-written backward: RMSNorm, the gate of a SwiGLU layer, and rotary embedding.

They save their inputs only, and take fewer operations.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from areal.utils.functional.product import linear_product

# ---- RMSNorm (Zhang and Sennrich, 2019)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, wide_weight: bool = False, offset: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last dimension.

    Statistics are computed in at least float32. On a GPU this is one kernel of PyTorch, which rounds to the dtype of ``x`` once, after the
    weight. With an offset, the kernel runs in at least float32 between two casts. Elsewhere the rounding is that of transformers' modules.

    Args:
        x: ``[..., N]``, of any floating dtype.
        weight: ``[N]``, of any floating dtype.
        eps: added to the mean of squares.
        wide_weight: multiply by the weight in at least float32, and round after that. Otherwise the normalised row is rounded to the dtype
            of ``x`` first.
        offset: added to the weight, in at least float32. Requires ``wide_weight``.

    Returns:
        ``[..., N]``, in the dtype of ``x``. Without ``wide_weight`` a wider weight widens it.
    """
    if _has_kernel(x, weight):
        if not offset:
            return F.rms_norm(x, weight.shape, weight, eps)
        # The sum of offset and weight is not rounded.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, _widened(weight, wide, offset), eps).to(x.dtype)
    out: Tensor = _RMSNorm.apply(x, weight, eps, wide_weight, offset)
    return out


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``F.rms_norm`` is one kernel. Elsewhere PyTorch composes it of small operations."""
    return x.is_cuda and x.dtype == weight.dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, wide_weight: bool, offset: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = _inverse_rms(x, eps, wide)
        ctx.save_for_backward(x, weight, rstd)
        ctx.wide_weight, ctx.offset = wide_weight, offset
        if wide_weight:
            return (x * rstd).mul_(_widened(weight, wide, offset)).to(x.dtype)
        return _times((x * rstd).to(x.dtype), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wide, (needs_x, needs_weight) = rstd.dtype, ctx.needs_input_grad[:2]
        normed, grad = x * rstd, grads[0]
        grad_weight: Tensor | None = None
        if needs_weight and x.dtype == weight.dtype == wide and not ctx.offset:
            # Without rounding, the products for the gradient of the weight also give the row sums of the input's.
            # A row-major buffer: gradients may be transposed.
            products = torch.mul(grad, normed, out=grad.new_empty(x.shape))
            rows = products.view(-1, x.shape[-1])
            sums, grad_weight = rows @ weight, rows.sum(0)
            grad_normed = torch.mul(grad, weight, out=products)
        else:
            if ctx.wide_weight:
                grad, factors, scale = grad.to(wide), normed, _widened(weight, wide, ctx.offset)
            else:
                # The forward rounded the normalised rows before it multiplied by the weight.
                factors, scale = normed.to(x.dtype), weight
            if needs_weight:
                grad_weight = (grad * factors).flatten(0, -2).sum(0).to(weight.dtype)
            grad_normed = (grad * scale).to(factors.dtype).to(wide)
            sums = torch.linalg.vecdot(grad_normed, normed)
        if not needs_x:
            return None, grad_weight, None, None, None
        return _grad_x(grad_normed, normed, sums.view(rstd.shape), rstd).to(x.dtype), grad_weight, None, None, None


def _inverse_rms(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return ``1 / sqrt(mean(x ** 2) + eps)`` of each row, ``[..., 1]``."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _grad_x(grad_normed: Tensor, normed: Tensor, sums: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of the input, ``rstd * (g - y * mean(g * y))``, in the memory of ``g``.

    Args:
        grad_normed, normed: ``g`` and ``y``, the normalised rows and their gradient. ``[..., N]``.
        sums, rstd: ``sum(g * y)`` of each row, overwritten, and its inverse root mean square. ``[..., 1]``.
    """
    return grad_normed.addcmul_(normed, sums.div_(-normed.shape[-1])).mul_(rstd)


def _widened(weight: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    weight = weight.to(dtype)
    return weight + offset if offset else weight


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product, in place if the weight does not widen it."""
    return x.mul_(weight) if torch.promote_types(x.dtype, weight.dtype) == x.dtype else x * weight


# ---- the gate of a SwiGLU layer (Shazeer, 2020)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``. Results and gradients are rounded as those of the two operations.

    Args:
        gate, up: ``[..., N]``, of one floating dtype.

    Returns:
        ``[..., N]``, in the same dtype.
    """
    out: Tensor = _SiluProduct.apply(gate, up)
    return out


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate) if ctx.needs_input_grad[0] else None
        grad_up = F.silu(gate).mul_(grads[0]) if ctx.needs_input_grad[1] else None
        return grad_gate, grad_up


# ---- rotary embedding (Su et al., 2021): the backward is the inverse rotation


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, as transformers' function of this name: the first half of a head is paired with the second.

    Args:
        q, k: ``[B, H, S, D]`` with ``D`` even, of any floating dtype. The number of heads may differ.
        cos, sin: ``[B, S, D]``, without gradient. Both halves contain the same angles; the second may be left out: ``[B, S, D / 2]``.
        unsqueeze_dim: dimension of the heads.

    Returns:
        Rotated queries and keys. Wider angles widen them.
    """
    return _rotated(q, k, cos, sin, unsqueeze_dim, False)


def apply_rotary_pos_emb_interleave(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, as transformers' function of this name: adjacent entries of a head are paired.

    First entries of the pairs become the first half of the result. The other arguments are those of :func:`apply_rotary_pos_emb`.
    """
    return _rotated(q, k, cos, sin, unsqueeze_dim, True)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return _Rotation.apply(q, cos, sin, interleaved), _Rotation.apply(k, cos, sin, interleaved)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, ctx.interleaved = x.dtype, interleaved
        if not interleaved:
            return _rotate(x.unflatten(-1, (2, -1)), cos, sin, 1).flatten(-2)
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2)
        out = pairs.new_empty(pairs.shape, dtype=torch.result_type(x, cos))
        return _rotate(pairs, cos, sin, 1, out).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs, (cos, sin) = grads[0].unflatten(-1, (2, -1)), ctx.saved_tensors
        if not ctx.interleaved:
            return _rotate(pairs, cos, sin, -1).flatten(-2).to(ctx.dtype), None, None, None
        # Memory in the order of the input: pairs are adjacent.
        out = pairs.new_empty(pairs.transpose(-1, -2).shape)
        _rotate(pairs, cos, sin, -1, out.transpose(-1, -2))
        return out.flatten(-2).to(ctx.dtype), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor | None = None) -> Tensor:
    """Rotate the pairs ``x[..., 0, :]`` and ``x[..., 1, :]`` by the angles, or by their negatives with ``sign = -1``."""
    half = x.shape[-1]
    if out is None and cos.shape[-1] == 2 * half:
        out = (x.flatten(-2) * cos).unflatten(-1, (2, -1))  # on a CPU faster than two rows of half the length
    else:
        out = torch.mul(x, cos[..., :half].unsqueeze(-2), out=out)
    sin = sin[..., :half]
    first, second, x_first, x_second = out[..., 0, :], out[..., 1, :], x[..., 0, :], x[..., 1, :]
    if out.element_size() < 4:
        # Each product is rounded before the sum, as in transformers.
        first.sub_(x_second * sin, alpha=sign)
        second.add_(x_first * sin, alpha=sign)
    else:
        first.addcmul_(x_second, sin, value=-sign)
        second.addcmul_(x_first, sin, value=sign)
    return out


# ---- replacement

_ROTATIONS = (apply_rotary_pos_emb.__name__, apply_rotary_pos_emb_interleave.__name__)
"""Names of the functions in modules of transformers."""

FUSED_NORM_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of inputs of fused norms. Norms of transformers compute float64 in float32: a float64 model keeps these numbers."""


@dataclass(frozen=True)
class FusedLayers:
    """Classes of a model type whose forward is one of the known formulas. ``None`` for another formula.

    Attributes:
        norm: name of the norm's class.
        mlp: name of the class with ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
        attention: name of the class that calls ``apply_rotary_pos_emb`` for halves of heads, or ``apply_rotary_pos_emb_interleave``.
        wide_weight, offset: see :func:`rms_norm`.
    """

    norm: str
    mlp: str | None = None
    attention: str | None = None
    wide_weight: bool = False
    offset: float = 0.0


FUSED: Mapping[str, FusedLayers] = {
    "deepseek_v3": FusedLayers("DeepseekV3RMSNorm", "DeepseekV3MLP", "DeepseekV3Attention"),
    **dict.fromkeys(
        ("gemma3", "gemma3_text"),
        FusedLayers("Gemma3RMSNorm", None, "Gemma3Attention", wide_weight=True, offset=1.0),
    ),
    "gpt_oss": FusedLayers("GptOssRMSNorm", None, "GptOssAttention", wide_weight=True),
    "llama": FusedLayers("LlamaRMSNorm", "LlamaMLP", "LlamaAttention"),
    "qwen2": FusedLayers("Qwen2RMSNorm", "Qwen2MLP", "Qwen2Attention"),
    "qwen2_5_vl": FusedLayers("Qwen2_5_VLRMSNorm", "Qwen2MLP", "Qwen2_5_VLAttention"),
    "qwen2_vl": FusedLayers("Qwen2VLRMSNorm", "Qwen2MLP", "Qwen2VLAttention"),
    "qwen3": FusedLayers("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"),
    "qwen3_moe": FusedLayers("Qwen3MoeRMSNorm", "Qwen3MoeMLP", "Qwen3MoeAttention"),
    "qwen3_vl": FusedLayers("Qwen3VLTextRMSNorm", "Qwen3VLTextMLP", "Qwen3VLTextAttention"),
}
"""Fused layers by model type. Each is compared with transformers' own modules by the tests."""


def fused_kinds(model_type: str) -> str:
    """Return the kinds of layers of a model type that are fused, for a log."""
    if model_type not in FUSED:
        return ""
    fused = FUSED[model_type]
    return ", ".join(
        name
        for name, kind in (("RMSNorm", fused.norm), ("SwiGLU", fused.mlp), ("rotary embedding", fused.attention))
        if kind
    )


@dataclass(frozen=True)
class LayerFunctions:
    """Functions of fused layers, with the signatures of this module's."""

    rms_norm: Callable[..., Tensor]
    silu_product: Callable[[Tensor, Tensor], Tensor]
    apply_rotary_pos_emb: Callable[..., tuple[Tensor, Tensor]]


def fuse_layers(model: nn.Module, model_type: str, functions: LayerFunctions | None = None) -> int:
    """Replace the forward of layers of a model, in place. Parameters, buffers and classes stay.

    Args:
        model: model of transformers, or some of its layers.
        model_type: model type of its configuration. Types that :data:`FUSED` lacks are left as they are.
        functions: functions that the layers call; ``None`` for those of this module.

    Returns:
        Number of replaced forwards.
    """
    fused = FUSED.get(model_type)
    if fused is None:
        return 0
    functions = functions or LayerFunctions(rms_norm, silu_product, apply_rotary_pos_emb)
    replaced = 0
    for module in model.modules():
        name = type(module).__name__
        forward: Any = None
        if name == fused.norm:
            forward = _norm_forward(fused, functions.rms_norm)
        elif name == fused.mlp and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            forward = _gated_forward(functions.silu_product)
        elif name == fused.attention and set(_ROTATIONS) & {*type(module).forward.__code__.co_names}:
            forward = _with_rotation(type(module).forward, functions.apply_rotary_pos_emb)
        if forward is not None:
            # A bound method: a copy of the model gets a method of the copied module.
            module.forward = types.MethodType(forward, module)
            replaced += 1
    return replaced


def replace_linears(model: nn.Module) -> None:
    """Let linear layers compute by :func:`areal.utils.functional.product.linear_product`, in place. Subclasses are left as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = types.MethodType(_linear_forward, module)  # type: ignore[method-assign]


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear_product(x, self.weight, self.bias)


def _norm_forward(fused: FusedLayers, norm: Callable[..., Tensor]) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype not in FUSED_NORM_DTYPES:
            own: Tensor = type(self).forward(self, hidden_states)
            return own
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return norm(hidden_states, self.weight, eps, wide_weight=fused.wide_weight, offset=fused.offset)

    return forward


def _gated_forward(product: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(product(self.gate_proj(x), self.up_proj(x)))
        return out

    return forward


def _with_rotation(function: Any, rotation: Any) -> Any:
    """Return a copy of an attention's forward that finds other rotations under the names it calls."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict(zip(_ROTATIONS, (rotation, apply_rotary_pos_emb_interleave), strict=True))},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
