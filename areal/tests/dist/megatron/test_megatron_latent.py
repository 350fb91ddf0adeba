"""Latent attention, sigmoid routers and Mistral on the Megatron engine: configurations that are not in the grid."""

from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, SaveLoadMeta
from areal.engine.registry import create_engine
from areal.tests.grid.cell_engine import ZERO_LR, start_cell
from areal.tests.grid.compare import assert_number, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.unit.gpu.transformer_engine import marked_as_split

pytest.importorskip("megatron.core")

FAMILY = "deepseek_v3"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


@pytest.mark.parametrize(
    ("backend", "family", "changes"),
    [
        pytest.param("megatron:d1", FAMILY, {"rope_parameters": YARN}, marks=pytest.mark.world(1), id="yarn"),
        pytest.param("megatron:d1", "qwen3", {"rope_parameters": YARN}, marks=pytest.mark.world(1), id="yarn, qwen3"),
        pytest.param("megatron:t2", FAMILY, {"q_lora_rank": None}, marks=pytest.mark.world(2), id="whole queries"),
        pytest.param("megatron:e2", FAMILY, {"n_group": 1}, marks=pytest.mark.world(2), id="one group"),
        pytest.param("megatron:d1", "mistral", {}, marks=pytest.mark.world(1), id="mistral"),
        pytest.param("megatron:t2", "mistral", {}, marks=pytest.mark.world(2), id="mistral, t2"),
        pytest.param("megatron:p2", "mistral", {}, marks=pytest.mark.world(2), id="mistral, p2"),
    ],
)
def test_latent_attention_configurations_agree_with_the_reference(
    backend: str, family: str, changes: dict[str, Any]
) -> None:
    layout = Layout(backend, options={"activation_checkpointing": "full"}, changes=changes)
    with start_cell(Cell(layout, family, cut="tokens24")) as run:
        expected, _ = run.expected()
        objective = run.cell.objective
        step = run.engine.forward_backward(run.batch(), objective.loss_fn, objective.weight_fn)
        assert_step(step, expected, run.cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, run.cell.tolerance)
        assert_number(run.engine.optimizer_step().grad_norm, expected.grad_norm, run.cell.tolerance)


@pytest.mark.world(2)
def test_gradient_norm_counts_replicated_weights_once() -> None:
    """The norm is that of the reference although Transformer Engine marks all weights of its layers as split."""
    with marked_as_split(), start_cell(Cell(Layout("megatron:t2"), FAMILY, cut="tokens24")) as run:
        expected, _ = run.expected()
        objective = run.cell.objective
        run.engine.forward_backward(run.batch(), objective.loss_fn, objective.weight_fn)
        assert_number(run.engine.optimizer_step().grad_norm, expected.grad_norm, run.cell.tolerance)


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_router_bias_is_not_trained(dtype: str, world_size: int, tmp_path: Path) -> None:
    path = model_dir(FAMILY)
    here, there = {1: ("megatron:d1", "megatron:d1"), 2: ("megatron:e2", "megatron:p2")}[world_size]
    with started(here, path=path, dtype=dtype) as engine:
        start = weights_of(engine)
        engine.forward_backward(local_batch(engine, global_batch()), loss)
        assert start.keys() - gradients_of(engine).keys() == {BIAS}
        engine.optimizer_step()
        trained = weights_of(engine)
        assert {name for name in start if not start[name].equal(trained[name])} == start.keys() - {BIAS}
        assert start[BIAS].abs().min() > 0
        engine.save(SaveLoadMeta(tmp_path / "dcp", "dcp"))
        engine.save(SaveLoadMeta(tmp_path / "hf", "hf"))
    for saved in ("dcp", "hf"):
        with started(there, path=path, dtype=dtype, init_from_scratch=True) as engine:
            assert not weights_of(engine)[BIAS].any()
            engine.load(SaveLoadMeta(tmp_path / saved, saved))  # type: ignore[arg-type]
            assert same_bits(weights_of(engine), trained)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"rope_interleave": False}, {}, "rope_interleave = False"),
        ({"norm_topk_prob": False}, {}, "norm_topk_prob = False"),
        ({"n_group": 4, "topk_group": 2}, {}, "topk_group = 2"),
    ],
)
def test_unsupported_latent_attention_raises(
    changes: dict[str, Any], options: dict[str, Any], said: str, world_size: int
) -> None:
    engine = create_engine(config("megatron:d1", path=model_dir(FAMILY, **changes), optimizer=ZERO_LR, **options))
    with pytest.raises(ValueError, match=said):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    engine.destroy()
