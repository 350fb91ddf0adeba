"""Checkpoints of the JAX engine: resumed runs, other layouts, and runs that move between engines."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal.api import OptimizerConfig, SaveLoadMeta, StepOutput, TrainEngine
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.model import random_init
from areal.tests.dist.checkpoint.checkpoints import contents
from areal.tests.grid.models import model_dir
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import (
    NEEDS_JAX,
    OPTIMIZER,
    family_dir,
    global_batch,
    layout,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world

SGD = OptimizerConfig(type="sgd", lr=0.1, momentum=0.9)
PLAIN_SGD = OptimizerConfig(type="sgd", lr=0.1)
OPTIMIZERS = {"adamw": OPTIMIZER, "sgd": SGD}


def step(engine: TrainEngine, seed: int) -> StepOutput:
    return engine.train_batch(local_batch(engine, global_batch(seed)), loss)


# ---- resume


@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [layout("jax:d1", "adamw"), layout("jax:d2", "sgd"), layout("jax:t2", "adamw")],
)
def test_dcp_checkpoint_resumes_bitwise(backend: str, optimizer: str, tmp_path: Path) -> None:
    """Compare a run with a schedule that resumes after two steps with one that never stopped."""
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer]}
    with started(backend, **options) as engine:
        step(engine, 1)
        step(engine, 2)
        engine.set_version(7)
        # Steps during the save change nothing of it.
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp", asynchronous=True))
        expected = step(engine, 3)
        engine.wait_for_checkpoint()
        weights, lr = weights_of(engine), engine.lr
        # Back in the same engine, also out of host memory.
        engine.offload()
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        assert step(engine, 3).loss == expected.loss
        assert same_bits(weights_of(engine), weights)
    with started(backend, **options) as engine:
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        assert engine.version == 7
        again = step(engine, 3)
        assert (again.loss, again.grad_norm, engine.lr) == (expected.loss, expected.grad_norm, lr)
        assert same_bits(weights_of(engine), weights)


@pytest.mark.parametrize("backend", [layout("jax:d1")])
def test_checkpoint_from_before_the_first_step_and_without_an_optimizer(backend: str, tmp_path: Path) -> None:
    full, light = (SaveLoadMeta(tmp_path / name, weight_format="dcp") for name in ("full", "light"))
    with started(backend) as engine:
        engine.save(full)
        engine.save(SaveLoadMeta(light.path, weight_format="dcp", with_optim=False))
        expected = step(engine, 1)
        engine.load(full)
        assert step(engine, 1).grad_norm == expected.grad_norm
        weights = weights_of(engine)
        engine.load(full)
        step(engine, 1)
        assert same_bits(weights_of(engine), weights)
        with pytest.raises(ValueError, match=r"light was saved with no optimizer state.*with_optim=False"):
            engine.load(light)
    assert not [key for key in contents(tmp_path / "full") if key.startswith("optim.")]
    with started(backend, optimizer=SGD) as engine, pytest.raises(ValueError, match=r"optimizer AdamW.*has SGD"):
        engine.load(full)


@pytest.mark.parametrize("backend", [layout("jax:d1")])
def test_layers_with_different_steps_are_refused(backend: str, tmp_path: Path) -> None:
    """Torch counts steps for each weight, and the JAX engine for all layers together."""
    path = tmp_path / "run"
    with started("fsdp:d1") as engine:
        step(engine, 1)
        parameter = dict(engine._components.model[0].named_parameters())["hf.model.layers.1.mlp.up_proj.weight"]
        engine._components.optimizer.inner.state[parameter]["step"] += 1
        engine.save(SaveLoadMeta(path, weight_format="dcp"))
    with started(backend) as engine:
        before = weights_of(engine)
        with pytest.raises(
            ValueError, match=r"metadata: 'optim\.hf\.model\.layers\.0\.mlp\.up.*is 1 and .* is 2.*with_optim"
        ):
            engine.load(SaveLoadMeta(path, weight_format="dcp"))
        assert same_bits(weights_of(engine), before)
        engine.load(SaveLoadMeta(path, weight_format="dcp", with_optim=False))


# ---- moves between layouts and engines


@pytest.mark.parametrize(
    ("family", "optimizer", "chain"),
    [
        pytest.param("qwen3_tied", "adamw", ["fsdp:d2", "jax:d2", "jax:t2", "fsdp:d2"], id="adamw"),
        pytest.param("qwen3_tied", "sgd", ["fsdp:d2", "jax:t2", "fsdp:d2", "jax:d2"], id="sgd"),
        pytest.param("qwen3_moe", "adamw", ["fsdp:d2", "jax:c2", "jax:e2", "fsdp:e2"], id="experts"),
    ],
)
@pytest.mark.world(2)
@NEEDS_JAX
def test_state_moves_between_engines_bit_for_bit(family: str, optimizer: str, chain: list[str], tmp_path: Path) -> None:
    """Each engine loads what the one before has saved, and saves the same tensors, moments and counts of steps included."""
    # A value head without gradients: torch makes state for it neither in AdamW nor in SGD, JAX only in SGD.
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "value_head": optimizer == "adamw"}
    options["path"] = family_dir(family)
    kinds = {"adamw": {"exp_avg", "exp_avg_sq", "step"}, "sgd": {"momentum_buffer"}}[optimizer]
    expected: dict[str, Tensor] = {}
    lr = 0.0
    for number, backend in enumerate(chain):
        with started(backend, **options) as engine:
            if number == 0:
                step(engine, 1)
                step(engine, 2)
                lr = engine.lr
            else:
                engine.load(SaveLoadMeta(tmp_path / str(number - 1), weight_format="dcp"))
                assert engine.lr == lr
            engine.save(SaveLoadMeta(tmp_path / str(number), weight_format="dcp"))
        saved = contents(tmp_path / str(number))
        expected = expected or saved
        assert same_bits(saved, expected), backend
    moments = {key: x for key, x in expected.items() if key.startswith("optim.hf.")}
    assert {key.rpartition(".")[2] for key in moments} == kinds
    assert all(x.any() for key, x in moments.items())


def assert_follows(curve: list[StepOutput], expected: list[StepOutput]) -> None:
    assert [it.loss for it in curve] == pytest.approx([it.loss for it in expected], rel=1e-5)
    assert [it.grad_norm for it in curve] == pytest.approx([it.grad_norm for it in expected], rel=1e-4)


def run(chain: list[str], folder: Path, meta: dict[str, Any], **options: Any) -> list[StepOutput]:
    """Take two steps in each engine of a chain, which loads what the one before has saved."""
    curve = []
    for number, backend in enumerate(chain):
        with started(backend, **options) as engine:
            if number:
                engine.load(SaveLoadMeta(folder / str(number - 1), **meta))
            curve += [step(engine, 2 * number + i) for i in range(2)]
            engine.save(SaveLoadMeta(folder / str(number), **meta))
    return curve


@pytest.mark.world(2)
@NEEDS_JAX
def test_a_run_that_moves_its_weights_between_engines_follows_one_curve(tmp_path: Path) -> None:
    """Without moments, in the Hugging Face format. The test of moves between engines has runs with them."""
    meta, options = {"weight_format": "hf"}, {"optimizer": PLAIN_SGD}
    chain = ["fsdp:d2", "jax:d2", "megatron:t2"]
    moved = run(chain, tmp_path / "moved", meta, **options)
    stayed = run(["fsdp:d2"] * len(chain), tmp_path / "stayed", meta, **options)
    assert_follows(moved, stayed)
    # The steps are large enough to see a step that is lost.
    assert abs(stayed[-1].grad_norm / stayed[0].grad_norm - 1) > 1e-2


def go_on(backend: str, read: str | None, write: str, seed: int) -> None:
    """Take one step of a run: load a checkpoint and save the next."""
    with started(backend) as engine:
        if read is not None:
            engine.load(SaveLoadMeta(read, weight_format="dcp"))
        before = weights_of(engine)
        step(engine, seed)
        engine.save(SaveLoadMeta(write, weight_format="dcp"))
        assert not same_bits(weights_of(engine), before)


@needs_own_world
@NEEDS_JAX
def test_dcp_checkpoint_resumes_in_other_layouts(tmp_path: Path) -> None:
    """Take one step in each of d1, d2, t2 and d2t2, compared with four steps in d1."""
    runs = {"moved": ["jax:d1", "jax:d2", "jax:t2", "jax:d2t2"], "stayed": ["fsdp:d1"] * 4}
    for name, chain in runs.items():
        read = None
        for i, backend in enumerate(chain):
            write = str(tmp_path / f"{name}{i}")
            ranks = {"d1": 1, "d2t2": 4}.get(backend.partition(":")[2], 2)
            succeed(ranks, go_on, backend, read, write, i)
            read = write
    moved, stayed = (contents(tmp_path / f"{name}3") for name in runs)
    assert moved.keys() == stayed.keys()
    for key, expected in stayed.items():
        assert (moved[key] - expected).abs().max() <= 1e-3 * expected.abs().max() + 1e-6, key


# ---- initial weights


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("jax:d1", "jax:d2", "jax:t2")])
def test_random_weights_are_those_of_the_fsdp_engine(backend: str) -> None:
    """Weights are drawn in full one layer at a time, and only the shards are kept."""
    options: dict[str, Any] = {"path": family_dir("qwen3"), "init_from_scratch": True, "value_head": True, "seed": 5}
    alive: list[int] = []
    drawn: list[weakref.ref[Tensor]] = []
    original = random_init._draw_block

    def counting(*args: Any) -> Any:
        alive.append(sum(it() is not None for it in drawn))
        block = original(*args)
        drawn.extend(map(weakref.ref, block.values()))
        return block

    with mock.patch.object(random_init, "_draw_block", counting), started(backend, **options) as engine:
        weights = weights_of(engine)
    assert alive == [0, 0, 0]
    with started(f"fsdp:d{world().size}", **options) as engine:
        assert same_bits(weights_of(engine), weights)
    with started(backend, **{**options, "seed": 6}) as engine:
        assert not torch.equal(weights_of(engine)["lm_head.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("jax:d2", "jax:t2")])
def test_each_rank_reads_only_its_slices(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], TensorFiles.read

    def counting(files: TensorFiles, key: str, index: tuple[slice, ...]) -> Tensor:
        tensor = original(files, key, index)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counting)
    with started(backend) as engine:
        total = sum(x.numel() for x in weights_of(engine).values())
    # Norms are replicated.
    assert total / 2 < sum(read) < 0.52 * total


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("jax:d1", "jax:d2")])
def test_files_with_a_value_head_and_the_other_name_of_a_tied_weight(backend: str, tmp_path: Path) -> None:
    folder, source, width = tmp_path / "model", Path(model_dir("qwen3_tied")), 32
    head = torch.arange(float(width)).view(1, width)
    with TensorFiles.of_model(source) as files:
        tensors = {key: files.read(key, tuple(slice(0, n) for n in files.shape(key))).clone() for key in files}
    expected = {**tensors, "value_head.weight": head}
    if world().rank == 0:
        shutil.copytree(source, folder)
        renamed = {"lm_head.weight" if "embed" in key else key: x for key, x in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        save_file({"value_head.weight": head}, folder / "value_head.safetensors")
    dist.barrier()
    with started(backend, path=str(folder), value_head=True) as engine:
        assert same_bits(weights_of(engine), expected)
