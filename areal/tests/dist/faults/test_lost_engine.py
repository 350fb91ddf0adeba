"""Errors that end an engine: the same error and the same way out on every rank, groups that are aborted, and limits of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from areal.api import FinetuneSpec, SaveLoadMeta
from areal.engine.base import BaseTrainEngine
from areal.engine.checkpoint.gather_slices import SliceGatherer
from areal.engine.checkpoint.safetensors import TensorWriter
from areal.engine.checkpoint.tensor_layout import DiskTensor
from areal.engine.megatron.weight_mapping import LocalParameter
from areal.engine.registry import create_engine
from areal.tests.dist.faults.lost import everywhere, raised
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.harness.tiny import (
    chosen,
    config,
    global_batch,
    layouts,
    local_batch,
    loss,
    process_groups,
    started,
)
from areal.tests.harness.world import world
from areal.utils import fault_watch, group_set, platform
from areal.utils.data import BatchPlan
from areal.utils.distributed import ControlPlane, EngineLostError, RankLostError
from areal.utils.group_set import GroupSet

GUILTY = 1


def guilty() -> bool:
    return world().rank == min(GUILTY, world().size - 1)


def failing(error: Exception) -> Callable[..., Any]:
    """Return a replacement for a method that raises on one rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def no_memory() -> Exception:
    return torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def lost_device() -> Exception:
    return torch.AcceleratorError("CUDA error: device-side assert triggered")


# ---- the model of one rank


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:r2", "megatron:d2"])
def test_ranks_agree_after_the_model_failed_in_a_forward_on_one_rank(backend: str) -> None:
    """A forward of replicas runs without collectives: the other rank learns of the fault from the agreement alone."""
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        fails = mock.patch.object(type(engine), "_forward_compute_mb", failing(no_memory()))
        with fails if guilty() else nullcontext():
            text = raised(lambda: engine.forward_batch(batch))
        assert f"rank {GUILTY}: out of memory" in text or f"rank {GUILTY}: OutOfMemoryError" in text
        assert "(the engine cannot be used any more: make another)" in text
        assert set(everywhere(engine._components is None)) == {True}
        again = raised(lambda: engine.forward_batch(batch), RuntimeError)
        assert again == f"the engine cannot be used: {text}"


@pytest.mark.parametrize(
    "backend",
    [
        *layouts(1, 2, but=("fsdp:c2", "fsdp:p2", "megatron:p2"), also=("fsdp:r2", "megatron:d2")),
        *chosen("jax:d1", "jax:d2"),
    ],
)
def test_lost_device_is_final_for_the_process(backend: str) -> None:
    """A sticky error comes again with each later call to the device, also in the clean-up."""
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        with (
            mock.patch.object(type(engine), "_forward_compute_mb", failing(lost_device()))
            if guilty()
            else nullcontext(),
            mock.patch.object(platform, "empty_cache", failing(lost_device())) if guilty() else nullcontext(),
        ):
            text = raised(lambda: engine.train_batch(batch, loss))
        assert "AcceleratorError" in text
        assert "restart the process" in text
        assert "can be used for" not in text
        assert raised(lambda: engine.train_batch(batch, loss), RuntimeError) == f"the engine cannot be used: {text}"


@pytest.mark.parametrize("backend", layouts(1, 2, but=("fsdp:c2", "fsdp:p2", "megatron:p2"), also=("megatron:d2",)))
def test_lost_device_in_a_loss_ends_the_engine(backend: str) -> None:
    with started(backend) as engine:
        text = raised(
            lambda: engine.train_batch(
                local_batch(engine, global_batch()), failing(lost_device()) if guilty() else loss
            )
        )
        assert "restart the process" in text


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_error_before_the_first_forward_is_the_one_that_is_raised(backend: str) -> None:
    """FSDP initializes in its first forward, and cannot be reset before."""
    with started(backend) as engine:
        with mock.patch.object(type(engine), "_forward_compute_mb", failing(no_memory())):
            text = raised(lambda: engine.train_batch(global_batch(), loss), RuntimeError)
        assert "tried to allocate" in text
        assert engine.train_batch(global_batch(), loss).update_successful


