"""Groups on shared devices bring their state to the device before each verb, and leave with the processes that had it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from areal.api import FinetuneSpec, LoRAConfig, SaveLoadMeta, TrainEngine
from areal.dispatch import SharedDevices, Use, WorkerGroup
from areal.dispatch.shared_devices import Kind, Part, devices
from areal.engine.registry import create_engine
from areal.tests.dist.dispatch.shared import KINDS, FakeRollout, assert_agrees, samples, state_bytes
from areal.tests.harness.tiny import config, gradients_of, layout, loss, same_bits, started, weights_of
from areal.weight_sync import DiskTransport

SPEC = FinetuneSpec(total_train_steps=1000)


@contextmanager
def two_groups(
    backend: str = "fsdp:d1", more: int = 0, **changes: Any
) -> Iterator[tuple[SharedDevices, WorkerGroup, WorkerGroup]]:
    """Start two groups of which one at a time can train, with some more bytes."""
    with (
        WorkerGroup(config(backend, **changes), name="policy") as policy,
        WorkerGroup(config(backend), name="other") as other,
    ):
        for group in (policy, other):
            group.initialize(SPEC)
        shared = SharedDevices({"gpu": max(map(state_bytes, (policy, other))) + more})
        shared.add("policy", policy)
        shared.add("other", other)
        with mock.patch.object(devices.logger, "warning") as log:
            yield shared, policy, other
        assert not log.called, log.call_args


def on_device(shared: SharedDevices, name: str) -> set[str]:
    """Return the kinds of state with bytes on the device."""
    shared.settle()
    parts = {kind: Part(name, kind) for kind in KINDS}
    return {
        attribute
        for kind, attribute in KINDS.items()
        if shared.placement.is_on_device(parts[kind]) and any(shared.placement.sizes(parts[kind]).values())
    }


def check(shared: SharedDevices, **groups: TrainEngine) -> None:
    shared.settle()
    assert_agrees(shared, groups)
    assert shared.placement.free("gpu") >= 0


def verbs(group: WorkerGroup, folder: Path) -> dict[str, tuple[Callable[[], Any], set[str]]]:
    """Return calls of all verbs, in an order that is possible, with the state that each needs."""
    batch = samples()
    full, weights = SaveLoadMeta(folder / "full", weight_format="dcp"), SaveLoadMeta(folder / "weights")
    everything = {"params", "optimizer"}

    def by_hand() -> None:
        mbs = group.microbatches(batch)
        weight = group.global_weight(mbs)
        group.forward_backward_batch(mbs, lambda out, mb: (loss(out, mb.data) / weight, None))

    def looked_at() -> None:
        mbs = group.microbatches(batch)
        group.forward_backward_batch(mbs, lambda out, mb: (None, out.logprobs), forward_only=True)

    def sent() -> None:
        transport = group.transport(lambda engine: DiskTransport(engine.control, folder / "sent"))
        assert transport.send(group, 1).n_tensors
        transport.close()

    return {
        "train_batch": (lambda: group.train_batch(batch, loss), everything),
        "forward_batch": (lambda: group.forward_batch(batch), {"params"}),
        "eval_batch": (lambda: group.eval_batch(batch, loss), {"params"}),
        "forward_backward_batch forward_only": (looked_at, {"params"}),
        "save weights": (lambda: group.save(weights), {"params"}),
        "named_tensors": (lambda: weights_of(group), {"params"}),
        "transport": (sent, {"params"}),
        "save": (lambda: group.save(full), everything),
        "forward_backward": (lambda: group.forward_backward(batch, loss), {"params", "grads"}),
        "named_gradients": (lambda: gradients_of(group), {"params", "grads"}),
        "optimizer_step": (lambda: group.optimizer_step(), everything),
        "forward_backward_batch": (by_hand, {"params", "grads"}),
        "zero_grad": (lambda: group.zero_grad(), set()),
        "load": (lambda: group.load(full), everything),
        "run": (lambda: group.run(lambda engine, shard: engine.train_batch(shard, loss), batch), everything),
        "run forward": (
            lambda: group.run(lambda engine, shard: engine.forward_batch(shard), batch, use=Use.FORWARD),
            {"params"},
        ),
        "map": (lambda: group.map(lambda engine, shard: engine.forward_batch(shard), batch), everything),
        "onload": (lambda: group.onload(), everything),
        "onload params": (lambda: group.onload(grads=False, optimizer=False), {"params"}),
        "lr": (lambda: group.set_lr(group.lr), set()),
        "offload": (lambda: group.offload(), set()),
    }


@pytest.mark.parametrize("backend", [layout(each) for each in ("fsdp:d1", "megatron:d1", "jax:d1")])
def test_each_verb_brings_what_it_needs_and_moves_nothing_else(backend: str, tmp_path: Path) -> None:
    """Between two verbs another model takes the whole device. Nothing is onloaded by the engine itself, and no bit changes."""
    with two_groups(backend) as (shared, policy, other), started(backend) as alone:
        for name, (verb, needed) in verbs(policy, tmp_path).items():
            other.train_batch(samples(), loss)
            other.forward_backward(samples(), loss)
            other.zero_grad()
            check(shared, policy=policy, other=other)
            before = on_device(shared, "policy")
            verb()
            check(shared, policy=policy, other=other)
            now = on_device(shared, "policy")
            if name == "offload":
                assert not now
            elif backend != "megatron:d1":
                assert now == before | needed, name
        for _ in range(2):
            alone.train_batch(samples(), loss)
        assert same_bits(weights_of(policy), weights_of(alone))


@pytest.mark.world(1)
def test_futures_of_several_threads_keep_the_budget() -> None:
    with two_groups() as (shared, policy, other):
        expected = policy.forward_batch(samples())

        def call(number: int) -> Any:
            group = (policy, other)[number % 2]
            verb = (TrainEngine.forward_batch, TrainEngine.eval_batch)[number % 3 == 0]
            return group.start(verb, samples(), *([loss] if number % 3 == 0 else [])).result()

        with ThreadPoolExecutor(3) as threads:
            results = list(threads.map(call, range(12)))
        assert all(torch.equal(a, b) for a, b in zip(results[2], expected, strict=True))
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_error_of_a_verb_is_measured() -> None:
    def broken(out: Any, batch: Any) -> torch.Tensor:
        raise ValueError("broken on purpose")

    with two_groups() as (shared, policy, other):
        with mock.patch.object(devices.logger, "warning"):
            with pytest.raises(ValueError, match="broken on purpose"):
                policy.forward_backward(samples(), broken)
            check(shared, policy=policy, other=other)
        assert on_device(shared, "policy") == {"params"}
        other.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_loss_that_calls_a_model_without_room_raises() -> None:
    """In one process a loss runs inside the use of its verb, which cannot end before it."""
    with two_groups() as (shared, policy, other):

        def nested(out: Any, batch: Any) -> torch.Tensor:
            other.forward_batch(samples())
            return loss(out, batch)

        with mock.patch.object(devices.logger, "warning"):
            with pytest.raises(ValueError, match=r"'other' needs .* in use by others"):
                policy.train_batch(samples(), nested)
            other.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_stream_holds_its_use_while_it_is_read() -> None:
    with two_groups() as (shared, policy, other), mock.patch("areal.dispatch.calls.STREAM_BYTES", 1):
        expected = weights_of(policy)
        early = policy.named_tensors()
        next(early)
        with pytest.raises(ValueError, match=r"'other' needs .* in use by others"):
            other.train_batch(samples(), loss)
        # It ends where it is left.
        early.close()
        unread = policy.named_tensors()
        # Opened, but not read: others take the device.
        other.train_batch(samples(), loss)
        other.onload()
        assert same_bits({name: tensor.clone() for name, tensor in unread}, expected)
        other.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_reference_and_new_adapters_are_counted() -> None:
    with two_groups(more=200_000, lora=LoRAConfig(rank=2)) as (shared, policy, other):
        before = shared.placement.bytes_on_device("gpu", "policy")
        policy.adapters.add("second", seed=1)
        shared.settle()
        assert shared.placement.bytes_on_device("gpu", "policy") > before
        other.train_batch(samples(), loss)
        with policy.reference():
            policy.forward_batch(samples())
            other.train_batch(samples(), loss)
            policy.forward_batch(samples())
        policy.train_batch(samples(), loss)
        policy.adapters.remove("second")
        shared.settle()
        assert shared.placement.free("gpu") >= 0


# ---- the end of processes


@pytest.mark.world(1)
def test_restart_makes_room_and_forgets_what_is_gone(tmp_path: Path) -> None:
    with two_groups() as (shared, policy, other):
        policy.train_batch(samples(), loss)
        policy.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp"))
        expected = weights_of(policy)
        other.train_batch(samples(), loss)
        policy.restart()
        check(shared, policy=policy, other=other)
        assert same_bits(weights_of(policy), expected)
        other.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_lost_model_leaves_its_room_to_others() -> None:
    """Its processes are gone: nothing is offloaded, and nothing waits."""
    with two_groups() as (shared, policy, other):
        policy.train_batch(samples(), loss)
        policy._executor.restart(1)
        other.train_batch(samples(), loss)
        shared.settle(["policy"])
        assert shared.placement.bytes_on_device("gpu", "policy") == 0
        with pytest.raises(RuntimeError, match=r"restart\(\)"):
            policy.train_batch(samples(), loss)
        policy.restart()
        policy.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_destroyed_model_leaves_the_devices() -> None:
    with two_groups() as (shared, policy, other):
        policy.train_batch(samples(), loss)
        policy.destroy()
        assert "policy" not in shared.placement
        other.train_batch(samples(), loss)
        check(shared, other=other)
        # Its name is free, and it may come back.
        policy.initialize(SPEC)
        other.offload()
        shared.add("policy", policy)
        policy.train_batch(samples(), loss)
        check(shared, policy=policy, other=other)


@pytest.mark.world(1)
def test_removed_group_moves_nothing_more() -> None:
    with two_groups() as (shared, policy, other):
        policy.train_batch(samples(), loss)
        policy.offload()
        shared.remove("policy")
        other.train_batch(samples(), loss)
        before = shared.placement.moved
        policy.forward_batch(samples())
        assert shared.placement.moved == before
        with (
            pytest.raises(ValueError, match="'policy' has no use 'forward': there are other"),
            shared.use("policy", Use.FORWARD),
        ):
            pass


# ---- bad input


@pytest.mark.world(1)
def test_wrong_additions_raise_and_change_nothing() -> None:
    with started("fsdp:d1") as engine:
        nbytes = state_bytes(engine)
        shared = SharedDevices({"gpu": 2 * nbytes})
        shared.add("policy", engine)
        awake = FakeRollout()
        shared.add_rollout("rollout", awake, 8)
        before = shared.placement.bytes_on_device("gpu")
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("name = '': give each", lambda: shared.add("", engine)),
            ("name = None: give each", lambda: shared.add_rollout(None, FakeRollout(), 1)),  # type: ignore[arg-type]
            ("'rollout' is taken", lambda: shared.add("rollout", engine)),
            ("'policy' is taken", lambda: shared.add_rollout("policy", FakeRollout(), 1)),
            ("'twice' was added before", lambda: shared.add("twice", engine)),
            ("'twice' was added before", lambda: shared.add_rollout("twice", awake, 1)),
            ("nbytes = None: 'r' is a FakeRollout.*pass its bytes", lambda: shared.add_rollout("r", FakeRollout())),
            ("nbytes = -1: 'r' has 0 or more", lambda: shared.add_rollout("r", FakeRollout(), -1)),
            ("nbytes = 0: 'r' has 0 or more", lambda: shared.add_rollout("r", FakeRollout(), 0)),
            (r"nbytes = \{\}: 'r' has", lambda: shared.add_rollout("r", FakeRollout(), {})),
            ("nbytes = many: 'r' has", lambda: shared.add_rollout("r", FakeRollout(), "many")),  # type: ignore[arg-type]
            ("'r' is on the device 'gpu7'", lambda: shared.add_rollout("r", FakeRollout(), {"gpu7": 1})),
            ("'r' is a object, which has no asleep", lambda: shared.add_rollout("r", object(), 1)),  # type: ignore[arg-type]
        ]
        for message, call in wrong:
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(RuntimeError, match="not initialized"):
            shared.add("new", create_engine(config("fsdp:d1")))
        with started("fsdp:d1") as other:
            with pytest.raises(ValueError, match="'new' is on the device 'gpu7': the budgets are of gpu"):
                shared.add("new", other, ["gpu7"])
            with pytest.raises(ValueError, match=r"devices = .*'new' has 1 ranks"):
                shared.add("new", other, ["gpu", "gpu"])
        assert shared.placement.bytes_on_device("gpu") == before
        assert awake.calls == []


@pytest.mark.world(1)
def test_verb_that_never_fits_raises_by_name() -> None:
    with WorkerGroup(config("fsdp:d1"), name="policy") as policy:
        policy.initialize(SPEC)
        shared = SharedDevices({"gpu": policy.memory()[0].params.total})
        shared.add("policy", policy)
        policy.forward_batch(samples())
        with pytest.raises(ValueError, match=r"'policy' needs .* bytes on 'gpu' for 'step', and .* raise the budget"):
            policy.train_batch(samples(), loss)
        assert shared.placement.is_on_device(Part("policy", Kind.WEIGHTS))
