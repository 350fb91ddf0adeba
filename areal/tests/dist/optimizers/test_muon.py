"""Muon on every layout of the FSDP engine: the weights of three steps are those of one process in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal import create_engine
from areal.api import LoRAConfig, MuonConfig, OptimizerConfig, SaveLoadMeta, TrainEngine
from areal.engine.torch.muon import optimizer as muon
from areal.engine.torch.muon.newton_schulz import orthogonalised
from areal.engine.torch.muon.whole_matrices import WholeMatrices
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_tensors
from areal.tests.grid.layouts import Cell, all_layouts
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import NEEDS_JAX, config, global_batch, local_batch, loss, started, weights_of
from areal.tests.harness.world import record
from areal.utils.dtensor import local_part

TABLE = "Muon: errors"
EXACT = MuonConfig(dtype="float64")


def optimizer(**muon: Any) -> OptimizerConfig:
    return OptimizerConfig(
        type="muon",
        lr=0.03,
        gradient_clipping=0.3,
        eps=1e-4,
        weight_decay=0.1,
        lr_scheduler="cosine",
        muon=EXACT.model_copy(update=muon),
    )


WAYS: dict[str, dict[str, Any]] = {"qwen3": {"nesterov": False, "momentum": 0.8}, "qwen3_moe": {"scale": "original"}}
"""Settings by family: of separate projections, and of stacks of experts."""


def cells() -> list[Any]:
    made = []
    for layout in all_layouts():
        for family in WAYS:
            if layout.engine == "fsdp" and family not in layout.refuses:
                cell = Cell(layout, family=family, objective_name="terms", case_name="zero_rank", cut="tokens24")
                made.append(pytest.param(cell, id=f"{family}-{layout.name}", marks=pytest.mark.world(layout.world)))
    return made


@pytest.mark.parametrize("cell", cells())
def test_three_steps_track_the_reference(cell: Cell) -> None:
    config, objective = optimizer(**WAYS[cell.family]), cell.objective
    call = (objective.loss_fn, objective.weight_fn)
    with start_cell(cell, config, total_steps=4) as run:
        reference = run.reference()
        reference.make_optimizer(config, total_steps=4)
        for seed in range(3):
            reference.step(run.samples(seed), *call)
            norm, _ = reference.optimizer_step()
            step = run.engine.train_batch(run.batch(seed), *call, outputs=objective.outputs)
            assert_number(step.grad_norm, norm, cell.tolerance)
        error = assert_tensors(run.engine.named_tensors(), dict(reference.named_tensors()), cell.tolerance)
    record(TABLE, str(cell), weights=f"{error:.0e}")


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["fsdp:d2", "fsdp:t2", "fsdp:p2"])
def test_float32_tracks_the_reference(name: str) -> None:
    layout = next(each for each in all_layouts() if each.name == name)
    cell = Cell(layout, objective_name="terms", case_name="zero_rank", cut="tokens24", dtype="float32")
    settings = optimizer(dtype="float32").model_copy(update={"lr": 0.01})
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell, settings, total_steps=4) as run:
        reference = run.reference()
        reference.make_optimizer(settings, total_steps=4)
        for seed in range(3):
            reference.step(run.samples(seed), *call)
            reference.optimizer_step()
            run.engine.train_batch(run.batch(seed), *call, outputs=cell.objective.outputs)
        error = assert_tensors(run.engine.named_tensors(), dict(reference.named_tensors()), cell.tolerance)
    record(TABLE, str(cell), weights=f"{error:.0e}")


@pytest.mark.world(2)
@pytest.mark.parametrize("letters", ["d2", "r2", "t2", "c2", "p2", "e2"])
def test_work_is_divided_over_ranks(letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is computed once, also if ranks have replicas of it, or each has some experts; and all ranks have some to compute."""
    counts: list[int] = []

    def counting(x: Tensor, config: MuonConfig) -> Tensor:
        counts.append(math.prod(x.shape[:-2]))
        return orthogonalised(x, config)

    monkeypatch.setattr(muon, "orthogonalised", counting)
    path = model_dir("qwen3_moe" if letters == "e2" else "qwen3")
    with started(f"fsdp:{letters}", path=path, optimizer=optimizer()) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        by_rank = engine.control.gather(sum(counts))
        shapes = {name: x.shape for name, x in engine.named_tensors()}
    wanted = [len(shape) == 2 and not re.search("embed|lm_head", name) for name, shape in shapes.items()]
    assert sum(by_rank) == sum(wanted)
    assert min(by_rank) > 0.25 * max(by_rank)


@pytest.mark.world(2)
def test_a_rank_may_have_nothing_to_compute() -> None:
    with started("fsdp:d2") as engine:
        chunks: Any = engine._require_components().model
        parameter = next(x for name, x in chunks.trained() if name.endswith("q_proj.weight"))
        seen: list[Tensor] = []

        def twice(_: int, whole: Tensor) -> Tensor:
            seen.append(whole)
            return 2 * whole

        (made,) = WholeMatrices([parameter]).apply([local_part(parameter)], twice)
        assert torch.equal(made, 2 * local_part(parameter))
        assert sum(engine.control.gather(len(seen))) == 1
        assert all(whole.shape == parameter.shape for whole in seen)


@pytest.mark.world(2)
def test_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Momenta of matrices and moments of the other parameters are in the checkpoint, whole."""
    options: dict[str, Any] = {"path": model_dir("qwen3"), "optimizer": optimizer(), "dtype": "float64"}
    options |= {"master_dtype": "float64", "grad_reduce_dtype": "float64", "total_steps": 4}
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp")

    def step(engine: TrainEngine, seed: int) -> None:
        engine.train_batch(local_batch(engine, global_batch(seed)), loss)

    with started("fsdp:t2", **options) as engine:
        step(engine, 1)
        engine.save(meta)
        step(engine, 2)
        expected = weights_of(engine)
    with started("fsdp:d2", **options) as engine:
        engine.load(meta)
        step(engine, 2)
        assert_tensors(weights_of(engine).items(), expected, 1e-12)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("megatron:d1", {}, r"'muon' with backend = 'megatron:d1', which has adamw, sgd: choose one of them, or fsdp"),
        pytest.param("jax:d1", {}, "'muon' with backend = 'jax:d1', which has adamw, sgd", marks=NEEDS_JAX),
        ("fsdp:d1", {"lora": LoRAConfig(rank=2)}, "'muon' with lora: .* would be orthogonal"),
    ],
    ids=["megatron", "jax", "lora"],
)
def test_what_has_no_muon_is_named(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_engine(config(backend, optimizer=OptimizerConfig(type="muon"), **changes))
