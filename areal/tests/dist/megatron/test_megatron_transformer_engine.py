"""The Megatron engine where Transformer Engine is installed: its optimizer is a stand-in of the same semantics."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from areal.api import FinetuneSpec, LoRAConfig, SaveLoadMeta
from areal.engine.registry import create_engine
from areal.tests.dist.checkpoint.checkpoints import step
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import config, global_batch, loss, same_bits, started, weights_of
from areal.tests.unit.gpu.transformer_engine import FusedAdam, FusedAdamBefore21, fused_adam

pytest.importorskip("megatron.core")

from areal.engine.megatron.model import config as model_config

PLAIN = {"megatron": {"distributed_optimizer": False}}
NARROW = {"megatron": {"optimizer_state_dtype": "bfloat16"}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "d1": (1, "d1", {}),
    "d1-plain": (1, "d1", PLAIN),
    "d2-bf16": (2, "d2", {"dtype": "bfloat16"}),
    "d1-narrow": (1, "d1", NARROW),
    "d2-bf16-narrow": (2, "d2", {"dtype": "bfloat16", **NARROW}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.world(size)]) for name, (size, *_) in LAYOUTS.items()],
)
def test_fused_adam_resumes_bitwise(name: str, tmp_path: Path) -> None:
    """The step is in the parameter group, which lacks it in a new engine: without it, bias correction begins anew."""
    _, letters, options = LAYOUTS[name]
    run = SaveLoadMeta(tmp_path / "run", "dcp")
    with fused_adam():
        with started(f"megatron:{letters}", path=model_dir("qwen3"), **options) as engine:
            for seed in range(3):
                step(engine, seed)
            engine.save(run)
            step(engine, 3)
            expected = weights_of(engine)
        with started(f"megatron:{letters}", path=model_dir("qwen3"), **options) as engine:
            engine.load(run)
            step(engine, 3)
            assert same_bits(weights_of(engine), expected)


@pytest.mark.world(1)
@pytest.mark.parametrize("saved_by", ["torch", "fused"])
def test_adam_state_loads_in_both_implementations(saved_by: str, tmp_path: Path) -> None:
    """Torch's AdamW and FusedAdam have the same moments: a run may move between machines with and without it."""
    run = SaveLoadMeta(tmp_path / "run", "dcp")
    here, there = (nullcontext, fused_adam) if saved_by == "torch" else (fused_adam, nullcontext)
    with here(), started("megatron:d1", path=model_dir("qwen3")) as engine:
        for seed in range(3):
            step(engine, seed)
        engine.save(run)
        start = weights_of(engine)
        step(engine, 3)
        expected = weights_of(engine)
    with there(), started("megatron:d1", path=model_dir("qwen3")) as engine:
        engine.load(run)
        step(engine, 3)
        for name, weight in weights_of(engine).items():
            change = (expected[name] - start[name]).norm()
            assert (weight - expected[name]).norm() <= 1e-4 * change, name


# ---- bf16 moments, for which Transformer Engine keeps the main parameters


@pytest.mark.world(1)
@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamBefore21])
def test_precision_aware_state_exists_before_the_first_step(kind: type[FusedAdam], tmp_path: Path) -> None:
    """Since release 2.1, ``initialize_state`` needs an argument that Megatron-Core does not pass."""
    run = SaveLoadMeta(tmp_path / "run", "dcp")
    with fused_adam(kind), started("megatron:d1", path=model_dir("qwen3"), dtype="bfloat16", **NARROW) as engine:
        engine.save(run)
        engine.load(run)
        step(engine, 0)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        ("bfloat16", "float32 moments"),
        ("float32", "float32 moments"),
        ("bfloat16", "bfloat16 moments"),
        pytest.param("float32", "bfloat16 moments"),
    ],
)
def test_main_parameters_are_float32_with_moments_of_any_dtype(dtype: str, to: str, tmp_path: Path) -> None:
    """Checkpoints contain the float32 weights, also where the optimizer keeps them, and engines exchange them."""
    here, there = ({}, NARROW) if to == "bfloat16 moments" else (NARROW, {})
    with fused_adam():
        with started("megatron:d2", path=model_dir("qwen3"), dtype=dtype, **here) as engine:
            step(engine, 0)
            engine.save(SaveLoadMeta(tmp_path / "run", "dcp"))
            engine.save(SaveLoadMeta(tmp_path / "hf"))
        with started("megatron:d2", path=model_dir("qwen3"), dtype="bfloat16", **there) as engine:
            engine.load(SaveLoadMeta(tmp_path / "run", "dcp"))
            engine.save(SaveLoadMeta(tmp_path / "again"))
    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert actual["model.norm.weight"].dtype == torch.float32
    assert same_bits(actual, expected)


@pytest.mark.world(2)
@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_weights_load_after_a_step_with_bf16_moments(weight_format: Any, tmp_path: Path) -> None:
    """The next step starts from the loaded weights, not from main parameters of the earlier ones."""
    saved = SaveLoadMeta(tmp_path / "saved", weight_format, with_optim=False)
    with fused_adam(), started("megatron:d2", path=model_dir("qwen3"), dtype="bfloat16", **NARROW) as engine:
        step(engine, 0)
        engine.save(saved)
        expected = weights_of(engine)
        step(engine, 1)
        engine.load(saved)
        assert same_bits(weights_of(engine), expected)
        engine.set_lr(0.0)
        step(engine, 2)  # copies the main parameters to the model's
        assert same_bits(weights_of(engine), expected)


# ---- adapters


@pytest.mark.world(1)
def test_adapters_on_experts_use_local_layers() -> None:
    """Adapters are on local layers, whose grouped experts would be Megatron-Core's legacy ones with other weights."""
    options: dict[str, Any] = {"path": model_dir("qwen3_moe"), "lora": LoRAConfig(rank=2)}
    with started("megatron:d1", **options) as engine:
        expected = engine.eval_batch(global_batch(0), loss).loss
    with mock.patch.object(model_config, "has_transformer_engine", return_value=True):
        engine = create_engine(config("megatron:d1", **options))
        try:
            engine.initialize(FinetuneSpec(total_train_steps=10))
        except RuntimeError as error:
            pytest.fail(f"the engine was not built: {error}")
        with engine:
            assert engine.eval_batch(global_batch(0), loss).loss == expected
