"""Muon on every layout of all engines: the weights of three steps are those of one process in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import LoRAConfig, MuonConfig, OptimizerConfig, SaveLoadMeta, TrainEngine
from areal.engine.torch.muon import updates, whole_matrices
from areal.engine.torch.muon.newton_schulz import orthogonalised, update_scale
from areal.engine.torch.muon.whole_matrices import WholeMatrices
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_tensors
from areal.tests.grid.layouts import Cell, all_layouts
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import NEEDS_JAX, global_batch, local_batch, loss, started, weights_of
from areal.tests.harness.world import record

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


ENGINES = ("fsdp", "megatron", "jax")

WAYS: dict[str, dict[str, Any]] = {"qwen3": {"nesterov": False, "momentum": 0.8}, "qwen3_moe": {"scale": "original"}}
"""Settings by family: of separate projections, and of stacks of experts."""


def cells() -> list[Any]:
    made = []
    for layout in all_layouts():
        for family in WAYS:
            if layout.engine in ENGINES and family not in layout.refuses:
                cell = Cell(layout, family=family, objective_name="terms", case_name="zero_rank", cut="tokens24")
                made.append(pytest.param(cell, id=f"{family}-{layout.name}", marks=pytest.mark.world(layout.world)))
    return made


def assert_three_steps(cell: Cell, settings: OptimizerConfig) -> None:
    """Compare the norms of three steps, and then the weights, with those of the reference."""
    objective = cell.objective
    call = (objective.loss_fn, objective.weight_fn)
    with start_cell(cell, settings, total_steps=4) as run:
        reference = run.reference()
        reference.make_optimizer(settings, total_steps=4)
        for seed in range(3):
            reference.step(run.samples(seed), *call)
            norm, _ = reference.optimizer_step()
            step = run.engine.train_batch(run.batch(seed), *call, outputs=objective.outputs)
            assert_number(step.grad_norm, norm, cell.tolerance)
        error = assert_tensors(run.engine.named_tensors(), dict(reference.named_tensors()), cell.tolerance)
    record(TABLE, str(cell), weights=f"{error:.0e}")


@pytest.mark.parametrize("cell", cells())
def test_three_steps_track_the_reference(cell: Cell) -> None:
    assert_three_steps(cell, optimizer(**WAYS[cell.family]))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "name",
    ["fsdp:d2", "fsdp:t2", "fsdp:p2", "megatron:d2", "megatron:t2", pytest.param("jax:d2", marks=NEEDS_JAX)],
)
def test_float32_tracks_the_reference(name: str) -> None:
    layout = next(each for each in all_layouts() if each.name == name)
    cell = Cell(layout, objective_name="terms", case_name="zero_rank", cut="tokens24", dtype="float32")
    assert_three_steps(cell, optimizer(dtype="float32").model_copy(update={"lr": 0.01}))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "backend",
    [*(f"fsdp:{letters}2" for letters in "drtcpe"), *(f"megatron:{letters}2" for letters in "dtcpe")],
)
def test_work_is_divided_over_ranks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is computed once, also if ranks have replicas of it, or each has some experts; and all ranks have some to compute."""
    counts: list[int] = []

    def counting(x: Tensor, config: MuonConfig) -> Tensor:
        counts.append(math.prod(x.shape[:-2]))
        return orthogonalised(x, config)

    monkeypatch.setattr(updates, "orthogonalised", counting)
    path = model_dir("qwen3_moe" if backend.endswith("e2") else "qwen3")
    with started(backend, path=path, optimizer=optimizer()) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        by_rank = engine.control.gather(sum(counts))
        shapes = {name: x.shape for name, x in engine.named_tensors()}
    wanted = [len(shape) == 2 and not re.search("embed|lm_head", name) for name, shape in shapes.items()]
    assert sum(by_rank) == sum(wanted)
    assert min(by_rank) > 0.25 * max(by_rank)


