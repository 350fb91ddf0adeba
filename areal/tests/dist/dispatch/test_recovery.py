"""A run goes on in new processes after the loss of a process, with the numbers of a run without it."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import areal.dispatch.calls as calls
from areal.api import FinetuneSpec, SaveLoadMeta, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import InProcess, Reply
from areal.dispatch.rank_calls import RankLayout
from areal.tests.dist.dispatch.results import half_of_the_loss, same, untimed
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config, global_batch, loss
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.grpo import grpo_trainer
from areal.trainer.ppo import PPOTrainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.supervised import SupervisedTrainer, sft_trainer
from areal.utils.data import sharded_loader
from areal.weight_sync.disk import DiskTransport, published

PLAN = Plan(groups=4, group_size=3, seed=11)
STEPS = 4
COMPARED = ("rollout/reward", "rollout/tokens", "actor/loss", "actor/grad_norm")
"""Numbers that depend neither on the clock nor on the rounding of the rollout."""


class Losing(InProcess):
    """A process that is lost during one call.

    Args:
        what: name of the calls that count.
        number: the call, from 1, during which it is lost. 0 for none.
    """

    def __init__(self, what: str, number: int) -> None:
        super().__init__()
        self._what, self._left = what, number

    def start(self, what: str, work: Any, arguments: Any) -> Future[list[Reply]]:
        self._left -= what == self._what
        if what == self._what and self._left == 0:
            self.lost = WorkerLostError(f"rank 0 died during {what}", 0, "here", os.getpid())
        if self.lost is None:
            return super().start(what, work, arguments)
        future: Future[list[Reply]] = Future()
        future.set_exception(self.lost)
        return future

    def restart(self, size: int) -> None:
        super().restart(size)
        self.lost = None


class LosingOneOfTwo(Losing):
    """Two ranks that hold nothing, of which one is lost. The other is this process."""

    size = 2
    in_driver = False
    nodes = ("", "")

    def start(self, what: str, work: Any, arguments: Any) -> Future[list[Reply]]:
        if self.size == 1 or what == self._what:
            return super().start(what, work, arguments)
        future: Future[list[Reply]] = Future()
        values = {"initialize": [RankLayout(rank, True, None) for rank in range(2)], "load": [(0, {})] * 2}
        future.set_result([Reply(value) for value in values[what]])
        return future

    def restart(self, size: int) -> None:
        super().restart(size)
        self.size, self.in_driver, self.nodes = 1, True, ("",)


def train(trainer: PPOTrainer | SupervisedTrainer, group: WorkerGroup, curve: Curve, losses: int) -> None:
    """Train, as a caller does whose ranks may be lost."""
    trainer.resume()
    for _ in range(losses):
        with pytest.raises(WorkerLostError, match="rank 0 died"):
            trainer.train(STEPS)
        group.restart()
        del curve.steps[trainer.resume() :]
    trainer.train(STEPS)
    assert trainer.step == STEPS


def grpo(folder: Path, what: str = "", number: int = 0, every: int = 1) -> Curve:
    """Train by GRPO, with a loss during a call."""
    curve = Curve()
    with WorkerGroup(config("fsdp:d1", path=model_dir("qwen3")), Losing(what, number)) as group:
        group.initialize(FinetuneSpec(total_train_steps=1000))
        with played(group, PLAN) as rollout:
            kept = Checkpoints(folder, every=every)
            trainer = grpo_trainer(group, rollout.runner, rollout.sync, tracker=curve, checkpoints=kept)
            train(trainer, group, curve, losses=number > 0)
        assert group.version == STEPS
    return curve


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("what", "number", "every"),
    [
        pytest.param("train_batch", 3, 1, id="in a step"),
        pytest.param("named_tensors", 40, 1, id="while weights are sent"),
        pytest.param("save", 2, 1, id="in a save"),
        pytest.param("train_batch", 1, 1, id="in the first step"),
        pytest.param("train_batch", 3, 0, id="without a checkpoint"),
    ],
)
def test_grpo_goes_on_after_a_loss(
    what: str, number: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stream of several chunks, between which the rollout has mixed weights.
    monkeypatch.setattr(calls, "STREAM_BYTES", 4096)
    with_loss, without = grpo(tmp_path / "lost", what, number, every), grpo(tmp_path / "whole")
    assert len(without.steps) == STEPS
    for name in COMPARED:
        assert with_loss[name] == without[name], name


class Texts:
    """Data set of random tokens."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, VOCAB, (4 + index,), generator=generator)}


@pytest.mark.world(1)
@pytest.mark.parametrize("every", [2, 0])
def test_supervised_training_goes_on_after_a_loss(every: int, tmp_path: Path) -> None:
    curves = []
    for number in (0, 4):
        curve = Curve()
        loader = sharded_loader(Texts(), batch_size=4, dp_rank=0, dp_size=1, seed=1)
        with WorkerGroup(config("fsdp:d1"), Losing("train_batch", number)) as group:
            group.initialize(FinetuneSpec(total_train_steps=1000))
            kept = Checkpoints(tmp_path / str(number), every=every)
            train(sft_trainer(group, loader, tracker=curve, checkpoints=kept), group, curve, losses=number > 0)
        curves.append(curve)
    assert curves[1]["train/loss"] == curves[0]["train/loss"]


