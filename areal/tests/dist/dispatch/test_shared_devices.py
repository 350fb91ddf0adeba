"""Engines of several sizes that take turns on one device: their bytes agree with the placement after each use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api import FinetuneSpec, MicroBatchSpec, SaveLoadMeta, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.shared_devices import Kind, Part, SharedDevices, Use, devices
from areal.inference.local.rollout import LocalRollout
from areal.inference.protocol import Sampling
from areal.tests.dist.dispatch.shared import FakeRollout, assert_agrees, samples, state_bytes
from areal.tests.harness.tiny import (
    config,
    family_dir,
    layout,
    layouts,
    loss,
    same_bits,
    started,
    weights_of,
)


@contextlib.contextmanager
def three_models(backend: str) -> Iterator[dict[str, TrainEngine]]:
    """Start a policy, a smaller critic and a larger reference in this process."""
    with (
        started(backend) as policy,
        started(backend, path=family_dir("qwen3", vocab_size=64), value_head=True) as critic,
        started("fsdp:d1", path=family_dir("qwen3", vocab_size=300), optimizer=None) as reference,
    ):
        yield {"policy": policy, "critic": critic, "reference": reference}


def value_loss(out: Any, batch: Any) -> torch.Tensor:
    return (out.values.square() * batch["loss_mask"]).sum()


@pytest.mark.parametrize("backend", [*layouts(1), layout("jax:d1")])
def test_bytes_agree_with_the_placement_after_each_use(backend: str, tmp_path: Path) -> None:
    batch = samples()
    with three_models(backend) as engines, started(backend) as alone:
        policy, critic, reference = engines.values()
        verbs: list[tuple[str, Use, Callable[[], Any]]] = [
            ("rollout", Use.GENERATE, lambda: None),
            ("policy", Use.FORWARD, lambda: policy.forward_batch(batch)),
            ("reference", Use.FORWARD, lambda: reference.forward_batch(batch)),
            ("critic", Use.FORWARD, lambda: critic.forward_batch(batch, outputs=("values",))),
            ("critic", Use.STEP, lambda: critic.train_batch(batch, value_loss, outputs=("values",))),
            ("policy", Use.FORWARD_BACKWARD, lambda: policy.forward_backward(batch, loss)),
            ("policy", Use.STEP, lambda: policy.optimizer_step()),
            ("policy", Use.EVAL, lambda: policy.eval_batch(batch, loss)),
            (
                "policy",
                Use.CHECKPOINT,
                lambda: policy.save(SaveLoadMeta(tmp_path / "saved", weight_format="dcp")),
            ),
            ("policy", Use.SYNC, lambda: weights_of(policy)),
        ]
        # The largest use fits, and not two models that train.
        shared = SharedDevices({"gpu": state_bytes(policy) + 10_000})
        rollout = FakeRollout()
        for name, engine in engines.items():
            shared.add(name, engine)
        shared.add_rollout("rollout", rollout, state_bytes(policy) // 2)
        assert_agrees(shared, engines)
        rounds = [(round_, *verb) for round_ in range(2) for verb in verbs]
        with mock.patch.object(devices.logger, "warning") as warning:
            for round_, name, use, verb in rounds:
                if use is Use.CHECKPOINT and round_:
                    continue
                with shared.use(name, use):
                    assert shared.placement.bytes_on_device("gpu") <= state_bytes(policy) + 10_000
                    before = shared.placement.moved
                    verb()
                    assert shared.placement.moved == before
                assert_agrees(shared, engines)
        # Nothing had to be corrected, and the verbs themselves found all that they needed.
        assert not warning.called
        assert rollout.calls.count("wake") == 2
        # Moves change no bit.
        for _ in range(2):
            alone.train_batch(batch, loss)
        assert same_bits(weights_of(policy), weights_of(alone))


@pytest.mark.world(1)
def test_rollout_sleeps_while_the_policy_trains_and_gets_its_weights() -> None:
    replica = AutoModelForCausalLM.from_pretrained(family_dir("qwen3"), dtype=torch.float32).eval()
    sampling = Sampling(max_new_tokens=4, stop_token_ids=())
    with started("fsdp:d1") as policy, LocalRollout(replica, max_context=64) as rollout:
        weights = policy.memory()[0].params.total
        shared = SharedDevices({"gpu": state_bytes(policy)})
        shared.add_rollout("rollout", rollout, 2 * weights)
        shared.add("policy", policy)
        for version in range(1, 3):
            with shared.use("policy", Use.STEP):
                assert rollout.asleep
                policy.train_batch(samples(), loss)
            # Both are on the device: a rollout does not take weights in its sleep.
            with shared.use("rollout", Use.GENERATE), shared.use("policy", Use.SYNC):
                rollout.update(policy.named_tensors(), version)
            with shared.use("rollout", Use.GENERATE):
                answer = asyncio.run(rollout.generate([1, 2, 3], sampling))
            assert answer.versions == (version,) * 4
            assert_agrees(shared, {"policy": policy})
            trained = weights_of(policy)
            assert all(torch.equal(x, trained[name]) for name, x in replica.state_dict().items() if name in trained)


@pytest.mark.world(1)
def test_group_takes_turns_like_an_engine() -> None:
    batch = samples()
    policy = WorkerGroup(config("fsdp:d1", mb_spec=MicroBatchSpec(max_tokens_per_mb=40)), name="policy")
    policy.initialize(FinetuneSpec(total_train_steps=10))
    with policy, started("fsdp:d1") as other:
        shared = SharedDevices({"gpu": state_bytes(other)})
        shared.add("policy", policy)
        shared.add("other", other)
        for name, engine in [("policy", policy), ("other", other), ("policy", policy)]:
            with shared.use(name, Use.STEP):
                engine.train_batch(batch, loss)
            assert_agrees(shared, {"policy": policy, "other": other})


@pytest.mark.world(1)
def test_error_inside_a_use_corrects_the_placement() -> None:
    with started("fsdp:d1") as engine, mock.patch.object(devices.logger, "warning") as warning:
        shared = SharedDevices({"gpu": state_bytes(engine)})
        shared.add("policy", engine)

        def broken(out: Any, batch: Any) -> torch.Tensor:
            raise ValueError("broken on purpose")

        with pytest.raises(ValueError, match="broken on purpose"), shared.use("policy", Use.FORWARD_BACKWARD):
            engine.forward_backward(samples(), broken)
        assert "gradients" in warning.call_args[0]
        assert_agrees(shared, {"policy": engine})
        # A verb of another use than the announced one.
        with shared.use("policy", Use.FORWARD):
            engine.train_batch(samples(), loss)
        assert_agrees(shared, {"policy": engine})


@pytest.mark.world(1)
def test_move_that_fails_is_not_counted() -> None:
    class Sleepless(FakeRollout):
        def sleep(self) -> None:
            raise RuntimeError("2 answers are running")

    with started("fsdp:d1") as engine, mock.patch.object(devices.logger, "warning") as warning:
        shared = SharedDevices({"gpu": state_bytes(engine)})
        shared.add("policy", engine)
        shared.add_rollout("rollout", Sleepless(), engine.memory()[0].params.total)
        with pytest.raises(RuntimeError, match="2 answers are running"), shared.use("policy", Use.STEP):
            raise AssertionError("not reached")
        assert any("rollout" in call[0] for call in warning.call_args_list)
        assert shared.placement.is_on_device(Part("rollout", Kind.ROLLOUT))
        assert_agrees(shared, {"policy": engine})
        with shared.use("policy", Use.FORWARD):
            engine.forward_batch(samples())
        assert_agrees(shared, {"policy": engine})


@pytest.mark.world(1)
def test_wrong_number_of_devices_raises() -> None:
    with started("fsdp:d1") as engine:
        shared = SharedDevices({"a": 2**30, "b": 2**30})
        with pytest.raises(ValueError, match="devices = None: 'policy' has 1 ranks, name the device of each, of a, b"):
            shared.add("policy", engine)
        shared.add("policy", engine, ["b"])
        assert shared.placement.bytes_on_device("b") == engine.memory()[0].on_device