@pytest.mark.world(1)
def test_model_that_cannot_be_reset_ends_the_engine() -> None:
    with started("fsdp:d1") as engine:
        reset = mock.patch.object(engine._components.schedule, "recover", failing(AttributeError("no such state")))
        with mock.patch.object(type(engine), "_forward_compute_mb", failing(no_memory())), reset:
            text = raised(lambda: engine.train_batch(global_batch(), loss))
        assert "tried to allocate" in text
        assert "make another" in text


# ---- other work of one rank, for which the others wait


@pytest.mark.parametrize(
    "backend",
    [
        *layouts(2, but=("fsdp:c2", "megatron:p2"), also=("fsdp:d2", "megatron:d2")),
        *chosen("jax:d2"),
    ],
)
@pytest.mark.parametrize("where", ["batch", "gradients", "optimizer"])
def test_error_outside_of_the_model_ends_the_engine_on_every_rank(backend: str, where: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.forward_backward(batch, loss)
        target, name = {
            "batch": (BatchPlan, "build"),
            "gradients": (type(engine), "_finalize_grads"),
            "optimizer": (type(engine._components.optimizer), "step"),
        }[where]
        with mock.patch.object(target, name, failing(no_memory())) if guilty() else nullcontext():
            call = engine.optimizer_step if where != "batch" else (lambda: engine.forward_backward(batch, loss))
            text = raised(call)
        assert (
            text
            == f"rank {GUILTY}: OutOfMemoryError: tried to allocate 2.00 GiB (the engine cannot be used any more: make another)"
        )


class _FailingAfter:
    """A replacement for a method that raises after some calls, on one rank."""

    def __init__(self, inner: Callable[..., Any], calls: int, error: Exception) -> None:
        self._inner, self._calls, self._error = inner, calls, error

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._calls -= 1
        if self._calls < 0 and guilty():
            raise self._error
        return self._inner(*args, **options)


@pytest.mark.world(2)
@pytest.mark.parametrize("error", [no_memory(), ValueError("a wrong shape")], ids=["memory", "value"])
@pytest.mark.parametrize(
    ("backend", "stream", "step"),
    [
        ("fsdp:d2", "tensors", (DiskTensor, "cut")),
        ("fsdp:d2", "gradients", (DiskTensor, "cut")),
        ("megatron:t2", "tensors", (LocalParameter, "slices")),
    ],
    ids=["fsdp-tensors", "fsdp-gradients", "megatron-tensors"],
)
def test_error_in_a_stream_on_one_rank_raises_on_every_rank(
    backend: str, stream: str, step: tuple[type, str], error: Exception
) -> None:
    """The other rank waits for the next tensor."""
    with started(backend) as engine:
        engine.forward_backward(local_batch(engine, global_batch()), loss)
        fails = _FailingAfter(getattr(*step), 3, error)
        with mock.patch.object(*step, autospec=True, side_effect=fails):
            text = raised(lambda: list(getattr(engine, f"named_{stream}")()))
        assert f"rank {GUILTY}: " in text
        assert str(error) in text
        assert set(everywhere(engine._components is None)) == {True}


@pytest.mark.world(2)
def test_error_between_the_exchanges_of_a_save_raises_on_every_rank(tmp_path: Path) -> None:
    """The other rank waits for a slice of this one."""
    path = everywhere(tmp_path)[0] / "saved"
    with started("fsdp:d2") as engine:
        fails = _FailingAfter(SliceGatherer._owners, 2, ValueError("a wrong shape"))
        with mock.patch.object(SliceGatherer, "_owners", autospec=True, side_effect=fails):
            text = raised(lambda: engine.save(SaveLoadMeta(path)))
        assert f"rank {GUILTY}: a wrong shape; nothing was saved to" in text
        assert set(everywhere(engine._components is None)) == {True}
        assert not path.exists()


@pytest.mark.world(2)
def test_error_of_the_disk_leaves_the_engine_usable(tmp_path: Path) -> None:
    """Every rank gathers to the end before the error is raised."""
    path = everywhere(tmp_path)[0] / "saved"
    with started("fsdp:d2") as engine:
        writes = _FailingAfter(TensorWriter.write, 0, no_memory())
        with (
            mock.patch.object(TensorWriter, "write", autospec=True, side_effect=writes),
            mock.patch(f"{__name__}.GUILTY", 0),  # the rank that writes the only file
        ):
            text = raised(lambda: engine.save(SaveLoadMeta(path)), RuntimeError)
        assert "nothing was saved to" in text
        engine.save(SaveLoadMeta(path))
        assert path.exists()


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:d2", pytest.param("jax:d2")])
def test_error_while_building_on_one_rank_raises_on_every_rank(backend: str) -> None:
    """The other rank waits for the first in a collective."""
    engine = create_engine(config(backend))
    build = type(engine)._build

    def wait_in_a_collective(self: BaseTrainEngine, spec: FinetuneSpec) -> Any:
        components = build(self, spec)
        if guilty():
            raise no_memory()
        dist.all_reduce(torch.ones(1), group=self.dp_group)
        return components

    with mock.patch.object(type(engine), "_build", wait_in_a_collective):
        text = raised(lambda: engine.initialize(FinetuneSpec(total_train_steps=10)))
    assert f"rank {GUILTY}: OutOfMemoryError: tried to allocate 2.00 GiB; the engine was not built" in text
    engine.destroy()


# ---- process groups and threads


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:d2"])
def test_groups_are_aborted_after_a_fault_and_destroyed_otherwise(backend: str) -> None:
    """On NCCL, destroy_process_group waits for collectives that never complete."""
    before = process_groups()
    for fault in (False, True):
        destroy = mock.patch.object(dist, "destroy_process_group", wraps=dist.destroy_process_group)
        abort = mock.patch.object(group_set, "_abort", wraps=group_set._abort)
        with destroy as destroyed, abort as aborted, started(backend) as engine:
            groups = len(engine._groups._groups)
            if fault:
                fails = mock.patch.object(type(engine), "_forward_compute_mb", failing(no_memory()))
                with fails if guilty() else nullcontext():
                    raised(lambda engine=engine: engine.forward_batch(local_batch(engine, global_batch())))
        assert bool(destroyed.call_count) != fault
        assert any(len(call.args[0]) == groups for call in aborted.call_args_list) == fault
        del engine
        assert process_groups() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fault watch")]


@pytest.mark.world(2)
def test_abort_wakes_a_thread_that_waits_in_a_collective() -> None:
    groups, aborted = GroupSet(), threading.Event()
    with groups.creating():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def abort() -> None:
        aborted.set()
        groups.abort()

    if world().rank == 0:
        threading.Timer(0.5, abort).start()
        with promptly(), pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        assert aborted.is_set()
    dist.barrier()
    groups.abort()
    groups.close()


# ---- limits of time


@pytest.mark.world(2)
def test_rank_that_lives_is_waited_for() -> None:
    """A rank may be late for longer than the heartbeat's limit, for example while it generates."""
    with started("fsdp:d2", heartbeat_timeout=2.0) as engine:
        if guilty():
            time.sleep(3.5)
        try:
            assert engine.train_batch(local_batch(engine, global_batch()), loss).update_successful
        except RankLostError as error:
            pytest.fail(f"a rank that lives was lost: {error}")


@pytest.mark.world(2)
def test_rank_without_a_sign_of_life_is_lost() -> None:
    """As if the process were stopped: its connections stay open."""
    control = ControlPlane(silence=2.0, timeout=60.0)
    with mock.patch.object(fault_watch._Link, "send", return_value=True) if guilty() else nullcontext():
        if guilty():
            wait_until(lambda: control.verdict is not None, "this rank knows that it is lost", PROMPTLY)
        text = raised(lambda: control.gather(1), RankLostError)
    assert text.startswith("rank 1 of 2 is gone; ")
    control.close()


@pytest.mark.world(2)
def test_control_timeout_limits_how_late_a_rank_may_be() -> None:
    with started("fsdp:d2", control_timeout=1.0) as engine:
        batch = local_batch(engine, global_batch())

        def late_on_one_rank() -> None:
            if guilty():
                time.sleep(4.5)
            engine.train_batch(batch, loss)

        assert "no exchange between ranks" in raised(late_on_one_rank)


@pytest.mark.world(2)
def test_first_fault_is_the_verdict_of_all_ranks() -> None:
    control = ControlPlane()
    errors = everywhere(str(control.fail(RuntimeError(f"fault of {world().rank}"), final=False)))
    assert len(set(errors)) == 1
    assert errors[0] in [
        f"rank {rank}: fault of {rank} (the engine cannot be used any more: make another)" for rank in range(2)
    ]
    with pytest.raises(EngineLostError, match="fault of"):
        control.gather(1)
    control.close()