@pytest.mark.world(1)
def test_transport_goes_on_after_a_restart(tmp_path: Path) -> None:
    with WorkerGroup(config("fsdp:d1"), Losing("send", 2)) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        transport = group.transport(lambda engine: DiskTransport(engine.control, tmp_path))
        assert transport.send(group, 1).version == 1
        with pytest.raises(WorkerLostError):
            transport.send(group, 2)
        group.restart()
        try:
            assert transport.send(group, 2).version == 2
        except (RuntimeError, KeyError) as error:
            pytest.fail(f"the transport was not made again: {error}")
        assert published(tmp_path)[-1][0].name == "version-00000002"
        transport.close()


@pytest.mark.world(1)
def test_restart_skips_an_asynchronous_save_that_was_never_published(tmp_path: Path) -> None:
    with WorkerGroup(config("fsdp:d1")) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        group.train_batch(global_batch(), loss)
        group.set_version(1)
        group.save(SaveLoadMeta(tmp_path / "first", weight_format="dcp"))
        expected = untimed(group.train_batch(global_batch(1), loss))
        group.save(SaveLoadMeta(tmp_path / "second", weight_format="dcp", asynchronous=True))
        group.wait_for_checkpoint()
        # As if the process had died before the rename.
        (tmp_path / "second").rename(tmp_path / "draft")
        group.set_version(2)
        try:
            group.restart()
        except ValueError as error:
            pytest.fail(f"the save that was not published was loaded: {error}")
        assert group.version == 1
        assert same(untimed(group.train_batch(global_batch(1), loss)), expected)


@pytest.mark.world(1)
@pytest.mark.parametrize("layout", ["fsdp:d1", "megatron:d1"])
def test_group_goes_on_in_another_layout_after_a_loss(layout: str, tmp_path: Path) -> None:
    """Of two ranks one is left, which loads the checkpoint into the engine of the layout."""
    meta = SaveLoadMeta(tmp_path / "step", weight_format="dcp")
    with WorkerGroup(config("fsdp:d1")) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        group.train_batch(global_batch(), loss)
        group.save(meta)
        expected = [group.train_batch(global_batch(seed), loss).grad_norm for seed in (1, 2)]
    with WorkerGroup(config("fsdp:d2"), LosingOneOfTwo("zero_grad", 1)) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        group.load(meta)
        with pytest.raises(WorkerLostError):
            group.zero_grad()
        try:
            group.restart(layout=layout)
        except ValueError as error:
            pytest.fail(f"the group did not go on in the layout: {error}")
        assert (str(group.dims), group.config.backend) == (layout, layout)
        steps = [group.train_batch(global_batch(seed), loss).grad_norm for seed in (1, 2)]
        assert steps == pytest.approx(expected, rel=1e-5)


@pytest.mark.world(1)
def test_layout_that_is_not_possible_changes_nothing() -> None:
    options = {"fsdp": {"context_parallel": "ulysses"}}
    refused = {
        "fsdp:d2": r"a layout of 2 ranks, and this process is one.*RayWorkers\(2\)",
        "megatron:d1": r"fsdp\.context_parallel = 'ulysses' with backend = 'megatron:d1'",
    }
    with WorkerGroup(config("fsdp:d1", **options)) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        for layout, message in refused.items():
            with pytest.raises(ValueError, match=message):
                group.restart(layout=layout)
        assert str(group.dims) == "fsdp:d1"
        group.train_batch(global_batch(), loss)


@pytest.mark.world(1)
def test_restart_without_a_checkpoint_has_the_first_version() -> None:
    with WorkerGroup(config("fsdp:d1")) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        group.set_version(3)
        group.restart()
        assert group.version == 0
        assert group.run(lambda engine, shard: engine.version) == [0]


class FailingOnce(InProcess):
    """A process in which an engine is not initialized after the first restart."""

    def start(self, what: str, work: Any, arguments: Any) -> Future[list[Reply]]:
        if what != "initialize" or self.generation != 1:
            return super().start(what, work, arguments)
        future: Future[list[Reply]] = Future()
        future.set_result([Reply(kind="RuntimeError", text="out of memory")])
        return future


@pytest.mark.world(1)
def test_restart_after_one_that_failed_replaces_the_processes_again() -> None:
    executor = FailingOnce()
    with WorkerGroup(config("fsdp:d1"), executor) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        with pytest.raises(RuntimeError, match="out of memory"):
            group.restart()
        with pytest.raises(RuntimeError, match="cannot be used"):
            group.zero_grad()
        group.restart()
        assert executor.generation == 2
        group.zero_grad()


@pytest.mark.world(1)
def test_restart_without_a_published_checkpoint_begins_again(tmp_path: Path) -> None:
    with WorkerGroup(config("fsdp:d1")) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        group.set_version(3)
        group.save(SaveLoadMeta(tmp_path / "only", weight_format="dcp", asynchronous=True))
        group.wait_for_checkpoint()
        # As if the process had died before the rename.
        (tmp_path / "only").rename(tmp_path / "draft")
        group.restart()
        assert group.version == 0


@pytest.mark.world(1)
@pytest.mark.parametrize("end", ["destroyed", "lost"])
def test_result_of_a_call_that_has_ended_outlives_the_engine(end: str) -> None:
    executor = InProcess()
    with WorkerGroup(config("fsdp:d1"), executor) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        mbs = group.microbatches(global_batch())
        started = [
            group.start(TrainEngine.forward_batch, global_batch()),
            group.start(TrainEngine.train_batch, global_batch(), loss),
            group.start(TrainEngine.forward_backward_batch, mbs, half_of_the_loss),
        ]
        if end == "lost":
            executor.lost = WorkerLostError("rank 0 died", 0, "node", 1)
        else:
            group.destroy()
        forward, step, results = (call.result() for call in started)
        executor.lost = None
    assert len(forward) == len(global_batch())
    assert step.grad_norm > 0
    assert len(results) == len(mbs.real)
