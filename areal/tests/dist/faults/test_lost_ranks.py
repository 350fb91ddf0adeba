"""Faults that leave ranks out of step: out of memory, a failing model, a dead rank.

The other ranks raise within seconds.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from areal.api import Batch, FinetuneSpec, TokenOutputs, TrainEngine
from areal.engine.registry import create_engine
from areal.tests.harness import pool as pool_module
from areal.tests.harness.limits import promptly
from areal.tests.harness.pool import Pool, WorldFailure
from areal.tests.harness.refused import NEEDS_RESET
from areal.tests.harness.tiny import (
    config,
    family_dir,
    global_batch,
    layouts,
    local_batch,
    loss,
    process_groups,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.worker import Call
from areal.tests.harness.world import world
from areal.utils.distributed import RankLostError

UNUSABLE = "the engine cannot be used any more"


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


@contextmanager
def mlp_that(engine: TrainEngine, act: Callable[[Tensor], Tensor], *, on_call: int) -> Iterator[None]:
    """Apply ``act`` to the input of the ``on_call``-th call of a feed-forward layer, from 0."""
    kind = next(type(m) for m in engine._components.model.modules() if type(m).__name__.endswith("MLP"))
    plain, calls = kind.__call__, 0

    def call(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(self, act(x) if calls == on_call + 1 else x, *args, **options)

    with mock.patch.object(kind, "__call__", call):
        yield


def no_memory(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def broken(x: Tensor) -> Tensor:
    raise ArithmeticError("an unlucky kernel")


MEMORY: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "first layer": (no_memory, 0, 0),
    "last layer": (no_memory, 0, 1),
    "second micro-batch": (no_memory, 1, 1),
    "backward": (_FailsBackward.apply, 0, 0),
    "backward of the second micro-batch": (_FailsBackward.apply, 1, 1),
}
"""Point where memory runs out -> (function, micro-batch, layer out of two)."""


OVERLAP = {"megatron": {"overlap_param_gather": True, "bucket_size": 1000}}


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("fsdp:d1", {}, marks=NEEDS_RESET),
        pytest.param("fsdp:d1", {"activation_checkpointing": "full"}, marks=NEEDS_RESET),
        pytest.param("fsdp:d1", {"grad_sync": "micro_batch"}, marks=NEEDS_RESET),
        ("megatron:d1", {}),
        ("megatron:d1", OVERLAP),
    ],
    ids=str,
)
def test_single_rank_recovers_from_out_of_memory(backend: str, options: dict[str, Any]) -> None:
    with started(backend, **options) as engine, started(backend, **options) as untouched:
        calls = 4 if options.get("activation_checkpointing") else 2  # number of calls of a layer in a micro-batch
        for where, (act, index, layer) in MEMORY.items():
            mbs = engine.microbatches(global_batch())
            fails = mlp_that(engine, act, on_call=index * calls + layer)
            with pytest.raises(RuntimeError) as caught, fails:  # noqa: PT012
                engine.train_batch(global_batch(), loss)
                pytest.fail(f"no error in the {where}")
            assert f"out of memory in micro-batch {index} of {mbs[index].n_tokens} tokens" in str(caught.value)
            assert "lower mb_spec.max_tokens_per_mb" in str(caught.value)
            with pytest.raises(RuntimeError, match="no gradient is pending"):
                engine.named_gradients()
            actual, expected = engine.train_batch(global_batch(), loss), untouched.train_batch(global_batch(), loss)
            assert (actual.loss, actual.grad_norm) == (expected.loss, expected.grad_norm), f"after the {where}"
        assert same_bits(weights_of(engine), weights_of(untouched))
        fails = mlp_that(engine, no_memory, on_call=0)
        with pytest.raises(RuntimeError, match="out of memory in micro-batch 0"), fails:
            engine.forward_batch(global_batch())
        actual = engine.forward_batch(global_batch())
        assert all(map(torch.equal, actual, untouched.forward_batch(global_batch())))


@pytest.mark.parametrize("backend", layouts(2, also=("fsdp:p2",)))
@pytest.mark.parametrize(
    ("act", "guilty"),
    [(no_memory, 1), (_FailsBackward.apply, 1), (broken, 0)],
    ids=["forward", "backward", "other error"],
)
def test_model_error_on_one_rank_raises_on_all_ranks(
    backend: str, act: Callable[[Tensor], Tensor], guilty: int
) -> None:
    groups = process_groups()
    engine = create_engine(config(backend))
    with started(backend) as untouched:
        initialize(engine)
        expected = untouched.train_batch(local_batch(untouched, global_batch()), loss)
    last = 2 // engine.dims.pp - 1  # number of layers on this rank
    with (
        mlp_that(engine, act if world().rank == guilty else torch.clone, on_call=last),
        promptly(),
        pytest.raises(RuntimeError) as caught,
    ):
        engine.train_batch(local_batch(engine, global_batch()), loss)
    what = "ArithmeticError in" if act is broken else "out of memory in"
    assert re.search(rf"rank {guilty}: (RuntimeError: )?{what} micro-batch 0 of", str(caught.value))
    assert UNUSABLE in str(caught.value)
    for verb in (engine.train_batch, engine.eval_batch):
        with promptly(), pytest.raises(RuntimeError, match="cannot be used"):
            verb(global_batch(), loss)
    engine.destroy()
    with started(backend) as successor:
        actual = successor.train_batch(local_batch(successor, global_batch()), loss)
        assert (actual.loss, actual.grad_norm) == (expected.loss, expected.grad_norm)
    assert process_groups() == groups


def initialize(engine: TrainEngine) -> None:
    engine.initialize(FinetuneSpec(total_train_steps=1000))


# ---- a rank that dies: in a separate pool, which ends with the test

SILENCE = 3.0


def die_in_a_loss(dead: int, signal_number: int) -> None:
    """Kill or stop a rank in the middle of the second step."""
    with survivors_answer(dead) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)

        def last(out: TokenOutputs, batch: Batch) -> Tensor:
            if world().rank == dead:
                os.kill(os.getpid(), signal_number)
            return loss(out, batch)

        engine.train_batch(local_batch(engine, global_batch()), last)


def die_between_steps(dead: int) -> None:
    """End a rank between steps; the others notice in the next call."""
    with survivors_answer(dead) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        if world().rank == dead:
            os._exit(3)
        engine.train_batch(local_batch(engine, global_batch()), loss)


def die_in_the_model(dead: int, signal_number: int, backend: str) -> None:
    """Kill or stop a rank in a layer, where the others wait for its weight shard or pipeline stage."""
    with survivors_answer(dead, backend) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)

        def kill(x: Tensor) -> Tensor:
            if world().rank == dead:
                os.kill(os.getpid(), signal_number)
            return x

        with mlp_that(engine, kill, on_call=0):
            engine.train_batch(local_batch(engine, global_batch()), loss)


@contextmanager
def survivors_answer(dead: int, backend: str = "fsdp:d3") -> Iterator[TrainEngine]:
    """Lose a rank of an engine on three ranks. The survivors must name it promptly, and raise promptly at the next call."""
    path = family_dir("qwen3", num_hidden_layers=3)  # one layer for each stage of p3
    engine = create_engine(config(backend, path=path, mb_spec={"n_mbs": 2}, heartbeat_timeout=SILENCE))
    initialize(engine)
    pids = engine.control.gather(os.getpid())
    with promptly(), pytest.raises(RankLostError, match=f"rank {dead} of 3 is gone"):
        yield engine
    with promptly():
        with pytest.raises(RuntimeError, match=f"cannot be used: rank {dead} of 3 is gone.* restart the job"):
            engine.eval_batch(global_batch(), loss)
        engine.destroy()
    # A rank that was only stopped ends now.
    with suppress(ProcessLookupError):
        os.kill(pids[dead], signal.SIGKILL)


@pytest.mark.skipif("RANK" in os.environ, reason="starts processes of its own")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("die_in_a_loss", {"dead": 1, "signal_number": signal.SIGKILL}),
        ("die_in_a_loss", {"dead": 0, "signal_number": signal.SIGSTOP}),
        ("die_between_steps", {"dead": 1}),
        pytest.param(
            "die_in_the_model",
            {"dead": 0, "signal_number": signal.SIGKILL, "backend": "fsdp:d3"},
        ),
        ("die_in_the_model", {"dead": 1, "signal_number": signal.SIGSTOP, "backend": "fsdp:d3"}),
        ("die_in_the_model", {"dead": 1, "signal_number": signal.SIGKILL, "backend": "megatron:p3"}),
        pytest.param(
            "die_in_the_model",
            {"dead": 2, "signal_number": signal.SIGSTOP, "backend": "megatron:p3"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(str(getattr(x, "name", x)) for x in value.values()),
)
def test_surviving_ranks_name_the_dead_rank(
    name: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 60.0)
    pool = Pool(3, tmp_path)
    try:
        with pytest.raises(WorldFailure) as failure:
            pool.run(Call(__name__, name, arguments), timeout=100)
    finally:
        pool.close()
    answers = failure.value.answers
    dead = arguments["dead"]
    expected = {rank: "died" if rank == dead else "passed" for rank in range(3)}
    assert {rank: answer.status for rank, answer in answers.items()} == expected, str(failure.value)


# ---- layouts


@pytest.mark.world(1, 2, 4)
def test_mismatched_layout_raises_on_every_rank() -> None:
    size, groups = world().size, process_groups()
    for backend in ("fsdp:d3", "fsdp:d8", "fsdp:c2d3", "fsdp:r3c2"):
        engine = create_engine(config(backend))
        with pytest.raises(ValueError, match=f"but the world has {size}: 'fsdp:.*' would fit, or start") as caught:
            initialize(engine)
        fits = str(caught.value).split("'")[3]
        assert config(fits).dims.world_size == size
        engine.destroy()
    assert process_groups() == groups


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("megatron:r2", r"has no r \(replicated data parallel\)"),
        ("fsdp:d4d2", "'d' stands twice"),
        ("fsdp:d0", "d0 is not a degree"),
        ("fsdp:", "expected 'engine:layout'"),
        ("d2", "expected 'engine:layout'"),
        ("fsdp:x2", "unknown letter 'x'"),
        ("nosuch:d1", "no engine is called 'nosuch'; installed are .*'fsdp'"),
    ],
)
def test_unsupported_layout_raises_at_creation(backend: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_engine(config(backend))


@pytest.mark.world(1, 2)
def test_model_build_error_raises_on_every_rank(tmp_path: Path) -> None:
    groups = process_groups()
    engine = create_engine(config(f"fsdp:d{world().size}", path=str(tmp_path / "nowhere")))
    with pytest.raises((ValueError, RuntimeError), match=r"nowhere.*the engine was not built"):
        initialize(engine)
    with pytest.raises(RuntimeError, match="cannot be used"):
        engine.train_batch(global_batch(), loss)
    engine.destroy()
    assert process_groups() == groups
