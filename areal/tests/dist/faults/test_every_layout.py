"""A fault on one rank ends the call on all ranks, on every layout, also where collectives never raise, as on NCCL.

Layouts of the numeric grid, but not cells of it: a fault comes without a float64 reference, needs a separate engine, and does not depend on
objectives, splits or dtypes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import TMonitor

from areal.api import Batch, FinetuneSpec, OptimizerConfig, TokenOutputs, TrainEngine
from areal.engine.registry import create_engine
from areal.tests.grid.cell_engine import CellEngine
from areal.tests.grid.layouts import OFTEN_IN_JAX, Cell, Layout, all_layouts
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.harness.quiet_groups import quiet_groups
from areal.tests.harness.tiny import programs_that, writing
from areal.tests.harness.world import world
from areal.utils.releases import installed_release


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return grad, None


def last_norm(engine: TrainEngine) -> nn.Module:
    """Return the norm before the attention of this rank's last layer: collectives come before it and after it."""
    return [module for name, module in engine._components.model.named_modules() if name.endswith("input_layernorm")][-1]


@contextmanager
def failing_in_the_model(engine: TrainEngine, place: str, fail: Callable[[], None]) -> Iterator[None]:
    """Let the forward or the backward of the last layer fail, or on an engine whose forward is one program, that program."""
    if hasattr(engine._components.model, "named_modules"):
        hook = last_norm(engine).register_forward_hook(
            lambda module, args, out: fail() if place == "forward" else _FailsInBackward.apply(out, fail)
        )
        yield
        hook.remove()
        return
    with programs_that(fail, "_evaluate" if place == "forward" else "_pull", on_call=0):
        yield


EVERY_FAULT = ("fsdp:d2", "fsdp:p2", "megatron:d2")
"""Layouts that meet every fault."""

FAULTS = (
    *(("process", False), ("forward", True), ("backward", False)),
    *(("process", True), ("forward", False), ("backward", True)),
)
"""Place of a fault, and whether collectives block. Two that follow one another differ in both."""


def cases() -> list[Any]:
    """Return one fault for each layout, in turn, so that layouts meet all places, and collectives that block and that return.

    Layouts of one rank are without collectives, and meet every place. JAX compiles a program for each place: only
    :data:`OFTEN_IN_JAX` meet one.
    """
    made = []
    for number, layout in enumerate(all_layouts()):
        faults = [FAULTS[number % len(FAULTS)]]
        if layout.world == 1:
            faults = [(place, False) for place in ("forward", "backward", "process")]
        elif layout.engine == "jax":
            faults = [("forward", bool(number % 2))] if layout.name in OFTEN_IN_JAX else []
        elif layout.name in EVERY_FAULT:
            faults = list(FAULTS)
        for place, blocking in faults:
            name = f"{layout.name}-{'blocks' if blocking else 'returns'}-{place}"
            made.append(
                pytest.param(layout, blocking, place, id=name, marks=pytest.mark.world(layout.world, timeout=240))
            )
    return made


@pytest.mark.parametrize(("layout", "blocking", "place"), cases())
def test_fault_on_one_rank_ends_the_call_on_every_rank(
    layout: Layout, blocking: bool, place: str, tmp_path: Path
) -> None:
    announced = tmp_path / "fault"
    guilty = last_rank_with_losses(layout) if place == "process" else layout.world - 1
    cell = Cell(layout, layout.family, dtype="float32")
    threads = set(threading.enumerate())

    def fail() -> None:
        if place != "process":
            announced.touch()
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    def fail_in_loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
        if place == "process" and world().rank == guilty:
            fail()
        return cell.objective.loss_fn(outputs, batch)

    with quiet_groups(announced, blocking=blocking):
        with writing():
            config = cell.config(OptimizerConfig(lr=1e-3))
        engine = create_engine(config)
        engine.initialize(FinetuneSpec(total_train_steps=10))
        batch = CellEngine(cell, engine).batch()
        engine.train_batch(batch, cell.objective.loss_fn, cell.objective.weight_fn)
        if place == "forward":
            engine.forward_batch(batch)  # compiles, on some engines
        fails = place != "process" and world().rank == guilty

        def call(loss_fn: Any) -> Any:
            if place == "forward":
                return engine.forward_batch(batch)
            return engine.train_batch(batch, loss_fn, cell.objective.weight_fn)

        # The first call raises on all ranks, in time, with the same text.
        with failing_in_the_model(engine, place, fail) if fails else nullcontext():
            text = error_of(lambda: call(fail_in_loss))
        first = [text] * layout.world
        if layout.world > 1:
            dist.all_gather_object(first, text)
        assert set(first) == {first[0]}
        assert "out of memory" in text or "OutOfMemoryError" in text
        assert layout.world == 1 or f"rank {guilty}: " in text

        # The second works on all ranks, or raises on all without communication.
        resets = layout.engine != "fsdp" or installed_release("torch") >= (2, 13)
        usable = place == "process" or (layout.world == 1 and resets)
        assert ("cannot be used any more" in text) != usable
        text = error_of(lambda: call(cell.objective.loss_fn))
        assert (text == "") == usable, text
        if not usable:
            assert "the engine cannot be used: " in text
            assert "make another" in text
        with promptly():
            engine.destroy()
    assert not [each for each in threading.enumerate() if each.name.startswith("fault watch")]

    def left() -> list[threading.Thread]:
        # The first progress bar of a process starts a thread for all.
        return [each for each in set(threading.enumerate()) - threads if not isinstance(each, TMonitor)]

    # The threads of quiet_groups end soon after their collectives.
    if layout.world == 1:
        wait_until(lambda: not left(), "no thread is left", PROMPTLY)


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of a call, which must end promptly, or an empty text."""
    with promptly():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


def last_rank_with_losses(layout: Layout) -> int:
    """Return the last rank of the stage that computes losses."""
    engine = create_engine(Cell(layout, layout.family, dtype="float32").config(OptimizerConfig(lr=1e-3)))
    per_stage = layout.world // engine.dims.pp
    return (engine._last_stage + 1) * per_stage - 1
