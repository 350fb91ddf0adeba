"""Programs of the JAX engine that fail: the engine goes on with the state of before, or says that its state is lost."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from areal.api import Batch, SaveLoadMeta, TokenOutputs, TrainEngine
from areal.tests.harness.tiny import (
    OPTIMIZER,
    global_batch,
    gradients_of,
    layout,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world
from areal.utils.distributed import EngineLostError

LOST = r"the engine cannot be used any more: make another"
BACKENDS = [layout("jax:d1"), layout("jax:d2")]


def last() -> bool:
    """Return True on one rank."""
    return world().rank == world().size - 1


def failing(program: str, *, consumes: bool, error: BaseException | None = None) -> Any:
    """Return the context in which a compiled program fails, by default with an error of a runtime.

    ``consumes``: after it has consumed its arguments, not before.
    """
    original = pkgutil.resolve_name(f"areal.engine.jax.{program}")

    def run(*args: Any) -> Any:
        if consumes:
            original(*args)
        raise error or ValueError("RESOURCE_EXHAUSTED: out of memory")

    return mock.patch(f"areal.engine.jax.{program}", run)


def pending(engine: TrainEngine, seed: int) -> None:
    engine.forward_backward(local_batch(engine, global_batch(seed)), loss)


def assert_equal_steps(engine: TrainEngine, untouched: TrainEngine, seed: int) -> None:
    one, other = (each.train_batch(local_batch(each, global_batch(seed)), loss) for each in (engine, untouched))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert same_bits(weights_of(engine), weights_of(untouched))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("program", "lost"),
    [("optimizer._update", "weights and optimizer state"), ("model_arrays._scaled", "gradients")],
    ids=["update", "clip"],
)
def test_failed_step_that_lost_arrays_ends_the_engine(program: str, lost: str, backend: str, tmp_path: Path) -> None:
    with started(backend) as engine:
        engine.train_batch(local_batch(engine, global_batch(1)), loss)
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        expected = weights_of(engine)
        pending(engine, 2)
        refused = pytest.raises(RuntimeError, match=rf"the {lost} are lost: ValueError: RESOURCE_EXHAUSTED.*{LOST}")
        with failing(program, consumes=True) if last() else nullcontext(), refused as caught:
            engine.optimizer_step()
        assert caught.type is EngineLostError
        for verb in (lambda: engine.forward_batch([]), engine.zero_grad, engine.offload, lambda: weights_of(engine)):
            with pytest.raises(RuntimeError, match=f"the engine cannot be used: .*{lost} are lost"):
                verb()
    # Another engine goes on from the checkpoint.
    with started(backend) as engine:
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        assert same_bits(weights_of(engine), expected)
        engine.train_batch(local_batch(engine, global_batch(2)), loss)


@pytest.mark.parametrize("backend", [layout("jax:d1")])
@pytest.mark.parametrize(("program", "clipping"), [("optimizer._update", None), ("model_arrays._scaled", 0.5)])
def test_step_that_fails_before_it_runs_changes_nothing(program: str, clipping: float | None, backend: str) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZER.model_copy(update={"gradient_clipping": clipping})}
    with started(backend, **options) as engine, started(backend, **options) as untouched:
        for each in (engine, untouched):
            each.train_batch(local_batch(each, global_batch(1)), loss)
            pending(each, 2)
        gradients = gradients_of(engine)
        refused = pytest.raises(
            RuntimeError, match=r"the optimizer step failed, and left the .* as they were: .*RESOURCE"
        )
        with failing(program, consumes=False), refused:
            engine.optimizer_step()
        # Gradients are still pending: the step can be taken again.
        assert same_bits(gradients_of(engine), gradients)
        assert engine.optimizer_step() == untouched.optimizer_step()
        assert_equal_steps(engine, untouched, 3)


@pytest.mark.parametrize("backend", [layout("jax:d1")])
@pytest.mark.parametrize(
    ("program", "consumes"), [("bridge._forward", False), ("bridge._pull", False), ("bridge._pull", True)]
)
def test_failed_forward_and_backward_leave_a_usable_engine(program: str, consumes: bool, backend: str) -> None:
    with started(backend) as engine, started(backend) as untouched:
        pending(engine, 1)
        refused = pytest.raises(
            RuntimeError, match=r"out of memory in micro-batch 0 of .*RESOURCE.*all pending gradients were discarded"
        )
        with failing(program, consumes=consumes), refused:
            pending(engine, 2)
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.optimizer_step()
        assert_equal_steps(engine, untouched, 3)


@pytest.mark.parametrize("backend", [layout("jax:d1")])
def test_interrupts_lose_nothing_silently(backend: str, tmp_path: Path) -> None:
    def interrupted(program: str, run: Callable[[], Any], *, consumes: bool) -> None:
        interrupt = failing(program, consumes=consumes, error=KeyboardInterrupt())
        with interrupt, pytest.raises(KeyboardInterrupt):
            run()

    with started(backend) as engine:
        # A backward, or the clipping, without the gradients that were pending.
        for program, run in (
            ("bridge._pull", lambda: pending(engine, 2)),
            ("model_arrays._scaled", engine.optimizer_step),
        ):
            pending(engine, 1)
            interrupted(program, run, consumes=True)
            with pytest.raises(RuntimeError, match="no gradient is pending"):
                engine.optimizer_step()
        # An update that has not begun, and one without its results.
        pending(engine, 1)
        interrupted("optimizer._update", engine.optimizer_step, consumes=False)
        assert engine.optimizer_step().grad_norm == pytest.approx(OPTIMIZER.gradient_clipping, 1e-4)
        pending(engine, 1)
        interrupted("optimizer._update", engine.optimizer_step, consumes=True)
        with pytest.raises(EngineLostError, match=rf"weights and optimizer state are lost.*{LOST}"):
            engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        with pytest.raises(RuntimeError, match="the engine cannot be used"):
            engine.forward_batch([])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("backend", [layout("jax:d2")])
def test_failed_loss_on_one_rank_leaves_a_usable_engine(backend: str) -> None:
    """The other rank runs the same programs: all of them to the end."""

    def broken(out: TokenOutputs, mb: Batch) -> Tensor:
        if last():
            raise ZeroDivisionError("a loss of this rank")
        return loss(out, mb)

    with started(backend) as engine, started(backend) as untouched:
        pending(engine, 1)
        with pytest.raises(
            RuntimeError, match=r"rank 1: .*a loss of this rank(.|\n)*all pending gradients were discarded"
        ):
            engine.forward_backward(local_batch(engine, global_batch(2)), broken)
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.optimizer_step()
        assert_equal_steps(engine, untouched, 3)
