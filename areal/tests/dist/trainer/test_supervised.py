"""Trainers that learn from data that is there: each learns what it should, the same on any layout, and goes on from a checkpoint."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatchSpec, OptimizerConfig, TrainEngine
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness import tiny
from areal.tests.harness.rl import Curve
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.preference import Pair, dpo_trainer, reward_trainer
from areal.trainer.supervised import SupervisedTrainer, sft_trainer
from areal.trainer.trackers import ConsoleTracker
from areal.utils.data import sharded_loader

PAIRS = MicroBatchSpec(max_tokens_per_mb=96, granularity=2)
OPTIMIZER = OptimizerConfig(lr=3e-3, gradient_clipping=1.0, eps=1e-6)
LAYOUTS = tiny.chosen("fsdp:d2", "megatron:p2")


def started(backend: str, **fields: Any) -> Any:
    return tiny.started(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **fields})


def tokens(seed: int, n: int) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Texts:
    """Each begins with what the rest repeats."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(tokens(index, 4) * (2 + index % 3))}


class Preferences:
    """The preferred answer ends with 7, the other with 8."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Pair:
        return Pair(
            tokens(index, 5 + index % 4), [*tokens(index + 100, 3), 7], [*tokens(index + 200, 2 + index % 2), 8]
        )


def loader(engine: TrainEngine, data: Any) -> Any:
    return sharded_loader(data, batch_size=8, dp_rank=engine.dp_rank, dp_size=engine.dp_size, seed=3)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_sft_learns_and_resumes(backend: str, tmp_path: Path) -> None:
    def run(steps: int, checkpoints: Checkpoints | None) -> tuple[Curve, SupervisedTrainer]:
        curve = Curve()
        with started(backend) as engine:
            trainer = sft_trainer(engine, loader(engine, Texts()), tracker=curve, checkpoints=checkpoints)
            trainer.resume()
            trainer.train(steps)
            return curve, trainer

    full, trainer = run(12, None)
    assert trainer.step == 12
    assert full["train/loss"][-1] < 0.9 * full["train/loss"][0]
    kept = Checkpoints(tmp_path, every=5)
    run(7, kept)
    assert kept.steps(["model"]) == [5]
    rest, trainer = run(12, kept)
    assert trainer.step == 12
    assert rest["train/loss"] == pytest.approx(full["train/loss"][5:], rel=1e-5)


@pytest.mark.world(2)
def test_second_step_is_profiled_and_every_step_timed(tmp_path: Path) -> None:
    curve = Curve()
    with started("fsdp:d2") as engine:
        trainer = sft_trainer(engine, loader(engine, Texts()), tracker=curve, profile=tmp_path / "profile")
        trainer.train(1)
        assert not (tmp_path / "profile").exists()
        engine.control.gather(None)  # before another rank makes it
        trainer.train(2)
        trace = tmp_path / "profile" / f"trace-rank{engine.dp_rank}.json.gz"
        written = trace.stat().st_mtime_ns
        trainer.train(4)
        assert trace.stat().st_mtime_ns == written
    for phase in ("data", "forward", "backward", "reduce", "optimizer"):
        assert len(curve[f"train/seconds/{phase}"]) == 4


@pytest.mark.world(1)
def test_after_step_sees_every_step_and_can_stop_training() -> None:
    written, told = io.StringIO(), list[float]()
    with started("fsdp:d1") as engine, contextlib.redirect_stderr(written):
        trainer = sft_trainer(engine, loader(engine, Texts()), tracker=ConsoleTracker(["train/loss", "nothing"]))
        trainer.train(3, after_step=lambda step: told.append(step.loss))
        assert len(told) == trainer.step == 3
        trainer.train(9, after_step=lambda step: False)
        assert trainer.step == 4
    lines = [line.split() for line in written.getvalue().splitlines() if line.startswith("step")]
    assert [line[:3] for line in lines] == [["step", str(number), "train/loss"] for number in (1, 2, 3, 4)]
    assert [float(line[3]) for line in lines[:3]] == pytest.approx(told, rel=1e-3)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_reward_model_learns_preferences(backend: str) -> None:
    curve = Curve()
    with started(backend, value_head=True, mb_spec=PAIRS) as engine:
        trainer = reward_trainer(engine, loader(engine, Preferences()), tracker=curve)
        trainer.train(25)
        held_out = [sample for index in range(24, 32) for sample in Preferences()[index].samples(index)]
        mine = held_out if engine.dp_size == 1 else held_out[engine.dp_rank * 8 : engine.dp_rank * 8 + 8]
        after = trainer.evaluate(mine)
    assert curve["train/loss"][0] == pytest.approx(0.6931, abs=1e-3), "a fresh value head prefers nothing"
    assert curve["train/preference/accuracy"][-1] == 1.0
    assert after.metrics["preference/accuracy"] == 1.0
    assert after.metrics["preference/margin"] > 1.0


@pytest.mark.parametrize("backend", LAYOUTS)
def test_dpo_learns_preferences_and_keeps_reference_fixed(backend: str) -> None:
    curve, still = Curve(), {}
    with started(backend, mb_spec=PAIRS) as engine, started(backend, mb_spec=PAIRS, optimizer=None) as reference:
        before = {name: tensor.clone() for name, tensor in reference.named_tensors()}
        trainer = dpo_trainer(engine, reference, loader(engine, Preferences()), tracker=curve)
        trainer.train(15)
        still = {name: torch.equal(tensor, before[name]) for name, tensor in reference.named_tensors()}
    assert curve["train/loss"][0] == pytest.approx(0.6931, abs=1e-4), "the policy begins at the reference"
    assert curve["train/loss"][-1] < 0.35
    assert curve["train/preference/margin"][-1] > 1.0
    assert all(still.values())


@pytest.mark.world(1)
def test_invalid_configuration_raises() -> None:
    with started("fsdp:d1") as engine:
        with pytest.raises(ValueError, match="value_head = False"):
            reward_trainer(engine, loader(engine, Preferences()))
        with pytest.raises(ValueError, match=r"granularity = 1"):
            dpo_trainer(engine, engine, loader(engine, Preferences()))
    with pytest.raises(ValueError, match="every = -1"):
        Checkpoints("nowhere", every=-1)