@pytest.mark.world(2)
def test_a_rank_may_have_nothing_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix of four parts, of which ranks have some in both; and another in several rounds."""
    monkeypatch.setattr(whole_matrices, "_ROUND", 10)
    full = torch.arange(15.0).view(3, 5)
    with started("fsdp:d2") as engine:
        rank, group = engine.control.rank, engine.mesh["dp"].get_group()
        # Rank 0 has the first row, both have the middle one, and rank 1 has the last one in two parts.
        boxes = {
            0: [(0, 1, 0, 5), (1, 2, 0, 5)],
            1: [(1, 2, 0, 5), (2, 3, 0, 2), (2, 3, 2, 5)],
        }[rank]
        places = [(("weight", place), bounds) for place in range(4) for bounds in boxes]
        values = [full[a:b, c:d] + place[1] for place, (a, b, c, d) in places]
        parts, seen = [x.clone() for x in values], []

        def twice(whole: dict[Any, Tensor]) -> dict[Any, Tensor]:
            seen.append({place: x.clone() for place, x in whole.items()})
            return {place: 2 * x for place, x in whole.items()}

        WholeMatrices(places, engine.control, group, torch.empty(0)).replace(parts, twice)
        assert all(torch.equal(made, 2 * value) for made, value in zip(parts, values, strict=True))
        mine = {place: x for one in seen for place, x in one.items()}
        assert all(torch.equal(x, full + place[1]) for place, x in mine.items())
        by_rank = engine.control.gather((sorted(mine), len(seen)))
        assert sorted(place for places, _ in by_rank for place in places) == [("weight", i) for i in range(4)]
        assert [n for _, n in by_rank] == [2, 2]
        with pytest.raises(RuntimeError, match="have 10 of the elements of a matrix of 3 x 5"):
            WholeMatrices([(("half", 0), (2 * rank, 1 + 2 * rank, 0, 5))], engine.control, group, full)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("first", "second", "family"),
    [("fsdp:t2", "fsdp:d2", "qwen3"), ("fsdp:e2", "fsdp:d2", "qwen3_moe"), ("megatron:e2", "megatron:d2", "qwen3_moe")],
)
def test_run_goes_on_in_another_layout(first: str, second: str, family: str, tmp_path: Path) -> None:
    """Momenta of matrices and moments of the other parameters are in the checkpoint, whole."""
    options: dict[str, Any] = {"path": model_dir(family), "optimizer": optimizer(), "dtype": "float64"}
    options |= {"master_dtype": "float64", "grad_reduce_dtype": "float64", "total_steps": 4}
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp")

    def step(engine: TrainEngine, seed: int) -> None:
        engine.train_batch(local_batch(engine, global_batch(seed)), loss)

    with started(first, **options) as engine:
        step(engine, 1)
        engine.save(meta)
        step(engine, 2)
        expected = weights_of(engine)
    with started(second, **options) as engine:
        engine.load(meta)
        step(engine, 2)
        assert_tensors(weights_of(engine).items(), expected, 1e-12)


@pytest.mark.world(2)
def test_main_parameters_of_bfloat16_models_are_updated(tmp_path: Path) -> None:
    """Ranges of main parameters and whole ones get the same update, and the model has them rounded."""
    settings = optimizer(dtype="float32").model_copy(update={"weight_decay": 0.0})
    # The ranges of two ranks meet within a matrix of the middle layer.
    path = model_dir("qwen3", num_hidden_layers=3)
    options: dict[str, Any] = {"path": path, "optimizer": settings, "dtype": "bfloat16"}
    trained: list[dict[str, Tensor]] = []
    for distributed in (True, False):
        meta = SaveLoadMeta(tmp_path / str(distributed), weight_format="dcp")
        with started("megatron:d2", **options, megatron={"distributed_optimizer": distributed}) as engine:
            engine.train_batch(local_batch(engine, global_batch()), loss)
            rounded = weights_of(engine)
            engine.save(meta)
        with started("fsdp:d2", **options) as engine:
            before = weights_of(engine)
            engine.load(meta)
            trained.append(weights_of(engine))
        for name, weight in trained[-1].items():
            assert torch.equal(weight.bfloat16(), rounded[name]), name
    assert_tensors(trained[0].items(), trained[1], 1e-6)
    for name, weight in trained[0].items():
        if name.endswith("proj.weight"):
            update = (before[name] - weight) / settings.lr / update_scale(weight.shape, settings.muon)
            assert 0.6 < torch.linalg.svdvals(update)[0] < 1.3, name


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("fsdp:d1", {"lora": LoRAConfig(rank=2)}, "'muon' with lora: .* would be orthogonal"),
        (
            "megatron:d1",
            {"megatron": {"optimizer_state_dtype": "bfloat16"}},
            "'bfloat16' with optimizer.type = 'muon': it needs AdamW",
        ),
        pytest.param("jax:d1", {}, "'float64' with master_dtype = 'float32': .* choose 'float32'", marks=NEEDS_JAX),
    ],
    ids=["lora", "moments", "wide"],
)
def test_what_muon_cannot_do_is_named(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), started(backend, optimizer=optimizer(), **changes):
        pass
