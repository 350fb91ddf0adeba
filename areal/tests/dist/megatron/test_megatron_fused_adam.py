"""Checkpoints of the Megatron engine with Transformer Engine's optimizer, replaced by a stand-in of the same semantics."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from areal.api import SaveLoadMeta
from areal.tests.dist.checkpoint.test_checkpoint import step
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import same_bits, started, weights_of
from areal.tests.unit.gpu.transformer_engine import fused_adam

pytest.importorskip("megatron.core")

PLAIN = {"megatron": {"distributed_optimizer": False}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "d1": (1, "d1", {}),
    "d1-plain": (1, "d1", PLAIN),
    "d2-bf16": (2, "d2", {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.world(size)) for n, (size, *_) in LAYOUTS.items()])
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
