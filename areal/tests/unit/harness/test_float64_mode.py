"""Float64 mode of the tests: it works, it is necessary, and it leaves no state behind."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import FAMILIES, VOCAB, model_dir

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


class SeenDtypes(TorchDispatchMode):
    """Collect the floating dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            leaf.dtype
            for leaf in tree_leaves(out)
            # Before torch 2.13, recomputation makes an empty tensor of its own.
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
        }
        return out


def load(family: str, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float64, **EAGER, **options)


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(0, 40) * 7 % VOCAB
    return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_forward_and_backward_are_float64_throughout(family: str, recompute: bool) -> None:
    with float64_everywhere():
        model = load(family).train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with SeenDtypes() as dtypes:
            logits(model).square().sum().backward()
    assert dtypes.seen == {torch.float64}


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_models_are_inexact_without_float64_mode(family: str) -> None:
    """Two equivalent computations of the logits agree to float64 rounding inside the mode, and only to float32 rounding outside."""
    with float64_everywhere():
        exact = logits(load(family))
        scaled = logits(_equivalent(load(family)))
    model = load(family)
    with SeenDtypes() as dtypes:
        upcast = logits(model)
    assert (exact - scaled).abs().max() <= 1e-12 * exact.abs().max()
    assert (exact - upcast).abs().max() > 1e-9
    assert torch.float32 in dtypes.seen


def _equivalent(model: PreTrainedModel) -> PreTrainedModel:
    """Return an equivalent model that rounds differently: values are scaled by 3 and the output projection by 1/3."""
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "kv_b_proj"):
                layer.self_attn.kv_a_layernorm.weight *= 3
                layer.self_attn.kv_b_proj.weight /= 3
                continue
            layer.self_attn.v_proj.weight *= 3
            layer.self_attn.o_proj.weight /= 3
            if layer.self_attn.v_proj.bias is not None:
                layer.self_attn.v_proj.bias *= 3
    return model


def test_float64_mode_restores_torch() -> None:
    before = (
        torch.Tensor.to,
        torch.Tensor.float,
        torch.Tensor.softmax,
        torch.softmax,
        torch.nn.functional.softmax,
        torch.arange,
    )
    with float64_everywhere():
        assert torch.zeros(1, dtype=torch.float64).float().dtype == torch.float64
        assert torch.zeros(1).float().dtype == torch.float32
        assert torch.zeros(1, dtype=torch.bfloat16).to(torch.float32).dtype == torch.float32
    assert before == (
        torch.Tensor.to,
        torch.Tensor.float,
        torch.Tensor.softmax,
        torch.softmax,
        torch.nn.functional.softmax,
        torch.arange,
    )
    assert torch.zeros(1, dtype=torch.float64).float().dtype == torch.float32
