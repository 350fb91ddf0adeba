"""Arguments that Liger's functions get, without Triton: the kernels themselves are compared in areal/tests/liger."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from areal.api import FSDPConfig, TrainEngineConfig
from areal.engine.fsdp import engine as fsdp_engine
from areal.engine.model import fused_layers
from areal.engine.model.fused_layers import apply_rotary_pos_emb, fuse_layers, rms_norm, silu_product
from areal.engine.model.liger import layer_functions, liger_functions
from areal.tests.grid.models import FAMILIES, tiny_model
from areal.tests.harness.tiny import family_dir, global_batch, loss, started

CUDA = torch.device("cuda")


class Ops(SimpleNamespace):
    """Stand in for ``liger_kernel.ops``: record the arguments, and compute with this package's functions.

    As Liger does, rotate queries and keys in place.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        for name in ("RMSNorm", "SiLUMul", "Rope"):
            function = SimpleNamespace(apply=lambda *args, _name=name: self._run(_name, args))
            setattr(self, f"Liger{name}Function", function)

    def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((name, tuple(x for x in args if not isinstance(x, Tensor))))
        if name == "RMSNorm":
            x, weight, eps, offset, casting, _ = args
            return rms_norm(x, weight, eps, wide_weight=casting == "gemma", offset=offset)
        if name == "SiLUMul":
            return silu_product(*args)
        rotated = apply_rotary_pos_emb(*args)
        for x, new in zip(args, rotated, strict=False):
            x.data.copy_(new.data)
        return rotated


def kinds(ops: Ops) -> dict[str, int]:
    return {name: sum(call == name for call, _ in ops.calls) for name in ("RMSNorm", "SiLUMul", "Rope")}


@pytest.mark.parametrize(
    ("family", "norm"),
    [("qwen3", (1e-6, 0.0, "llama", False)), ("gemma3_text", (1e-6, 1.0, "gemma", False))],
)
def test_model_calls_liger_with_the_formula_of_its_family(family: str, norm: tuple[Any, ...]) -> None:
    model, ops = tiny_model(FAMILIES[family](), seed=0), Ops()
    expected = model(input_ids=torch.arange(7)[None]).logits
    fuse_layers(model, family, layer_functions(ops))
    torch.testing.assert_close(model(input_ids=torch.arange(7)[None]).logits, expected, rtol=1e-5, atol=1e-5)
    assert {args for name, args in ops.calls if name == "RMSNorm"} == {norm}
    layers = model.config.num_hidden_layers
    gates = 0 if family == "gemma3_text" else layers
    norms = layers * (6 if family == "gemma3_text" else 4) + 1
    assert kinds(ops) == {"RMSNorm": norms, "SiLUMul": gates, "Rope": layers}


def test_norm_of_gpt_oss_rounds_after_the_weight() -> None:
    ops = Ops()
    layer_functions(ops).rms_norm(torch.ones(2, 4), torch.ones(4), 0.1, wide_weight=True)
    assert ops.calls == [("RMSNorm", (0.1, 0.0, "gemma", False))]


def test_rotation_does_not_change_its_inputs() -> None:
    # Selective checkpointing keeps the results of the projections, and computes the rotation from them again.
    q, k, angles = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 5, 8)
    before = q.clone(), k.clone()
    layer_functions(Ops()).apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_mixed_dtypes_keep_the_functions_of_torch() -> None:
    ops, half = Ops(), torch.bfloat16
    functions, angles = layer_functions(ops), torch.ones(1, 3, 4)
    x, weight = torch.randn(2, 4, dtype=half), torch.ones(4)
    assert functions.rms_norm(x, weight, 1e-6).dtype == torch.float32
    q = torch.randn(1, 2, 3, 4, dtype=half)
    assert functions.apply_rotary_pos_emb(q, q, angles, angles)[0].dtype == torch.float32
    assert ops.calls == []


def test_angles_of_one_half_keep_the_rotation_of_torch() -> None:
    ops, q, angles = Ops(), torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2)
    rotated = layer_functions(ops).apply_rotary_pos_emb(q, q, angles.cos(), angles.sin())
    both = angles.repeat(1, 1, 2)
    assert torch.equal(rotated[0], apply_rotary_pos_emb(q, q, both.cos(), both.sin())[0])
    assert ops.calls == []


@pytest.mark.world(1)
def test_engine_trains_with_liger_if_asked() -> None:
    ops, steps = Ops(), []
    with mock.patch.object(fsdp_engine, "liger_functions", return_value=layer_functions(ops)):
        for kernels in ("torch", "liger"):
            with started("fsdp:d1", path=family_dir("llama"), fsdp=FSDPConfig(layer_kernels=kernels)) as engine:
                applied = engine._require_components().applied["fused layers"]
                assert applied == f"RMSNorm, SwiGLU, rotary embedding by {kernels}"
                assert not ops.calls
                step = engine.train_batch(global_batch(), loss)
                steps.append((step.loss, step.grad_norm))
    assert min(kinds(ops).values()) > 0
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)


def test_partly_fused_families_name_their_layers() -> None:
    assert fused_layers.fused_kinds("gpt_oss") == "RMSNorm, rotary embedding"
    assert fused_layers.fused_kinds("mistral") == ""


# ---- refusals


def test_package_is_imported_on_cuda_alone() -> None:
    ops = Ops()
    with mock.patch.dict(sys.modules, {"liger_kernel": nn.Module, "liger_kernel.ops": ops}):  # type: ignore[dict-item]
        liger_functions("llama", CUDA).rms_norm(torch.ones(2, 4), torch.ones(4), 0.1)
        assert kinds(ops)["RMSNorm"] == 1
        with pytest.raises(ValueError, match=r"layer_kernels = 'liger' on device 'cpu': .* need CUDA; set 'torch'"):
            liger_functions("llama", torch.device("cpu"))


def test_refusals_name_the_way_out() -> None:
    with (
        mock.patch.dict(sys.modules, {"liger_kernel": None}),
        pytest.raises(ValueError, match=r"without liger-kernel .*pip install 'areal\[liger\]'"),
    ):
        liger_functions("llama", CUDA)
    with pytest.raises(ValueError, match=r"model_type = 'mistral': its families are .*llama, qwen2"):
        liger_functions("mistral", CUDA)


@pytest.mark.world(1)
def test_engine_refuses_before_anything_is_allocated() -> None:
    with (
        mock.patch.object(fsdp_engine, "build_param_mesh", side_effect=AssertionError("too late")),
        pytest.raises(ValueError, match="layer_kernels = 'liger' on device 'cpu'"),
        started("fsdp:d1", path=family_dir("llama"), fsdp=FSDPConfig(layer_kernels="liger")),
    ):
        pass


@pytest.mark.parametrize(
    ("other", "named"), [({"fsdp": {"compile": True}}, "fsdp.compile = True"), ({"dtype": "float64"}, "float64")]
)
def test_options_that_exclude_liger_are_refused(other: dict[str, Any], named: str) -> None:
    fields: dict[str, Any] = {"path": "x", **other, "fsdp": {**other.get("fsdp", {}), "layer_kernels": "liger"}}
    if "dtype" in other:
        fields |= {"master_dtype": "float64", "grad_reduce_dtype": "float64"}
    with pytest.raises(ValueError, match=f"fsdp.layer_kernels = 'liger' with .*{named}.*leave one"):
        TrainEngineConfig(**fields)
