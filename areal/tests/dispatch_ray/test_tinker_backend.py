"""The server's training backend on ranks in Ray: the numbers of one process, and the loss of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.unit.tinker.backends.reference import (
    STEP,
    data,
    gradients,
    request,
    run,
    same,
    scaled,
    trained,
    weights,
)
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.backends.prepared import AdapterSpec, PassResult
from areal.tinker.backends.training.engine_backend import EngineBackend, create

RAY = {"environment": {"OMP_NUM_THREADS": "1"}, "hang_seconds": 60.0}
OVERFLOW = scaled(data("logprobs", "advantages"), 1e30, "logprobs")


@contextmanager
def started(backend: str, **config: Any) -> Iterator[EngineBackend]:
    made = create(model_dir("qwen3"), backend, {"dtype": "float32", "max_tokens_per_mb": 64, **config})
    try:
        yield made
    finally:
        made.close()


def history(server: EngineBackend, model: str, steps: int) -> list[Any]:
    out: list[Any] = []
    for number in range(steps):
        result = run(server, request(model, data("weights", seed=number)))
        out += [result.metrics, [x.tobytes() for x in result.logprobs], server.optim_step(model, STEP)]
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:t2"])
def test_ranks_in_ray_train_as_one_process(cluster: Any, backend: str, tmp_path: Path) -> None:
    with started(backend, ray=RAY, adapter_memory_mb=1) as ranks, started("fsdp:d1") as alone:
        for server in (ranks, alone):
            for model, seed in (("a", 1), ("b", 2)):
                server.create_model(model, AdapterSpec(4, seed=seed))
        assert ranks.limits() == alone.limits()
        assert same(weights(ranks, "a"), weights(alone, "a"))

        # Two models, and requests that fail alone, also with fewer samples than ranks and several targets at a position.
        batches = [
            request("a", data("weights")),
            request("a", OVERFLOW, "importance_sampling"),
            request(
                "b",
                data("logprobs", "advantages", "sequence_ratio_mask"),
                "gspo",
                clip_low_threshold=0.1,
                clip_high_threshold=9.0,
            ),
            request("a", data("weights", lengths=(12,), targets=2)),
        ]
        mine, theirs = ranks.forward_backward(batches), alone.forward_backward(batches)
        assert isinstance(mine[1], UserError)
        assert "the loss must be finite" in str(mine[1])
        for index in (0, 2, 3):
            x, y = mine[index], theirs[index]
            assert isinstance(x, PassResult)
            assert isinstance(y, PassResult)
            assert x.metrics == pytest.approx(y.metrics, rel=1e-5)
            for p, q in zip(x.logprobs, y.logprobs, strict=True):
                assert (p.shape, p.dtype) == (q.shape, q.dtype)
                np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-4)
        expected = gradients(alone, "a")
        for name, gradient in gradients(ranks, "a").items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max())
            )

        # Steps, of which one is without a gradient.
        for _ in range(2):
            for model in "ba":
                norms = [server.optim_step(model, STEP)["grad_norm:mean"] for server in (ranks, alone)]
                assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        # Memory is that of each rank.
        with pytest.raises(UserError, match=r"memory is short.* on rank 0"):
            ranks.create_model("big", AdapterSpec(128))

        # Checkpoints go from ranks to one process, and the other way round, and resume is exact.
        ranks.save("a", tmp_path / "ranks")
        alone.load("c", tmp_path / "ranks", with_optimizer=True)
        alone.save("c", tmp_path / "alone")
        for model in "cd":
            ranks.load(model, tmp_path / "alone", with_optimizer=True)
        assert history(ranks, "c", 3) == history(ranks, "d", 3) == history(ranks, "a", 3)
        assert same(weights(ranks, "c"), weights(ranks, "a"))


@pytest.mark.timeout(300)
def test_loss_of_a_rank_loses_the_models(cluster: Any, tmp_path: Path) -> None:
    """A killed process is an error of all calls until the restart, and of the health. A checkpoint goes on exactly."""
    with started("fsdp:d2", ray=RAY) as ranks:
        trained(ranks, "a", steps=2)
        ranks.save("a", tmp_path / "a")
        expected = history(ranks, "a", 2)
        os.kill(ranks.group.run(lambda engine, _: os.getpid())[1], signal.SIGKILL)
        with pytest.raises(BackendLostError, match="the training processes were lost, and all models with them"):
            run(ranks, request("a", data("weights")))
        assert not ranks.healthy()
        with pytest.raises(BackendLostError):
            ranks.create_model("b", AdapterSpec(4))
        ranks.restart()
        assert ranks.healthy()
        ranks.load("a", tmp_path / "a", with_optimizer=True)
        assert history(ranks, "a", 2) == expected

        # Between calls, the health shows it without a call.
        os.kill(ranks.group.run(lambda engine, _: os.getpid())[0], signal.SIGKILL)
        wait_until(lambda: not ranks.healthy(), "the loss is noticed")
        with pytest.raises(BackendLostError):
            ranks.optim_step("a", STEP)


@pytest.mark.timeout(300)
def test_one_rank_may_be_in_ray(cluster: Any) -> None:
    """With the bits of one process."""
    with started("fsdp:d1", ray=RAY) as ranks, started("fsdp:d1") as alone:
        for server in (ranks, alone):
            trained(server, "a")
        assert history(ranks, "a", 2) == history(alone, "a", 2)
